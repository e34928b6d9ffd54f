import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.reporting import Reporting
from atroposlib.envs.commands.serve import serve
from atroposlib.envs.payloads import ScoredDataGroup
from atroposlib.envs.run.dynamic_sampling import BatchFilling, Chosen
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, served, server_config

pytestmark = pytest.mark.timeout(60)


def offered(groups: str, max_items: int, per_batch: int) -> list[tuple[str, str]]:
    """What is sent and what is thrown away after each group; capitals have a signal."""
    filling: BatchFilling[str] = BatchFilling(max_items, on_policy=False)
    chosen = [ended(filling, filling.begin(), group, per_batch) for group in groups]
    return [("".join(each.sent), "".join(each.thrown_away)) for each in chosen]


def ended(filling: BatchFilling[str], item: int, group: str, per_batch: int) -> Chosen[str]:
    filling.add(item, group, group.isupper())
    return filling.end(item, per_batch)


@pytest.mark.parametrize(
    ("groups", "limit", "size", "sent_and_dropped"),
    [
        ("aBcde", 5, 4, [("", ""), ("B", ""), ("", ""), ("", ""), ("acd", "e")]),  # at the limit, the oldest first
        ("aBCdEF", 9, 2, [("", ""), ("B", ""), ("C", "a"), ("", ""), ("E", ""), ("F", "d")]),  # a full batch
        ("abcdE", 5, 2, [("", ""), ("", ""), ("", "c"), ("", "d"), ("Ea", "b")]),  # no more than a batch takes
        # items were lost otherwise, or the limit is below the size of a batch
        ("abCde", 1, 3, [("a", ""), ("b", ""), ("C", ""), ("d", ""), ("e", "")]),
    ],
)
def test_groups_with_a_signal_are_sent_at_once_and_the_others_are_held_for_the_batch(
    groups: str, limit: int, size: int, sent_and_dropped: list[tuple[str, str]]
) -> None:
    assert offered(groups, limit, size) == sent_and_dropped


def test_on_policy_the_oldest_are_chosen_and_what_was_begun_for_a_full_batch_is_thrown_away() -> None:
    """Else the first to end were chosen, which are short; and the next batch would hold samples of an old policy."""
    filling: BatchFilling[str] = BatchFilling(6, on_policy=True)
    one, two, three, four = (filling.begin() for _ in range(4))
    assert ended(filling, three, "C", 2) == ([], [])
    assert ended(filling, two, "B", 2) == ([], [])
    assert ended(filling, one, "a", 2) == (["B", "C"], ["a"])
    assert filling.may_begin() == 6
    five = filling.begin()
    assert ended(filling, five, "E", 2) == (["E"], [])  # it does not wait for one that cannot be used
    assert ended(filling, four, "D", 2) == ([], ["D"])


def test_on_policy_no_more_is_begun_than_the_limit_unless_items_were_lost() -> None:
    filling: BatchFilling[str] = BatchFilling(2, on_policy=True)
    one, two = filling.begin(), filling.begin()
    assert filling.may_begin() == 0
    assert ended(filling, one, "A", 2) == (["A"], [])
    assert filling.may_begin() == 0
    assert filling.end(two, 2) == ([], [])  # gave no group
    assert filling.may_begin() is None
    assert ended(filling, filling.begin(), "c", 2) == (["c"], [])


def test_as_many_more_are_sampled_as_had_no_signal_lately() -> None:
    filling: BatchFilling[str] = BatchFilling(24, on_policy=False)
    assert filling.oversampling(8) == 1
    for group in "aBcaBcabcAb":
        ended(filling, filling.begin(), group, 8)
    assert filling.oversampling(8) == pytest.approx(12 / 4)
    assert filling.oversampling(12) == 2  # never more than the limit allows


def group(score: float) -> ScoredDataGroup:
    logprobs = [[1.0, -0.5]] * 4
    scores = [score, 0.0, 0.0, 0.0]
    return ScoredDataGroup(tokens=[[1, 2]] * 4, masks=[[-100, 2]] * 4, scores=scores, inference_logprobs=logprobs)


