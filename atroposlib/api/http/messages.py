"""Reading bodies and writing replies of the batching API."""

import functools
import gc
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import msgspec
from fastapi import Depends, HTTPException, Request, Response
from starlette.requests import ClientDisconnect

from atroposlib.api.groups.decoding import RefusedBody, decode_body, gunzip, too_large
from atroposlib.api.http.admission import HOLD, RETRY_AFTER_S
from atroposlib.api.journal.journal_file import JournalError
from atroposlib.api.service import KeyReused, NotTheTrainer, QueueFull, RolloutService, TooManyServers
from atroposlib.api.state.queue import GroupTooLarge, NotRegistered, UnknownEnvironment
from atroposlib.http_guard import is_from_browser, is_loopback
from atroposlib.logs import get_logger
from atroposlib.wire.batching import MSGPACK

MIN_COMPRESSED_BYTES = 1000  # smaller replies are sent as they are
INLINE_BYTES = 16_384  # larger bodies are decompressed beside the event loop
MAX_SMALL_BYTES = 2**20  # of a body that holds no groups; these are read on the event loop
MAX_SAID = 256  # distinct warnings; what a client makes vary cannot fill memory or the log

T = TypeVar("T")
log = get_logger(__name__)
encode = msgspec.json.Encoder().encode


def service_of(request: Request) -> RolloutService:
    """The app's only state."""
    service: RolloutService = request.app.state.service
    return service


async def _refuse_browsers(request: Request) -> None:
    """Refuse a state-changing GET that a browser sent: these GETs exist for older clients, not for links."""
    if is_from_browser(request.headers.raw):
        raise HTTPException(403, f"GET {request.url.path} changes state, so no browser may send it")


NO_BROWSER = Depends(_refuse_browsers)


def is_packed(request: Request) -> bool:
    """Return whether the body is MessagePack."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower() in (MSGPACK, "application/x-msgpack")


async def read_record(request: Request, kind: type[T]) -> T:
    """The body of anything but groups, as its record. Raises RefusedBody: 400 for broken gzip, 413 when too large, 422
    for what is no such record.
    """
    return decode_body(
        await read_body(request, min(MAX_SMALL_BYTES, service_of(request).settings.max_body_bytes)), kind
    )


async def read_body(request: Request, limit: int) -> bytes:
    """At most `limit` bytes, decompressed. Raises RefusedBody: 400 for broken gzip, 413 when too large."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        chunks.append(chunk)
    body = b"".join(chunks)
    if "gzip" not in request.headers.get("content-encoding", "").lower():
        return body
    plain = await beside(request, functools.partial(gunzip, body, limit), is_heavy=len(body) > INLINE_BYTES)
    request.scope[HOLD](len(plain))
    return plain


async def beside(request: Request, work: Callable[[], T], *, is_heavy: bool = True) -> T:
    """Run heavy work on a thread, one piece at a time: two would block the event loop for twice as long. Light work
    runs here.
    """
    if not is_heavy:
        return work()
    return await anyio.to_thread.run_sync(_uncollected, work, limiter=request.app.state.heavy_work)


def _uncollected(work: Callable[[], T]) -> T:
    """Pause garbage collection: the collector would walk through everything under construction again and again."""
    gc.disable()
    try:
        return work()
    finally:
        gc.enable()


def reply(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A small JSON reply."""
    return Response(encode(content), status, headers, "application/json")


async def large_reply(request: Request, body: bytes, media_type: str = "application/json") -> Response:
    """A reply of bytes, compressed for a remote client that accepts it. On loopback compression only costs time."""
    vary = {"Vary": "Accept, Accept-Encoding"}
    is_near = request.client is None or is_loopback(request.client.host)  # no client: a Unix socket
    if is_near or len(body) < MIN_COMPRESSED_BYTES or "gzip" not in request.headers.get("accept-encoding", "").lower():
        return Response(body, media_type=media_type, headers=vary)
    compressed = await beside(request, functools.partial(zlib.compress, body, level=1, wbits=31))
    return Response(compressed, media_type=media_type, headers=vary | {"Content-Encoding": "gzip"})


def say_once(request: Request, warning: str | None) -> None:
    """Log a warning unless this app has logged the same one since its last reset."""
    said: set[str] = request.app.state.said
    if warning is not None and warning not in said and len(said) < MAX_SAID:
        said.add(warning)
        log.warning("%s", warning)


# --- errors as replies ----------------------------------------------------------------------------------------------


async def refused(request: Request, error: RefusedBody) -> Response:
    """4xx with the reason; for broken gzip as plain text, as the ancestor did."""
    log.info("Refused %s %s with %d: %s", request.method, request.url.path, error.status, error.line())
    if error.status == 400:
        return Response(error.message, status_code=400, media_type="text/plain")
    return reply(error.reply(), error.status)


async def disconnected(request: Request, error: Exception) -> Response:
    """The client went away while it was sending or waiting; nobody reads this reply."""
    log.info("%s %s: the client went away before it was answered", request.method, request.url.path)
    return Response(status_code=400)


async def not_registered(request: Request, error: NotRegistered) -> Response:
    """Build the answer of a route while no trainer is registered."""
    return reply(error.answer)


async def failed(status: int, request: Request, error: Exception) -> Response:
    """This status, with the reason."""
    return reply({"detail": str(error)}, status, {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else None)


async def too_late(request: Request, error: Exception) -> Response:
    """422: valid on arrival, but a trainer registered with a smaller batch before the group was stored."""
    return reply(RefusedBody(422, str(error), location=("tokens",), kind="too_large").reply(), 422)


ERROR_REPLIES: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
    RefusedBody: refused,
    NotRegistered: not_registered,
    UnknownEnvironment: functools.partial(failed, 404),  # it has to register (again)
    ClientDisconnect: disconnected,
    QueueFull: functools.partial(failed, 429),
    KeyReused: functools.partial(failed, 422),
    TooManyServers: functools.partial(failed, 422),
    JournalError: functools.partial(failed, 507),  # it could not be written, so nothing was changed
    NotTheTrainer: functools.partial(failed, 409),
    GroupTooLarge: too_late,
}
