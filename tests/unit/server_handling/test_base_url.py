"""A base_url that was given without /v1 is an error at once, which says so."""

import pytest
from aiohttp.test_utils import unused_port

from atroposlib.envs.discovery import served_model
from atroposlib.envs.errors import PeerError
from atroposlib.envs.reporting import StartUp
from atroposlib.envs.server_handling.errors import PermanentServerError, status_error
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.testing.fake_inference_server import FakeInferenceServer


async def test_a_living_server_that_does_not_know_the_address_is_not_waited_for() -> None:
    async with FakeInferenceServer() as server:
        config = APIServerConfig(server_type="vllm", base_url=server.base_url.removesuffix("/v1"))
        with pytest.raises(PeerError, match=r"/models replied 404; did you forget /v1 at the end of --openai.base_url"):
            await served_model(config, timeout_s=60, start=StartUp("env"))
        assert server.hits["/models"] == 1


async def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    config = APIServerConfig(server_type="vllm", base_url=f"http://127.0.0.1:{unused_port()}")
    with pytest.raises(PeerError, match=r"within 0.2 s .*start the inference server"):
        await served_model(config, timeout_s=0.2, start=StartUp("env"))


@pytest.mark.parametrize(("url", "hinted"), [("http://a/chat/completions", True), ("http://a/v1/completions", False)])
def test_so_is_a_request_that_is_answered_404(url: str, hinted: bool) -> None:
    error = status_error(url, 404, "Not Found", {})
    assert isinstance(error, PermanentServerError)
    assert ("did you forget /v1" in str(error)) == hinted