class RarelySignal(CountingEnv):
    """One group in `every` has a signal."""

    every = 4

    async def collect_trajectories(self, item: int) -> Any:
        await asyncio.sleep(0)
        return group(float(item % self.every == 0)), []


async def test_a_batch_goes_on_with_what_there_is_after_max_items(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_api() as api, FakeInferenceServer() as inference:
        settings: dict[str, Any] = {"max_items_per_batch": 6, "max_num_workers": 1, "max_batches_offpolicy": 0}
        env = RarelySignal(config(tmp_path, api.url, **settings), server_config(inference))
        trainer = Trainer(api.url, batch_size=16, num_steps=2)  # four groups
        await served(env, trainer, 2)
    signals = [[bool(sum(item["scores"])) for item in batch] for batch in trainer.batches]
    assert [sum(batch) for batch in signals] == [1, 2]  # item 4 of 1 to 6; items 8 and 12 of 7 to 12
    assert all(len(batch) == 4 for batch in signals)
    counts = env._env_run.counts
    figures = {name: counts[name] for name in ("groups_without_signal", "groups_filled_in", "groups_thrown_away")}
    assert figures == {"groups_without_signal": 9, "groups_filled_in": 5, "groups_thrown_away": 4}
    assert counts["tokens_thrown_away"] == 4 * 4
    assert caplog.text.count("filling it with others, oldest first (--env.max_items_per_batch)") == 2
    assert "Sampled 6 groups for a batch, and 1 of the 4 that it needs have a signal" in caplog.text


async def test_on_policy_batches_stay_on_policy_with_many_in_flight(tmp_path: Path) -> None:
    class Uneven(RarelySignal):
        async def collect_trajectories(self, item: int) -> Any:
            version = self._env_run.policy_version
            await asyncio.sleep(item % 5 / 100)
            return group(float(item % 3 == 0)) | {"policy_versions": [[version, version]] * 4}, []

    async with running_api() as api, FakeInferenceServer() as inference:
        settings: dict[str, Any] = {"max_items_per_batch": 9, "max_num_workers": 6, "max_batches_offpolicy": 0}
        env = Uneven(config(tmp_path, api.url, steps_per_eval=0, **settings), server_config(inference))
        trainer = await served(env, Trainer(api.url, batch_size=8, num_steps=4), 4)
    versions = [{tuple(span) for item in batch for span in item["policy_versions"]} for batch in trainer.batches]
    assert versions == [{(version, version)} for version in range(4)]
    assert all(sum(item["scores"]) for batch in trainer.batches for item in batch)
    assert env._env_run.counts["groups_thrown_away"] >= 8


async def test_without_a_limit_groups_of_equal_scores_are_dropped_as_they_come(tmp_path: Path) -> None:
    async with running_api() as api, FakeInferenceServer() as inference:
        env = RarelySignal(config(tmp_path, api.url, max_num_workers=1), server_config(inference))
        trainer = Trainer(api.url, batch_size=8, num_steps=1)
        serving = asyncio.create_task(serve(env))
        await trainer.register()
        await trainer.train(1)
        report = Reporting(env._env_run.joined_link.client, env._env_run).report()
        await asyncio.wait_for(serving, 20)
    assert [sum(item["scores"]) for item in trainer.batches[0]] == [1.0, 1.0]
    assert report.thrown_away >= 6
    assert env._env_run.counts["groups_thrown_away"] == env._env_run.counts["groups_without_signal"]


async def test_drops_are_one_line_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("atroposlib.envs.run.env_run.time.monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    async with FakeInferenceServer() as inference:
        env = CountingEnv(config(tmp_path, ""), server_config(inference))
        for item in range(380 * 3):
            now = item / 10
            await env.handle_send_to_api(group(0.0), item, do_send_to_api=False)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Dropped")]
    assert lines[0] == "Dropped a group of the item 0: all scores are 0"
    assert lines[1].startswith(
        "Dropped 600 groups since the last such line (600 all scores equal), 601 of them in a row"
    )
    assert "with pauses of 0.8 s between items; the last one, of the item 600: all scores are 0" in lines[1]
    assert len(lines) == 2
