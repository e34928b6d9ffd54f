"""The window's HTTP server: GET only, for pages of its own, loopback unless told otherwise. It writes nothing.

    /                       the page, and what it loads from /static/
    /api/runs               the runs; everything else is below /api/runs/LABEL
      .../metrics  .../evaluations  .../timeline  .../settings  .../logs  .../held_out  .../groups  .../groups/N

Every reply is JSON. A request that cannot be answered gets {"detail": TEXT}. Work that reads files runs in a few
threads; between requests nothing runs, unless a file is still being indexed.
"""

import functools
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.http_guard import HostGuard, OwnHosts
from atroposlib.row_files.json_text import encode
from atroposlib.view import replies
from atroposlib.view.replies import BadRequest, NotFound
from atroposlib.view.run_data.runs import Runs

PAGE = Path(__file__).parent / "page"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
THREADS = 4  # requests at work at once: each may hold a large row
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

T = TypeVar("T")
Answer = Callable[[Runs, Request], object]


class SafeHeaders:
    """ASGI middleware: every reply has HEADERS."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        await self._app(scope, receive, with_headers)


def create_app(runs: Runs, host: str = "127.0.0.1", allowed_hosts: Sequence[str] = ()) -> ASGIApp:
    """The window on these runs."""
    limiter: list[anyio.CapacityLimiter] = []  # made in the event loop

    async def in_thread(work: Callable[[], T]) -> T:
        if not limiter:
            limiter.append(anyio.CapacityLimiter(THREADS))
        return await anyio.to_thread.run_sync(work, limiter=limiter[0])

    def answering(answer: Answer) -> Callable[[Request], object]:
        async def endpoint(request: Request) -> Response:
            try:
                return _json(await in_thread(functools.partial(answer, runs, request)))
            except NotFound as error:
                return _json({"detail": str(error)}, 404)
            except BadRequest as error:
                return _json({"detail": str(error)}, 422)
            except OSError as error:  # a file that has gone, or a link
                return _json({"detail": f"cannot be read: {error.strerror or error}"}, 404)

        return endpoint

    static = {path.name: path for path in sorted(PAGE.glob("*")) if path.suffix in TYPES}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "view.html")
        path = static.get(name)
        if path is None:
            return _json({"detail": "there is no such file"}, 404)
        return _file(await in_thread(path.read_bytes), TYPES[path.suffix], request)

    routes = [
        Route("/", file, methods=["GET"]),
        Route("/static/{name}", file, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        *(Route(path, answering(answer), methods=["GET"]) for path, answer in replies.ROUTES.items()),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return SafeHeaders(HostGuard(app, hosts=OwnHosts.of(host, allowed_hosts)))


async def _health(request: Request) -> Response:
    return _json({"status": "ok"})


def _file(data: bytes, media_type: str, request: Request) -> Response:
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        data, headers["Content-Encoding"] = gzip.compress(data, 6, mtime=0), "gzip"
    return Response(data, headers=headers, media_type=media_type)


def _json(value: object, status: int = 200) -> Response:
    return Response(encode(value, default=_text, any_keys=True), status, media_type="application/json")


def _text(value: object) -> str:
    """Return what a page shows for a value that is not JSON: an integer of more than 64 bits in full."""
    return f"{value:#x}" if isinstance(value, int) else str(value)  # without the limit that decimal digits have
