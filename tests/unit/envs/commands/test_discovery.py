"""What a server of models replies when an environment asks for the served one."""

from typing import Any

import pytest
from aiohttp import web

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.commands.discovery import served_model
from atroposlib.envs.commands.reporting import StartUp
from atroposlib.envs.errors import PeerError
from atroposlib.testing.fake_inference_server import FakeInferenceServer


class OddServer(FakeInferenceServer):
    """Replies with `body` where the models are listed."""

    body: Any = None

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.body)


@pytest.mark.parametrize("body", [{"data": []}, {"data": None}, {}, [], None, "models", {"data": [{"id": 3}]}])
async def test_a_list_without_a_model_is_waited_for_and_named(body: Any) -> None:
    odd = OddServer()
    odd.body = body
    async with odd as server:
        with pytest.raises(PeerError, match="its reply lists no model"):
            await served_model(APIServerConfig(base_url=server.base_url), 0.2, StartUp("math"))
