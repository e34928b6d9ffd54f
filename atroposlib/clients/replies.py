"""Replies of other servers, read in pieces and no further than their limit in bytes, decompressed.

    with at_most(limit_of_sampling(body)):            what this request may be answered with
        async with session.post(...) as reply:        a session with `response_class=BoundedResponse`
            await reply.read()                        or json() or text(); raises ReplyTooLong

    AsyncHttpxClient(event_hooks={"response": [bounded]})    the same for httpx, which the SDK of OpenAI uses

A server that replies without end would otherwise fill this machine's memory. The client that asks knows how much may
come.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import aiohttp

DEFAULT_BYTES = 16 << 20  # of a reply that nothing is known of
ERROR_BYTES = 1 << 20
SLACK_BYTES = 4 << 20
# of one token: its text, escaped, its id and log-probability; routing replay adds the experts of each layer
TOKEN_BYTES = 4 << 10
ALTERNATIVE_BYTES = 512  # of one of the likeliest tokens at a position, as OpenAI's API lists them
LONGEST_ANSWER = 131_072  # tokens, where a request names no limit
MOST_BYTES = 4 << 30
PIECE_BYTES = 1 << 16

_limit: ContextVar[int] = ContextVar("reply_limit", default=DEFAULT_BYTES)


class ReplyTooLong(Exception):
    """A server replied with more than it was asked for."""

    def __init__(self, url: str, limit: int, received: int) -> None:
        super().__init__(
            f"{url} replied with more than the {limit:,} bytes that were asked for ({received:,} received): it is not"
            " the server it should be, or it ignores max_tokens or n"
        )


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Bound the replies of requests that are made inside."""
    before = _limit.set(nbytes)
    try:
        yield
    finally:
        _limit.reset(before)


def limit_of_sampling(body: Mapping[str, Any], prompt_tokens: int = 0) -> int:
    """Bytes of the reply to a request for `n` answers of `max_tokens`, with their log-probabilities. Numbers that are
    none count as absent: the server reports them.
    """
    body = {**body, **(body.get("extra_body") or {}), **(body.get("sampling_params") or {})}
    tokens = _number(body, "max_tokens", "max_completion_tokens", "max_new_tokens", default=LONGEST_ANSWER)
    listed = _number(body, "top_logprobs", "logprobs", "top_logprobs_num", default=0)
    of_prompt = _number(body, "prompt_logprobs", "top_logprobs_num", default=0)
    answers = _number(body, "n", default=1) * (prompt_tokens + tokens) * (TOKEN_BYTES + listed * ALTERNATIVE_BYTES)
    prompt = prompt_tokens * (TOKEN_BYTES + of_prompt * ALTERNATIVE_BYTES)
    return min(SLACK_BYTES + answers + prompt, MOST_BYTES)


def _number(body: Mapping[str, object], *names: str, default: int) -> int:
    given = (body.get(name) for name in names)
    return max(0, next((int(each) for each in given if isinstance(each, int | float) and each == each), default))


class BoundedResponse(aiohttp.ClientResponse):
    """aiohttp's, whose `read` ends at the limit."""

    async def read(self) -> bytes:
        """The body. Raises ReplyTooLong."""
        if self._body is None:
            try:
                self._body = await _gathered(self.content.iter_chunked(PIECE_BYTES), self.status, str(self.url))
            except BaseException:
                self.close()
                raise
        return self._body


async def bounded(reply: Any) -> None:
    """httpx's hook for responses: reads the body of `reply` now. Raises ReplyTooLong."""
    # httpx keeps a body that was read whole here; it offers no other place for one that was read in pieces
    reply._content = await _gathered(reply.aiter_bytes(PIECE_BYTES), reply.status_code, str(reply.url))
    reply.encoding = "utf-8"  # the server's charset may be a codec that makes no text, such as base64


async def _gathered(pieces: AsyncIterator[bytes], status: int, url: str) -> bytes:
    body, limit = bytearray(), _limit.get()
    if status >= 400:  # an error has its reason, whatever was asked for
        limit = min(limit, ERROR_BYTES)
    async for piece in pieces:
        body += piece
        if len(body) > limit:
            raise ReplyTooLong(url, limit, len(body))
    return bytes(body)
