"""The client of the batching API: `BatchingApi` blocks, `AsyncBatchingApi` is for event loops.

    api.call(REGISTER, registration) ──▶ Registered      a route of `wire/routes.py`, its request and reply as records

There are three errors, by what the caller can do about them:

    ApiUnreachable    no answer, or "not now" (5xx; 408: too slow; 429: too much): the same request may succeed later.
                      It is a NotYet, so `wait_for` repeats the request
    ApiRefused        any other 4xx: the same request would be refused again
    UnexpectedReply   an ApiRefused: the answer is not the route's record, so perhaps this is not the batching API

Groups travel as MessagePack to an API that reads it, else as JSON, compressed where that makes them smaller.
"""

import asyncio
import contextlib
import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
import msgspec
import numpy as np

from atroposlib.addresses import refused_redirect
from atroposlib.clients.bearer import bearer
from atroposlib.clients.waiting import NotYet
from atroposlib.errors import reason
from atroposlib.wire.batching import MSGPACK, Outcome
from atroposlib.wire.routes import SCORED_DATA, SCORED_DATA_LIST, Route

NOT_NOW = (408, 429)
MAX_RETRY_AFTER_S = 60.0
COMPRESS_FROM_BYTES = 1024

R = TypeVar("R")
H = TypeVar("H", httpx.Client, httpx.AsyncClient)


class ApiUnreachable(NotYet):
    """No connection, no answer in time, a 5xx, 408 or 429."""


class ApiRefused(Exception):
    """A 4xx, a redirect, or a reply of failure; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """The body of a reply. `asked` names the request, `flag` the flag that gave the API's address."""

    asked: str
    flag: str
    content: bytes
    packed: bool

    def decode(self, content: bytes | msgspec.Raw, kind: type[R]) -> R:
        """A piece of the body as a record. Raises msgspec.DecodeError."""
        decoded: R = (msgspec.msgpack if self.packed else msgspec.json).decode(content, type=kind)
        return decoded

    def read(self, kind: type[R]) -> R:
        """The body as a record. Raises UnexpectedReply."""
        try:
            return self.decode(self.content, kind)
        except msgspec.ValidationError as error:
            found = self.decode(self.content, object)
            what = (
                f"something else ({error})"
                if isinstance(found, dict)
                else f"{type(found).__name__} instead of an object"
            )
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            what = f"no JSON ({error})"
        raise UnexpectedReply(f"{self.asked} answered {what}; is {self.flag} the batching API?", self)


class UnexpectedReply(ApiRefused):
    """An answer that is not the route's record."""

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message, 200)
        self.answer = answer


@dataclass(frozen=True)
class Flags:
    """Names what a user would correct, for error messages: what gave the API's address, and what its token."""

    url: str = "--atropos-url"
    token: str = "ATROPOS_API_TOKEN, or --atropos-token"


