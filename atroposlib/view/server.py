"""The window's HTTP server: for pages of its own, loopback unless told otherwise.

Everything is GET and writes nothing, but one route: PUT replaces the notes of a run. It is answered where only this
machine reaches the server and nothing stands before it, and to a page of its own or to a program.

    /                       the page, and what it loads from /static/
    /api/runs               the runs
    /api/compare            the settings in which some of them differ; everything else is below /api/runs/LABEL
      .../metrics  .../evaluations  .../timeline  .../settings  .../environments  .../logs  .../held_out
      .../groups  .../groups/N  .../notes

Every reply is JSON. A request that cannot be answered gets {"detail": TEXT}. Work that reads files runs in a few
threads; between requests nothing runs, unless a file is still being indexed.
"""

import functools
import gzip
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.http_guard import HostGuard, OwnHosts, is_loopback
from atroposlib.row_files.json_text import encode
from atroposlib.view import replies
from atroposlib.view.replies import BadRequest, NotFound
from atroposlib.view.run_data.notes import MAX_BYTES
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


class _Answers:
    """Answers in threads, of which few run at once."""

    def __init__(self, runs: Runs, takes_notes: bool) -> None:
        self._runs, self._takes_notes = runs, takes_notes
        self._limiter: anyio.CapacityLimiter | None = None  # made in the event loop
        self._static = {path.name: path for path in sorted(PAGE.glob("*")) if path.suffix in TYPES}

    def to(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint whose reply is what `answer` returns."""

        async def endpoint(request: Request) -> Response:
            try:
                return _json(await self._in_thread(functools.partial(answer, self._runs, request)))
            except NotFound as error:
                return _json({"detail": str(error)}, 404)
            except BadRequest as error:
                return _json({"detail": str(error)}, 422)
            except OSError as error:  # a file that has gone, or a link; a directory that is not to be written
                doing, status = ("read", 404) if request.method in ("GET", "HEAD") else ("written", 409)
                return _json({"detail": f"cannot be {doing}: {error.strerror or error}"}, status)

        return endpoint

    async def notes(self, request: Request) -> Response:
        """Replace a run's notes. The content type keeps forms of other pages out, beside what HostGuard does."""
        if not self._takes_notes:
            return _json({"detail": "notes are kept for runs in files, by a window that others cannot reach"}, 403)
        if request.headers.get("content-type") != "application/json":
            return _json({"detail": "notes are sent as application/json"}, 415)
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > MAX_BYTES:
                return _json({"detail": f"notes have at most {MAX_BYTES} bytes"}, 413)
        return await self.to(functools.partial(replies.keep_notes, content))(request)

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        path = self._static.get(request.path_params.get("name", "view.html"))
        if path is None:
            return _json({"detail": "there is no such file"}, 404)
        return _file(await self._in_thread(path.read_bytes), TYPES[path.suffix], request)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self._limiter = self._limiter or anyio.CapacityLimiter(THREADS)
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)


def create_app(runs: Runs, host: str = "127.0.0.1", allowed_hosts: Sequence[str] = ()) -> ASGIApp:
    """The window on these runs."""
    answers = _Answers(runs, takes_notes=runs.keep_notes and is_loopback(host) and not allowed_hosts)
    routes = [
        Route("/", answers.file, methods=["GET"]),
        Route("/static/{name}", answers.file, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/api/runs/{run}/notes", answers.notes, methods=["PUT"]),
        *(Route(path, answers.to(answer), methods=["GET"]) for path, answer in replies.ROUTES.items()),
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
    """What files of others hold is checked where it is read; a path may have bytes that are no text, shown as `?`."""
    try:
        content = encode(value, default=_text, any_keys=True)
    except TypeError:
        readable = json.dumps(value, ensure_ascii=False, default=_text).encode(errors="replace")
        content = encode(json.loads(readable), default=_text)
    return Response(content, status, media_type="application/json")


def _text(value: object) -> str:
    """Return what a page shows for a value that is not JSON: an integer of more than 64 bits in full."""
    return f"{value:#x}" if isinstance(value, int) else str(value)  # without the limit that decimal digits have
