"""Small web servers of a test, on loopback: of aiohttp's routes, or in a thread, an ASGI application, too."""

import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import uvicorn
from aiohttp import web

from atroposlib.addresses import listening_socket


@asynccontextmanager
async def serving(routes: Iterable[web.AbstractRouteDef]) -> AsyncIterator[str]:
    """The address of a server with these routes, such as http://127.0.0.1:40123. It does not wait for its clients."""
    app = web.Application()
    app.add_routes(list(routes))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Asked(NamedTuple):
    """A request as a server of this module hears it."""

    method: str
    path: str
    headers: "Message[str, str]"
    body: bytes


class Reply(NamedTuple):
    """What a server of this module answers."""

    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = MappingProxyType({})


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that many clients open at once


class ThreadedServer:
    """Answers in threads, by a function; where that returns None, the connection closes without an answer."""

    def __init__(self, answer: Callable[[Asked], Reply | None], port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            def reply(self) -> None:
                reply = answer(Asked(self.command, self.path, self.headers, self.body()))
                if reply is None:
                    return
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body)

            do_HEAD = do_GET = do_POST = do_DELETE = reply

            def body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                chunks = []
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size + 2)[:-2])  # a line ends each
                self.rfile.readline()
                return b"".join(chunks)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._http = _Http(("127.0.0.1", port), Handler)
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and refuse connections."""
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def threaded_app(app: Callable[..., Any], port: int = 0, at_once: bool = False, **config: Any) -> Iterator[int]:
    """The port at which uvicorn serves `app` in a thread. It lets requests finish and the app's lifespan end, but for
    one that ends `at_once`.
    """
    with listening_socket("127.0.0.1", port) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, **config))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit, server.force_exit = True, at_once
            thread.join(30)


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
