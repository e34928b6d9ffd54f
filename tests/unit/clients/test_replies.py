"""Replies that do not end, or are larger than what was asked for: refused at the limit, compressed or not."""

import asyncio
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from atroposlib.clients.openenv import Limits, NotOpenEnv, OpenEnvClient
from atroposlib.clients.replies import (
    MOST_BYTES,
    SLACK_BYTES,
    TOKEN_BYTES,
    BoundedResponse,
    ReplyTooLong,
    at_most,
    limit_of_sampling,
)
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from tests.serving import serving

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PIECE = b" " * (1 << 20)
_pieces = zlib.compressobj(1, wbits=31)
BOMB = b"".join([_pieces.compress(PIECE) for _ in range(1 << 10)]) + _pieces.flush()


async def endless(request: web.Request) -> web.StreamResponse:
    """Until the client hangs up."""
    reply = web.StreamResponse(headers={"Content-Type": "application/json"})
    await reply.prepare(request)
    while True:
        await reply.write(PIECE)


async def bomb(request: web.Request) -> web.StreamResponse:
    """A gigabyte in one megabyte."""
    return web.Response(body=BOMB, headers={"Content-Type": "application/json", "Content-Encoding": "gzip"})


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[str]]]:
    async with AsyncExitStack() as stack:

        async def started(handler: Handler) -> str:
            return await stack.enter_async_context(serving([web.route("*", "/{path:.*}", handler)]))

        yield started


def client(kind: type[OpenAIServer], url: str, server_type: Any) -> OpenAIServer:
    return kind(APIServerConfig(base_url=f"{url}/v1", model_name="m", server_type=server_type))


@pytest.mark.parametrize("handler", [endless, bomb])
@pytest.mark.parametrize("asked", ["tokens", "prompt", "chat", "completion", "sglang"])
async def test_a_reply_without_end_is_refused_with_server_limit_and_bytes(
    serve: Any, handler: Handler, asked: str
) -> None:
    url = await serve(handler)
    server = client(SGLangServer, url, "sglang") if asked == "sglang" else client(VLLMServer, url, "vllm")
    few = {"max_tokens": 16, "n": 2}
    acts: dict[str, Callable[[], Awaitable[Any]]] = {
        "tokens": lambda: server.request_tokens({"input_ids": [1, 2], **few}),
        "sglang": lambda: server.request_tokens({"input_ids": [1, 2], **few}),
        "prompt": lambda: server.request_prompt_logprobs({"input_ids": [1, 2]}),
        "chat": lambda: server.request_chat({"messages": [{"role": "user", "content": "x"}], **few}),
        "completion": lambda: server.request_completion({"prompt": "x", **few}),
    }
    tracemalloc.start()
    try:
        with pytest.raises(PermanentServerError, match=rf"{url}/.* replied with more than the [\d,]+ bytes"):
            await asyncio.wait_for(acts[asked](), 30)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20  # the bomb's decompressor makes 64 MB at a time
    finally:
        tracemalloc.stop()
        await server.close()


async def test_an_error_without_end_is_refused_too(serve: Any) -> None:
    async def refusing(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(status=500)
        await reply.prepare(request)
        while True:
            await reply.write(PIECE)

    server = client(VLLMServer, await serve(refusing), "vllm")
    for act in (server.request_tokens({"input_ids": [1], "max_tokens": 1}), server.request_chat({"messages": []})):
        with pytest.raises(PermanentServerError, match="more than"):
            await asyncio.wait_for(act, 30)
    await server.close()


async def test_what_was_asked_for_is_read_whole_also_compressed(serve: Any) -> None:
    content = {"text": "x" * 3_000_000}

    async def honest(request: web.Request) -> web.StreamResponse:
        reply = web.json_response(content)
        reply.enable_compression()
        return reply

    url = await serve(honest)
    async with aiohttp.ClientSession(response_class=BoundedResponse) as session:
        async with session.get(url) as reply:
            assert await reply.json() == content
            assert json.loads(await reply.text()) == content
        with at_most(1_000_000):
            async with session.get(url) as reply:
                with pytest.raises(ReplyTooLong, match=r"more than the 1,000,000 bytes that were asked for \(1,0"):
                    await reply.read()
        async with session.get(url) as reply:
            assert await reply.json() == content, "the limit was of one request"


@pytest.mark.parametrize(
    ("body", "prompt", "least"),
    [
        ({"max_tokens": 100}, 0, 100 * TOKEN_BYTES),
        ({"max_tokens": 100, "n": 8}, 50, 8 * 150 * TOKEN_BYTES),
        ({"max_new_tokens": 100}, 0, 100 * TOKEN_BYTES),
        ({"sampling_params": {"max_new_tokens": 100, "n": 2}}, 0, 200 * TOKEN_BYTES),
        ({"max_tokens": 1, "prompt_logprobs": 20}, 1_000, 1_000 * 20 * 100),
        ({"max_tokens": 10, "extra_body": {"prompt_logprobs": 5}}, 100, 100 * 5 * 100),
        ({"max_tokens": 10, "logprobs": True, "top_logprobs": 20}, 0, 10 * 20 * 100),
        ({}, 0, 8_192 * TOKEN_BYTES),
        ({"max_tokens": None, "n": None}, 0, 8_192 * TOKEN_BYTES),
        ({"max_tokens": "x", "n": float("nan")}, 0, 8_192 * TOKEN_BYTES),
    ],
)
def test_the_limit_follows_what_was_asked(body: dict[str, Any], prompt: int, least: int) -> None:
    assert SLACK_BYTES + least <= limit_of_sampling(body, prompt) <= MOST_BYTES


def test_no_request_has_a_limit_beyond_the_largest() -> None:
    assert limit_of_sampling({"max_tokens": 10**300, "n": 10**9}, 10**9) == MOST_BYTES
    assert limit_of_sampling({"max_tokens": -5, "n": -1}) == SLACK_BYTES


@pytest.mark.parametrize("handler", [endless, bomb])
async def test_a_page_of_an_openenv_server_has_a_limit(serve: Any, handler: Handler) -> None:
    client = OpenEnvClient(await serve(handler), Limits())
    tracemalloc.start()
    try:
        with pytest.raises(NotOpenEnv, match="/schema sends more than 4,194,304 bytes; is that"):
            await client.schema()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
        await client.close()
