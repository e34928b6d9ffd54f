"""Reading bodies and writing replies of the batching API."""

import ipaddress
import zlib
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from atroposlib.api.decoding import RefusedBody, gunzip, too_large
from atroposlib.api.queue import UnknownEnvironment
from atroposlib.logs import get_logger

MIN_COMPRESSED_BYTES = 1000  # smaller replies are sent as they are
MAX_SAID = 256  # distinct warnings; what a client makes vary cannot fill memory or the log

log = get_logger(__name__)
encode = msgspec.json.Encoder().encode


async def read_body(request: Request) -> bytes:
    """The whole body, decompressed. Raises RefusedBody: 400 for broken gzip, 413 above the app's limit."""
    limit: int = request.app.state.max_body_bytes
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        chunks.append(chunk)
    body = b"".join(chunks)
    compressed = "gzip" in request.headers.get("content-encoding", "").lower()
    return gunzip(body, limit) if compressed else body


def reply(content: Any, status: int = 200) -> Response:
    """A small JSON reply."""
    return Response(encode(content), status_code=status, media_type="application/json")


async def large_reply(request: Request, body: bytes) -> Response:
    """JSON bytes, compressed for a distant client that accepts it. On loopback compression only costs time."""
    wanted = "gzip" in request.headers.get("accept-encoding", "").lower()
    if not wanted or len(body) < MIN_COMPRESSED_BYTES or _is_loopback(request):
        return Response(body, media_type="application/json", headers={"Vary": "Accept-Encoding"})
    packed = await run_in_threadpool(_gzip, body)
    return Response(packed, media_type="application/json", headers={"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})


def _gzip(body: bytes) -> bytes:
    return zlib.compress(body, level=1, wbits=31)


def _is_loopback(request: Request) -> bool:
    if request.client is None:  # a Unix socket
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:  # a name that a proxy put there
        return False


def say_once(request: Request, warning: str | None) -> None:
    """Log a warning unless this app has logged the same one since its last reset."""
    said: set[str] = request.app.state.said
    if warning is not None and warning not in said and len(said) < MAX_SAID:
        said.add(warning)
        log.warning("%s", warning)


# --- errors as replies ---------------------------------------------------------------------------------------------------


async def refused(request: Request, error: Exception) -> Response:
    """4xx with the reason; broken gzip is answered in plain text, as ever."""
    assert isinstance(error, RefusedBody)
    log.info("Refused %s %s with %d: %s", request.method, request.url.path, error.status, error.line())
    if error.status == 400:
        return Response(error.message, status_code=400, media_type="text/plain")
    return reply(error.reply(), error.status)


async def unknown_environment(request: Request, error: Exception) -> Response:
    """404: the environment has to register (again)."""
    return reply({"detail": str(error)}, 404)


async def disconnected(request: Request, error: Exception) -> Response:
    """The client went away while sending; nobody reads this reply."""
    log.info("%s %s: the client went away before its body was complete", request.method, request.url.path)
    return Response(status_code=400)


ERROR_REPLIES = {RefusedBody: refused, UnknownEnvironment: unknown_environment, ClientDisconnect: disconnected}
