"""An environment whose data has ended says so; one whose code holds the event loop is told at which line."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.loop_watch import LoopWatch
from atroposlib.envs.commands.serve import serve
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, server_config
from tests.waiting import until


class Ending(CountingEnv):
    """Has one item."""

    name = "ending"

    async def get_next_item(self) -> Any:
        self.taken += 1
        return 1 if self.taken == 1 else None


async def test_the_end_of_data_is_on_the_log_and_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atroposlib.envs.commands.serve.NO_ITEMS_TOLD_AFTER_S", 0.0)
    async with FakeInferenceServer() as server, running_api() as api:
        env = Ending(config(tmp_path, api.url), server_config(server))
        trainer = Trainer(api.url, num_steps=3)
        serving = asyncio.create_task(serve(env))
        await trainer.register()
        with caplog.at_level(logging.WARNING):
            await until(lambda: env._env_run.waits_for.startswith("more items"))
            assert "(the environment has no more items since " in env._env_run.waits_for
            await until(lambda: "get_next_item gives None" in caplog.text)
        told = next(record.getMessage() for record in caplog.records if "no more items" in record.getMessage())
        assert "after 1 groups" in told
        assert f"{__file__}:" in told
        await asyncio.sleep(0.5)
        assert caplog.text.count("get_next_item gives None") == 1, "once a minute"
        env.taken = 0
        await until(lambda: not env._env_run.waits_for.startswith("more items"))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_blocking_line_is_named_while_it_blocks(caplog: pytest.LogCaptureFixture) -> None:
    def score() -> None:
        time.sleep(2.0)

    with caplog.at_level(logging.WARNING):
        async with LoopWatch(held_after_s=0.6):
            await asyncio.sleep(0.05)
            score()
            blocked = caplog.text
    assert "The event loop has stood still for " in blocked
    assert f"at {__file__}:" in blocked
    assert "in score: nothing is sampled" in blocked
    assert blocked.count("stood still") <= 2, "at 0.6 and 1.2 s, not at every look"


async def test_a_loop_that_turns_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async with LoopWatch(held_after_s=1.0):
        await asyncio.sleep(1.5)
    assert not caplog.text
