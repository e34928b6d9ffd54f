"""Rollouts that fail: what happens to them, of their siblings and of their group."""

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.errors import EnvError, PeerError, Unscored
from atroposlib.envs.failures import Failure, GroupLost, RolloutFailed, attempt, survivors
from atroposlib.envs.limits.time_limit import paused, time_limit
from atroposlib.envs.server_handling.errors import PermanentServerError, ServerError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, served, server_config

pytestmark = pytest.mark.timeout(60)


async def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TimeoutError(), "timeout"),
        (RolloutFailed("the sandbox is gone"), "infrastructure"),
        (RolloutFailed("the judge is gone", "scorer"), "scorer"),
        (Unscored("no verdict"), "scorer"),
        (PermanentServerError("400"), "infrastructure"),
        (ZeroDivisionError(), "environment"),
    ],
)
async def test_an_error_has_its_cause(error: Exception, cause: str) -> None:
    result = await attempt(raising(error), 60)
    assert isinstance(result, Failure)
    assert (result.cause, result.error) == (cause, error)


async def test_an_error_of_a_task_group_has_the_cause_of_what_was_raised_in_it() -> None:
    async def sample(error: Exception) -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(asyncio.sleep(60))
            inner.create_task(raising(error))

    for error, cause in ((ServerError("503"), "infrastructure"), (Unscored("no verdict"), "scorer")):
        result = await attempt(sample(error), 60)
        assert isinstance(result, Failure)
        assert (result.cause, result.error) == (cause, error)
    with pytest.raises(PeerError, match="no judge"):
        await attempt(sample(PeerError("no judge")), 60)


async def test_a_rollout_that_ends_the_process_has_failed() -> None:
    async def ends() -> None:
        raise SystemExit(3)

    result = await attempt(ends(), 60)
    assert isinstance(result, Failure)
    assert (result.cause, str(result.error)) == ("environment", "SystemExit: 3")


async def test_a_rollout_whose_task_of_its_own_was_cancelled_has_failed_and_a_cancelled_one_has_not() -> None:
    async def waits_for(seconds: float) -> None:
        late = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_later(seconds, late.cancel)
        await late

    result = await attempt(waits_for(0), 60)
    assert isinstance(result, Failure)
    assert result.cause == "environment"
    assert "what it waited for was cancelled (CancelledError) at " in str(result)
    rollout = asyncio.create_task(attempt(waits_for(60), 60))
    await asyncio.sleep(0)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout


async def test_what_is_no_fault_of_a_rollout_is_raised() -> None:
    with pytest.raises(PeerError):
        await attempt(raising(PeerError("the API refuses the token")), 60)


async def test_a_late_rollout_fails_and_one_without_a_limit_does_not() -> None:
    late = await attempt(asyncio.sleep(60), 0.01)
    assert isinstance(late, Failure)
    assert (late.cause, str(late)) == ("timeout", "it took longer than 0.01 s (--env.rollout_timeout)")
    assert await attempt(asyncio.sleep(0.02, "done"), 0) == "done"


async def test_an_error_without_a_text_says_where_it_was_raised() -> None:
    async def gives_up() -> None:
        await asyncio.wait_for(asyncio.sleep(60), 0.01)

    given_up = await attempt(gives_up(), 60)
    assert re.fullmatch(rf"TimeoutError at {re.escape(__file__)}:\d+ in gives_up", str(given_up))
    assert str(Failure("scorer", Unscored())) == ""  # whoever made it without raising it has logged why


async def test_time_in_a_queue_does_not_count() -> None:
    async def waits_twice_at_once() -> str:
        with paused():
            await asyncio.sleep(0.1)

        async def one() -> None:
            with paused():
                await asyncio.sleep(0.1)

        await asyncio.gather(one(), one())
        return "done"

    assert await attempt(waits_twice_at_once(), 0.15) == "done"


async def test_the_clock_goes_on_after_the_queue() -> None:
    async def waits_and_hangs() -> None:
        with paused():
            await asyncio.sleep(0.1)
        await asyncio.sleep(60)

    assert isinstance(await attempt(waits_and_hangs(), 0.05), Failure)


async def test_a_limit_within_a_limit_stops_the_outer_one() -> None:
    async with time_limit(0.2) as outer:
        assert await attempt(asyncio.sleep(0.3, "done"), 10) == "done"
    assert not outer.ran_out


def test_two_must_be_left_and_of_a_smaller_group_all() -> None:
    late = Failure("timeout", TimeoutError("late"))
    assert survivors([1.0, late, 0.0]) == ([1.0, 0.0], Counter(timeout=1))
    assert survivors([1.0]) == ([1.0], Counter())
    for results in ([1.0, late, late], [1.0, late], [late]):
        with pytest.raises(GroupLost, match=r"of its . rollouts failed \(. timeout\): late") as lost:
            survivors(results)
        assert lost.value.count == "items_timed_out"


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([TimeoutError("a"), PermanentServerError("b"), ZeroDivisionError("c")], ZeroDivisionError),
        ([Unscored("a"), PermanentServerError("b"), TimeoutError("c")], ServerError),
        ([TimeoutError("a"), Unscored("b"), Unscored("c")], Unscored),
        ([TimeoutError("a"), RolloutFailed("b"), RolloutFailed("c")], GroupLost),
    ],
)
def test_a_group_is_lost_by_what_its_author_can_act_on_first(errors: list[Exception], raised: type[Exception]) -> None:
    with pytest.raises(raised):
        survivors([Failure("environment", error) for error in errors])


