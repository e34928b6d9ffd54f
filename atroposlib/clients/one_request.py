"""One blocking request to a server of the run: it takes no proxy and follows no redirect, and its reply is bounded.

Each request opens its own connection: a server closes idle connections after 5 s, possibly just as the next request
leaves, and a POST that was lost that way must not be repeated blindly.
"""

import time
from functools import cache
from typing import NamedTuple

import httpx
import msgspec

from atroposlib.clients.bearer import bearer

MOST_BYTES = 1 << 30  # of a reply; the manifest of a model with 100,000 tensors has 20 MB


class NoReply(Exception):
    """No reply came: `reason` names the kind of failure."""

    def __init__(self, reason: str, timed_out: bool) -> None:
        super().__init__(reason)
        self.reason, self.timed_out = reason, timed_out


class Reply(NamedTuple):
    """Holds what a server answered."""

    status: int
    headers: httpx.Headers
    content: bytes


def request(
    method: str,
    url: str,
    *,
    connect_s: float,
    read_s: float,
    whole_s: float = float("inf"),
    key: str | None = None,
    body: object = None,
) -> Reply:
    """Return the reply to `body` as JSON; `key` is the bearer token. Between two pieces of the reply may pass `read_s`,
    until its end `whole_s` seconds. Raises NoReply, UnusableToken.
    """
    ends = time.monotonic() + connect_s + whole_s
    headers = {"Connection": "close"} | bearer(key, f"the key of {url}")
    if body is not None:
        headers["Content-Type"] = "application/json"
    content, limit = bytearray(), httpx.Timeout(read_s, connect=connect_s)
    sent = None if body is None else msgspec.json.encode(body)
    try:
        with _client().stream(method, url, content=sent, headers=headers, timeout=limit) as reply:
            for piece in reply.iter_bytes():
                content += piece
                if time.monotonic() > ends:
                    raise NoReply("the reply does not end", timed_out=True)
                if len(content) > MOST_BYTES:
                    raise NoReply(f"more than {MOST_BYTES:,} bytes", timed_out=False)
    except httpx.TimeoutException as error:
        raise NoReply(type(error).__name__, timed_out=True) from error
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise NoReply("ConnectionError", timed_out=False) from error
    return Reply(reply.status_code, reply.headers, bytes(content))


@cache
def _client() -> httpx.Client:
    """Make the client of all requests, which keeps no connection; making one takes as long as ten requests."""
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