class _Client(Generic[H]):
    """Makes requests of routes, and reads replies; how they travel is the subclass's."""

    def __init__(self, http: H, url: str, token: str | None, flags: Flags) -> None:
        self._http: H = http
        self.url = url.rstrip("/")
        self._flags = flags
        self._headers = {"Accept": f"{MSGPACK}, application/json", **bearer(token, flags.token)}
        self._reads_msgpack = False  # set from the reply to an environment that registers

    def _request(
        self, route: Route[Any], body: object, query: Mapping[str, int] | None, key: str | None
    ) -> httpx.Request:
        if any(character.isspace() for character in self.url):  # httpx would ask for a host of that name
            raise httpx.InvalidURL("it has a space")
        content, headers = _encoded(body, self._reads_msgpack and route in (SCORED_DATA, SCORED_DATA_LIST))
        headers |= self._headers | ({} if key is None else {"Idempotency-Key": key})
        return self._http.build_request(
            route.method,
            self.url + route.path,
            content=content,
            headers=headers,
            params=query,
            timeout=route.deadline_s,
        )

    @contextlib.contextmanager
    def _reaching(self, route: Route[Any]) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise ApiRefused(f"{self._flags.url} {self.url} cannot be used: {reason(error)}", 400) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise ApiUnreachable(f"no answer within {route.deadline_s:.0f} s") from error
        except httpx.ConnectError as error:
            refused = "refused" in str(error) or "All connection attempts failed" in str(error)
            raise ApiUnreachable("connection refused" if refused else reason(error)) from error
        except httpx.RequestError as error:
            raise ApiUnreachable(reason(error)) from error

    def _read(self, route: Route[R], reply: httpx.Response) -> R:
        asked, status = f"{route.method} {self.url}{route.path}", reply.status_code
        excerpt = " ".join(reply.text[:2000].split())[:300] if status >= 300 else ""
        self._reads_msgpack = self._reads_msgpack or MSGPACK in reply.headers.get("Accept-Post", "")
        if redirected := refused_redirect(self.url + route.path, status, reply.headers.get("Location")):
            raise ApiRefused(redirected, status)
        if status >= 500 or status in NOT_NOW:
            raise ApiUnreachable(f"HTTP {status}: {excerpt}", _seconds(reply.headers.get("Retry-After")))
        if status == 401:
            raise ApiRefused(f"the batching API at {self.url} needs its token: set {self._flags.token}", status)
        if status == 409:
            raise ApiRefused(
                f"another trainer has registered with the batching API at {self.url} and has taken over; end one of"
                " the two",
                status,
            )
        if status >= 400:
            raise ApiRefused(f"{asked} was refused with HTTP {status}: {excerpt}", status)
        packed = reply.headers.get("Content-Type", "").startswith(MSGPACK)
        content = Answer(asked, self._flags.url, reply.content, packed).read(route.reply)
        if isinstance(content, Outcome) and content.status in ("error", "failure"):
            raise ApiRefused(f"{asked} failed: {content.error or content.status}", 400)
        return content


class BatchingApi(_Client[httpx.Client]):
    """Connections to the API at `url`; close it when done. Threads may share it. Raises UnusableToken."""

    def __init__(self, url: str, token: str | None = None, flags: Flags = Flags()) -> None:
        # a proxy of the surroundings does not reach loopback, so its environment variables are left aside
        super().__init__(httpx.Client(trust_env=False), url, token, flags)

    def call(self, route: Route[R], body: object = None, *, query: Mapping[str, int] | None = None) -> R:
        """The reply of `route`. Raises ApiUnreachable, UnexpectedReply or ApiRefused."""
        with self._reaching(route):
            reply = self._http.send(self._request(route, body, query, None))
        return self._read(route, reply)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()


class AsyncBatchingApi(_Client[httpx.AsyncClient]):
    """Is a `BatchingApi` on an event loop. A post of groups that is repeated with the same `key` is stored once."""

    def __init__(self, url: str, token: str | None = None, flags: Flags = Flags()) -> None:
        super().__init__(httpx.AsyncClient(trust_env=False), url, token, flags)

    async def call(
        self, route: Route[R], body: object = None, *, query: Mapping[str, int] | None = None, key: str | None = None
    ) -> R:
        """The reply of `route`. Raises ApiUnreachable, UnexpectedReply or ApiRefused."""
        with self._reaching(route):
            async with asyncio.timeout(route.deadline_s):
                reply = await self._http.send(self._request(route, body, query, key))
        return self._read(route, reply)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()


def _encoded(body: object, packed: bool) -> tuple[bytes | None, dict[str, str]]:
    if body is None:
        return None, {}
    if packed:
        return msgspec.msgpack.encode(body, enc_hook=_plain), {"Content-Type": MSGPACK}
    content, headers = msgspec.json.encode(body, enc_hook=_plain), {"Content-Type": "application/json"}
    if len(content) >= COMPRESS_FROM_BYTES:
        compressed = gzip.compress(content, compresslevel=1)
        if len(compressed) < len(content):
            return compressed, headers | {"Content-Encoding": "gzip"}
    return content, headers


def _plain(value: object) -> object:
    """An array as lists, a NumPy number as Python's."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent to the batching API")


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header, at most a minute. None for 0, which would have every waiter ask without a pause,
    and for a date, which the batching API does not send.
    """
    if retry_after is None or not retry_after.isdecimal():
        return None
    return min(float(retry_after), MAX_RETRY_AFTER_S) or None
