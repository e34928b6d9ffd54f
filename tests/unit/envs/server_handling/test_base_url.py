"""A base_url that was given without /v1 is an error at once, which says so."""

import re

import pytest
from aiohttp.test_utils import unused_port

from atroposlib.envs.commands.discovery import served_model
from atroposlib.envs.commands.reporting import StartUp
from atroposlib.envs.errors import PeerError
from atroposlib.envs.server_handling.errors import (
    PermanentServerError,
    ServerUnreachableError,
    WrongAddress,
    status_error,
)
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.testing.fake_inference_server import FakeInferenceServer


async def test_a_living_server_that_does_not_know_the_address_is_not_waited_for() -> None:
    async with FakeInferenceServer() as server:
        config = APIServerConfig(server_type="vllm", base_url=server.base_url.removesuffix("/v1"))
        right = re.escape(f"did you forget /v1? Try --openai.base_url {server.base_url}") + "$"
        with pytest.raises(PeerError, match=rf"/models replied 404; {right}"):
            await served_model(config, timeout_s=60, start=StartUp("env"))
        assert server.hits["/models"] == 1
        config = APIServerConfig(server_type="vllm", base_url=server.base_url.replace("/v1", "/llm/v1"))
        with pytest.raises(PeerError, match=r"/llm/v1/models replied 404; correct --openai.base_url"):
            await served_model(config, timeout_s=60, start=StartUp("env"))


async def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    config = APIServerConfig(server_type="vllm", base_url=f"http://127.0.0.1:{unused_port()}")
    with pytest.raises(PeerError, match=r"within 0.2 s .*start the inference server"):
        await served_model(config, timeout_s=0.2, start=StartUp("env"))


@pytest.mark.parametrize(
    ("url", "hinted"),
    [
        ("http://a/chat/completions", "did you forget /v1? Try --openai.base_url http://a/v1"),
        ("http://a/v2/models", "did you forget /v1? Try --openai.base_url http://a/v1"),
        ("http://a/generate", "gives no token ids"),
        ("http://a/v1/completions", ""),
    ],
)
def test_so_is_a_request_that_is_answered_404(url: str, hinted: str) -> None:
    error = status_error(url, 404, "Not Found", {})
    assert isinstance(error, WrongAddress if hinted else PermanentServerError)
    assert hinted in str(error)
    assert isinstance(error, WrongAddress) == bool(hinted)


async def test_a_name_that_can_be_no_hosts_is_what_is_wrong_with_the_server() -> None:
    server = VLLMServer(APIServerConfig(server_type="vllm", base_url="http://gpu7..local:9001/v1", model_name="m"))
    assert "http://gpu7..local:9001/health: " in str(await server.probe())
    with pytest.raises(ServerUnreachableError, match=r"http://gpu7\.\.local:9001/generate: "):
        await server.request_tokens({"input_ids": [1]})
    await server.close()
