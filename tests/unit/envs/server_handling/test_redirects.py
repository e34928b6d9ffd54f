"""No client follows a redirect: a server that is not what it seems does not have prompts and keys sent elsewhere."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.clients.batching_api import ApiRefused, AsyncBatchingApi
from atroposlib.compat.commands.generation import GenerationConfig, GenerationError, fetch_groups
from atroposlib.envs.commands.discovery import served_model
from atroposlib.envs.commands.reporting import StartUp
from atroposlib.envs.errors import EnvError
from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy_client import create_proxy_session
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from atroposlib.wire.batching import PostedData, Registration
from atroposlib.wire.routes import SCORED_DATA
from example_trainer.bridges import BridgeError
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.loop.api_client import ApiClient, ApiError
from tests.serving import Asked, Reply, ThreadedServer

KEY = "key-that-nobody-else-may-see"
MESSAGES: Any = [{"role": "user", "content": "a prompt"}]


class Recorder(ThreadedServer):
    """Answers every request by `status` and a Location, and notes it."""

    def __init__(self, status: int, target: str) -> None:
        self.requests: list[str] = []

        def answer(asked: Asked) -> Reply:
            self.requests.append(f"{asked.method} {asked.path}")
            return Reply(status, b"", {"Location": target + asked.path})

        super().__init__(answer)


@pytest.fixture
def elsewhere() -> Iterator[Recorder]:
    """Where the redirects lead."""
    with Recorder(200, "") as server:
        yield server


@pytest.fixture(params=[301, 302, 303, 307, 308])
def hostile(request: pytest.FixtureRequest, elsewhere: Recorder) -> Iterator[Recorder]:
    with Recorder(request.param, elsewhere.url) as server:
        yield server


def config(url: str, folder: Path) -> APIServerConfig:
    tokenizer = str(save_tiny_tokenizer(folder))
    return APIServerConfig(base_url=f"{url}/v1", api_key=KEY, model_name="m", tokenizer_name=tokenizer)


async def chat(url: str, folder: Path) -> None:
    server = OpenAIServer(config(url, folder))
    try:
        await server.request_chat({"messages": MESSAGES})
    finally:
        await server.close()


async def completion(url: str, folder: Path) -> None:
    server = OpenAIServer(config(url, folder))
    try:
        await server.request_completion({"prompt": "a prompt"})
    finally:
        await server.close()


async def tokens(url: str, folder: Path, kind: type[VLLMServer] = VLLMServer) -> None:
    server = kind(config(url, folder))
    try:
        await server.request_tokens({"input_ids": [1, 2], "max_tokens": 4})
    finally:
        await server.close()


async def sglang_tokens(url: str, folder: Path) -> None:
    await tokens(url, folder, SGLangServer)


async def trl_tokens(url: str, folder: Path) -> None:
    await tokens(url, folder, TrlVllmServer)


async def discovery(url: str, folder: Path) -> None:
    await served_model(config(url, folder), timeout_s=0.3, start=StartUp("env"))


async def batching_api(url: str, folder: Path) -> None:
    async with contextlib.aclosing(AsyncBatchingApi(url, KEY)) as api:
        await api.call(SCORED_DATA, PostedData([[1]], [[1]], [1.0]))


async def proxy(url: str, folder: Path) -> None:
    await create_proxy_session(url, token=KEY)


async def generation(url: str, folder: Path) -> None:
    await asyncio.to_thread(next, fetch_groups(GenerationConfig(api_url=url, token=KEY)))


async def trainers_api_client(url: str, folder: Path) -> None:
    client = ApiClient(url, Registration("", "", 4, 8, "", 0, 0, 9), patience_s=0.2, token=KEY)
    with pytest.raises(ApiRefused):
        client._beat()  # as the heartbeat's thread does
    await asyncio.to_thread(client.register, 0)


async def trainers_vllm_client(url: str, folder: Path) -> None:
    await asyncio.to_thread(VllmClient("127.0.0.1", int(url.rpartition(":")[2]), KEY, 5.0).commit, "session", 1)


async def trainers_vllm_wait(url: str, folder: Path) -> None:
    client = VllmClient("127.0.0.1", int(url.rpartition(":")[2]), KEY, 5.0)
    await asyncio.to_thread(client.wait_until_ready, 1.0)


CLIENTS: dict[Callable[[str, Path], Awaitable[None]], type[Exception]] = {
    chat: PermanentServerError,
    completion: PermanentServerError,
    tokens: PermanentServerError,
    sglang_tokens: PermanentServerError,
    trl_tokens: PermanentServerError,
    discovery: EnvError,
    batching_api: ApiRefused,
    proxy: PermanentServerError,
    generation: GenerationError,
    trainers_api_client: ApiError,
    trainers_vllm_client: BridgeError,
    trainers_vllm_wait: BridgeError,
}


@pytest.mark.parametrize("call", CLIENTS, ids=lambda call: call.__name__)
async def test_no_client_follows_a_redirect_and_each_names_its_target(
    call: Callable[[str, Path], Awaitable[None]], hostile: Recorder, elsewhere: Recorder, tmp_path: Path
) -> None:
    with pytest.raises(CLIENTS[call]) as raised:
        await call(hostile.url, tmp_path)
    assert elsewhere.url in str(raised.value)
    assert "configure its address" in str(raised.value)
    assert hostile.requests
    assert elsewhere.requests == []
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("kind", [OpenAIServer, VLLMServer])
async def test_a_probe_of_health_is_not_redirected_either(
    kind: type[OpenAIServer], hostile: Recorder, elsewhere: Recorder, tmp_path: Path
) -> None:
    server = kind(config(hostile.url, tmp_path))
    await server.probe()
    await server.close()
    assert hostile.requests
    assert elsewhere.requests == []