class FifthFails(CountingEnv):
    """Of its rollouts every fifth fails, each time in another way."""

    begun = 0

    async def collect_trajectory(self, item: int) -> Any:
        self.begun += 1
        if self.begun % 5 == 0:
            match self.begun // 5 % 4:
                case 0:
                    raise RolloutFailed("the sandbox is gone")
                case 1:
                    raise Unscored("no verdict")
                case 2:
                    raise ZeroDivisionError("of this rollout")
                case 3:
                    await asyncio.sleep(60)
        return await super().collect_trajectory(item)


async def test_with_a_fifth_of_all_rollouts_failing_no_group_of_eight_is_lost(tmp_path: Path) -> None:
    async with running_api() as api, FakeInferenceServer() as inference:
        settings: dict[str, Any] = {"group_size": 8, "rollout_timeout": 1.5, "max_failed_items": 0}
        env = FifthFails(config(tmp_path, api.url, **settings), server_config(inference))
        trainer = await served(env, Trainer(api.url, batch_size=32, num_steps=3), 3)
    counts, groups = env._env_run.counts, [group for batch in trainer.batches for group in batch]
    assert [len(batch) for batch in trainer.batches] == [4, 4, 4]
    assert [len(group["tokens"]) + sum(group["failed"].values()) for group in groups] == [8] * 12
    assert not [name for name in counts if name.startswith(("items_failed", "items_without", "groups_thrown"))]
    failed = Counter[str]()
    for group in groups:
        failed.update(group["failed"])
    assert set(failed) == {"infrastructure", "scorer", "environment", "timeout"}
    assert all(counts[f"rollouts_failed_{name}"] >= failed[name] for name in failed)
    assert env._env_run.outcomes.failed.total() == sum(counts[f"rollouts_failed_{name}"] for name in failed)


async def test_rollouts_that_wait_for_a_server_are_not_late(tmp_path: Path) -> None:
    """One request at a time: the last of four has its reply after 1.6 s."""
    async with FakeInferenceServer() as inference:
        inference.delay_s = 0.4
        servers = server_config(inference)
        servers[0].num_max_requests_at_once = 1
        env = CountingEnv(config(tmp_path, "", rollout_timeout=1.2), servers)
        async with env._env_run:
            group, _ = await env.collect_trajectories(1)
    assert isinstance(group, dict)
    assert (len(group["tokens"]), "failed" in group) == (4, False)


async def test_a_method_that_samples_by_itself_is_limited_as_a_whole(tmp_path: Path) -> None:
    class OnItsOwn(CountingEnv):
        async def collect_trajectories(self, item: int) -> Any:
            await asyncio.sleep(60)

    async with FakeInferenceServer() as inference:
        env = OnItsOwn(config(tmp_path, "", worker_timeout=0.05), server_config(inference))
        async with env._env_run:
            await env.handle_env(1)
    assert env._env_run.counts["items_timed_out"] == 1
    assert env._env_run.outcomes.dropped == {"too slow": 1}


async def test_a_group_may_say_by_itself_what_failed(tmp_path: Path) -> None:
    class Counted(CountingEnv):
        async def collect_trajectories(self, item: int) -> Any:
            group: dict[str, Any] = {"tokens": [[1], [2]], "masks": [[-100], [-100]], "scores": [0.0, 1.0]}
            return group | {"failed": {"timeout": item}}, []

    async with FakeInferenceServer() as inference:
        env = Counted(config(tmp_path, ""), server_config(inference))
        async with env._env_run:
            await env.handle_env(2)
            await env.handle_env(1)
    assert env._env_run.counts["groups_accepted"] == env._env_run.counts["items_rejected"] == 1
    assert env._env_run.counts["rollouts_failed_timeout"] == 3


async def test_an_error_of_the_whole_environment_ends_the_siblings(tmp_path: Path) -> None:
    class Refused(CountingEnv):
        ended = 0

        async def collect_trajectory(self, item: int) -> Any:
            self.samples += 1
            if self.samples == 4:
                raise EnvError("the token is wrong")
            try:
                await asyncio.sleep(60)
            finally:
                self.ended += 1

    async with FakeInferenceServer() as inference:
        env = Refused(config(tmp_path, ""), server_config(inference))
        async with env._env_run:
            with pytest.raises(EnvError, match="the token is wrong"):
                await env.handle_env(1)
    assert env.ended == 3
