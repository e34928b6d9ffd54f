"""The endpoint as a process of its own: servers that join and leave, and what is loaded before it serves."""

import asyncio
import contextlib
import gc
from pathlib import Path

import httpx
import pytest

from atroposlib.agents.client import EndpointClient
from atroposlib.agents.flags import AgentEndpointConfig
from atroposlib.agents.serve import _serve, following, modules_uncollected
from atroposlib.agents.turn_journal import TurnJournal
from atroposlib.envs.errors import PeerError
from atroposlib.envs.limits.time_limit import time_limit
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.serving import free_port
from tests.unit.agents.support import TOKENIZER, Running, running
from tests.unit.envs.fakes import Trainer, running_api
from tests.waiting import until

CHAT = "/v1/chat/completions"


async def said(started: Running, key: str, text: str) -> str:
    """What the model answers to a first message."""
    reply = await started.post(CHAT, {"messages": [{"role": "user", "content": text}]}, x_api_key=key)
    assert reply.status_code == 200, reply.text
    answer: str = reply.json()["choices"][0]["message"]["content"]
    return answer


async def test_sessions_call_servers_that_join_and_none_that_has_left() -> None:
    async with (
        running_api() as api,
        running(lambda prompt: "first") as started,
        FakeInferenceServer(lambda prompt: "second", TOKENIZER) as joins,
        following(started.manager, api.url),
    ):
        await Trainer(api.url).register()
        _, old = await started.session()
        _, pinned = await started.session(base_url=started.server.base_url)
        assert await said(started, old, "a") == "first"
        first, second = (url.removesuffix("/v1") for url in (started.server.base_url, joins.base_url))
        await change(api.url, second, "serving")
        await until(lambda: len(started.manager.servers) == 2)
        await change(api.url, first, "leaving")
        await until(lambda: len(started.manager.servers) == 1)
        _, new = await started.session()
        assert [await said(started, key, "b") for key in (old, new, pinned)] == ["second", "second", "first"]
        await change(api.url, first, "serving")
        await until(lambda: len(started.manager.servers) == 2)
        await change(api.url, second, "leaving")
        await until(lambda: len(started.manager.servers) == 1)
        assert [await said(started, key, "c") for key in (old, new, pinned)] == ["first"] * 3


async def change(api: str, url: str, state: str) -> None:
    """Announce a server's state, as the trainer and who starts or ends servers do."""
    await Trainer(api).call("POST", "/servers", {"url": url, "state": state})


async def test_an_api_that_is_away_or_lists_no_servers_leaves_those_of_the_start() -> None:
    """What answers here is an inference server, which refuses; the port 9 is nobody's."""
    async with running(lambda prompt: "first") as started:
        for url in (started.server.base_url, "http://127.0.0.1:9"):
            async with following(started.manager, url):
                _, key = await started.session()
                assert await said(started, key, "a") == "first"
        assert [type(each.config) for each in started.manager.servers] == [APIServerConfig]


async def test_the_time_without_an_endpoint_is_not_the_rollouts() -> None:
    with pytest.raises(PeerError, match="agent_endpoint"):
        async with time_limit(0.05):
            await EndpointClient("http://127.0.0.1:9", timeout_s=0.3).process()


async def test_an_endpoint_that_is_ended_during_a_call_ends_with_its_turn_on_disk(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with FakeInferenceServer(lambda prompt: "yes", TOKENIZER) as server:
        config = AgentEndpointConfig(
            server=[server.base_url],
            model="fake",
            tokenizer=str(tmp_path / "tokenizer"),
            port=free_port(),
            journal=tmp_path / "turns.journal",
        )
        serving = asyncio.create_task(_serve(config))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.port}", trust_env=False) as http:

            async def is_there() -> bool:
                with contextlib.suppress(httpx.ConnectError):
                    return (await http.get("/health")).status_code == 200
                return False

            await until(is_there)
            session = (await http.post("/sessions", json={})).json()
            server.delay_s = 1.0
            asked = asyncio.create_task(http.post(CHAT, json=body, headers={"x-api-key": session["key"]}))
            await until(lambda: bool(server.requests))
            serving.cancel()
            assert (await asyncio.wait([serving], timeout=30))[0] == {serving}
            assert (await asked).status_code == 200
    with contextlib.closing(TurnJournal(tmp_path / "turns.journal")) as journal:
        ((record, turns),) = journal.restored()
    assert (record.id, len(turns)) == (session["id"], 1)


def test_what_is_loaded_before_it_serves_is_not_collected_while_it_serves() -> None:
    with modules_uncollected():
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < gc.get_freeze_count()
    assert gc.get_freeze_count() == 0
