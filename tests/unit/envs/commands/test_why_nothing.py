"""Why no batch comes, as a trainer's log says it: a real API, an inference server that is none, a real environment."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.settings import RunApiConfig
from atroposlib.envs.base import ScoredDataItem
from atroposlib.envs.commands import cli
from atroposlib.envs.commands.serve import serve
from atroposlib.envs.errors import Unscored
from atroposlib.envs.run.outcomes import FREE_DROPS, pause_s
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.wire.batching import Registration
from example_trainer.loop.api_client import ApiClient
from tests.unit.envs.fakes import Api, CountingEnv, config, running_api, server_config
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)
RUN = Registration("g", "p", 8, 512, "", 0, 0, 20)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.envs.commands.serve.TURN_S", 0.02)
    monkeypatch.setattr("atroposlib.envs.commands.reporting.INTERVAL_S", 0.05)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as api:
        yield api


class Why:
    """A trainer that waits for its first batch, and what its log would say."""

    def __init__(self, api: Api) -> None:
        self.trainer = ApiClient(api.url, RUN, patience_s=20)

    async def start(self) -> None:
        await asyncio.to_thread(self.trainer.register, 0)

    async def says(self, *parts: str) -> str:
        """Return once it says all of them."""
        told = ""

        async def said() -> bool:
            nonlocal told
            with contextlib.suppress(Exception):  # nothing yet
                await asyncio.to_thread(self.trainer._next_batch, 0.0)
            told = await asyncio.to_thread(self.trainer.why_no_batch, "nothing")
            return all(part in told for part in parts)

        try:
            await until(said, 30)
        except TimeoutError:
            raise AssertionError(told) from None
        return told


@contextlib.asynccontextmanager
async def asking(api: Api, *envs: CountingEnv) -> AsyncIterator[Why]:
    """A trainer that asks while the environments run."""
    why = Why(api)
    await why.start()
    running = [asyncio.create_task(serve(env)) for env in envs]
    try:
        yield why
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        why.trainer.close()


class SameScores(CountingEnv):
    async def collect_trajectory(self, item: int) -> tuple[ScoredDataItem | None, list[Any]]:
        sample, later = await super().collect_trajectory(item)
        assert sample is not None
        return sample | {"scores": 0.0}, later


class BrokenGrader(CountingEnv):
    async def collect_trajectory(self, item: int) -> tuple[ScoredDataItem | None, list[Any]]:
        raise Unscored("the grader did not answer within 5 s")


class BrokenCode(CountingEnv):
    async def collect_trajectory(self, item: int) -> tuple[ScoredDataItem | None, list[Any]]:
        raise ZeroDivisionError("of mine")


async def test_no_environment(api: Api) -> None:
    async with asking(api) as why:
        await why.says("0 of 8 rollouts of the next batch have arrived; no environment is registered: start one")


async def test_vllm_is_not_up(tmp_path: Path, api: Api) -> None:
    inference = FakeInferenceServer()
    await inference.start()
    await inference.close()
    env = CountingEnv(config(tmp_path, api.url), server_config(inference))
    async with asking(api, env) as why:
        told = await why.says("environment counting (heard", "not yet registered, waits for the inference server at")
        assert inference.base_url in told


async def test_the_name_of_the_model_is_not_known_yet(tmp_path: Path, api: Api) -> None:
    inference = FakeInferenceServer()
    await inference.start()
    await inference.close()
    servers = server_config(inference)
    servers[0].model_name = "default"
    tree = cli.EnvTree(env=config(tmp_path, api.url, wandb_name="mine"), openai=servers)
    async with asking(api) as why:
        serving = asyncio.create_task(cli.run(CountingEnv, "serve", tree))
        told = await why.says("environment mine (heard", "not yet registered, waits for the inference server at")
        assert inference.base_url in told
        await inference.start()
        await why.says("environment mine_0 (heard", "groups posted")
        assert "not yet registered" not in await why.says("mine_0")
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await inference.close()


@pytest.mark.parametrize(
    ("cls", "parts"),
    [
        (SameScores, (" all scores equal (the last: all scores are 0); every answer of a group scores the same",)),
        (BrokenGrader, (" the grader failed (the last: 4 of its 4 answers could not be scored: the grader did not",)),
        (BrokenCode, (" the environment's code failed (the last: ZeroDivisionError: of mine at ",)),
    ],
)
async def test_every_group_is_dropped(tmp_path: Path, api: Api, cls: type[CountingEnv], parts: tuple[str, ...]) -> None:
    async with FakeInferenceServer() as inference:
        env = cls(config(tmp_path, api.url), server_config(inference))
        async with asking(api, env) as why:
            await why.says("0 of 2 groups of the next batch have arrived", "environment counting_0 (heard", *parts)


async def test_vllm_refuses_in_mid_run(tmp_path: Path, api: Api) -> None:
    async with FakeInferenceServer() as inference:
        env = CountingEnv(config(tmp_path, api.url), server_config(inference))
        inference.delay_s = 0.2
        async with asking(api, env) as why:
            await why.says("samples")
            await inference.close()
            await why.says("waits for the inference server at", inference.base_url)


async def test_the_batch_fills_slowly(tmp_path: Path, api: Api) -> None:
    async with FakeInferenceServer() as inference:

        class Slow(CountingEnv):
            async def collect_trajectories(self, item: int) -> Any:
                if item > 1:
                    await asyncio.sleep(60)
                return await super().collect_trajectories(item)

        env = Slow(config(tmp_path, api.url), server_config(inference))
        async with asking(api, env) as why:
            await why.says("1 of 2 groups of the next batch have arrived", "samples 1 groups; 1 groups posted")


async def test_the_queue_is_full(tmp_path: Path) -> None:
    async with running_api(RunApiConfig(max_queued_groups=1)) as api, FakeInferenceServer() as inference:
        env = CountingEnv(config(tmp_path, api.url), server_config(inference))
        async with asking(api, env) as why:
            await why.says("the API's queue is full: it refuses groups until the trainer takes some")


async def test_nothing_is_sampled_at_full_speed_while_nothing_is_of_use(
    tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.envs.run.outcomes.FREE_DROPS", 20)
    monkeypatch.setattr("atroposlib.envs.run.outcomes.FIRST_PAUSE_S", 60.0)
    async with FakeInferenceServer() as inference:
        env = SameScores(config(tmp_path, api.url), server_config(inference))
        async with asking(api, env) as why:
            await why.says("samples nothing", " all scores equal")
            assert env.taken < 40


def test_pauses_grow_with_the_groups_that_are_dropped_in_a_row() -> None:
    assert [pause_s(dropped) for dropped in (0, FREE_DROPS - 1)] == [0.0, 0.0]
    assert [round(pause_s(FREE_DROPS + more), 2) for more in (0, 100, 200, 500, 10**9)] == [0.05, 0.1, 0.2, 1.6, 10.0]


async def test_an_evaluation_runs(tmp_path: Path, api: Api) -> None:
    class Slow(CountingEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await asyncio.sleep(60)

    async with FakeInferenceServer() as inference:
        env = Slow(config(tmp_path, api.url, eval_at_start=True), server_config(inference))
        async with asking(api, env) as why:
            await why.says("environment counting_0 (heard", "waits for the end of its evaluation, for ")
