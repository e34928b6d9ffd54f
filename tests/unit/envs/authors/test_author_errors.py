import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.authors.author_errors import ErrorBudget, ErrorLog, TooManyFailures, origin, written_by_author
from atroposlib.envs.commands.process import process
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.errors import ProcessError, Unscored
from atroposlib.envs.payloads import ScoredDataGroup
from atroposlib.envs.question_env import QuestionEnv
from atroposlib.envs.run.drop_log import DropLog
from atroposlib.envs.run.outcomes import Outcomes
from atroposlib.envs.server_handling.errors import NoLiveServerError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, server_config
from tests.waiting import until


def test_origin_is_the_authors_line_not_the_librarys() -> None:
    from atroposlib.grading.arithmetic import compute

    def said(call: Callable[[], Any]) -> str:
        with pytest.raises(ValueError, match=r"division|Expecting|greater") as caught:
            call()
        return origin(caught.value)

    here = rf" at {re.escape(__file__)}:\d+ in <lambda>"
    assert re.fullmatch("ExpressionError: division by zero" + here, said(lambda: compute("1 / 0")))
    assert re.fullmatch("JSONDecodeError: Expecting value.*" + here, said(lambda: json.loads("x")))
    assert re.fullmatch("ValidationError: .*" + here, said(lambda: BaseEnvConfig(group_size=0)))


async def test_origin_of_an_error_that_python_raised_as_another_is_the_authors_line() -> None:
    async def training_item() -> Any:
        return next(iter([]))

    item = asyncio.create_task(training_item())  # whose error has no frame of the author's
    await asyncio.wait([item])
    error = item.exception()
    assert error is not None
    said = origin(error, {"score": "my_env.py:17 in score"})
    here = rf" at {re.escape(__file__)}:\d+ in training_item"
    assert re.fullmatch("RuntimeError: coroutine raised StopIteration" + here, said)


def test_budget_counts_the_last_hundred_items_and_forgives_servers() -> None:
    budget = ErrorBudget(allowed=2)
    for _ in range(3):
        budget.note_failure(ValueError("bad"), "a")
        for _ in range(60):
            budget.note_success()
        budget.note_failure(NoLiveServerError("away"), "a")
    budget.note_failure(ValueError("bad"), "b")
    with pytest.raises(TooManyFailures, match=r"3 of the last 100 items.*max_failed_items.*c: ValueError: worse"):
        budget.note_failure(ValueError("worse"), "c")


class FailingEnv(CountingEnv):
    async def get_next_item(self) -> Any:
        item = await super().get_next_item()
        if item % 2:
            raise KeyError(f"no row {item}")
        return item

    async def collect_trajectory(self, item: Any) -> Any:
        raise ZeroDivisionError("not my day")


async def test_environment_that_keeps_failing_ends_and_names_item_and_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_api() as api, FakeInferenceServer() as server:
        env = FailingEnv(config(tmp_path, api.url, max_failed_items=1), server_config(server))
        trainer = Trainer(api.url)
        await trainer.register()
        with pytest.raises(
            TooManyFailures,
            match=r"[23] of the last [23] items .*test_author_errors.py:\d+ in (get_next_item|collect_trajectory)",
        ):
            await asyncio.wait_for(env.env_manager(), 60)
    assert "no row 1" in caplog.text
    assert env._env_run.counts["items_failed"] >= 2


class MalformedEnv(CountingEnv):
    """Gives two groups an item: one whole, one with a mask too few; the item 3 gives something that is not a group at
    all.
    """

    async def collect_trajectories(self, item: Any) -> Any:
        if item == 3:
            return None
        whole = ScoredDataGroup(tokens=[[1, 2]] * 4, masks=[[-100, 2]] * 4, scores=[0.0, 1.0, 2.0, 3.0])
        return [whole, {**whole, "masks": [[-100, 2]] * 3}], []


class FruitlessEnv(FailingEnv):
    async def collect_trajectories(self, item: Any) -> Any:
        return None, []


@pytest.mark.parametrize(
    ("env_cls", "attributes", "error", "says"),
    [
        (FailingEnv, {"taken": 1}, TooManyFailures, "2: ZeroDivisionError: not my day at"),
        (
            FruitlessEnv,
            {},
            TooManyFailures,
            "that get_next_item was to give: KeyError: 'no row 1' at .* in get_next_item",
        ),
        (
            FruitlessEnv,
            {"backlog": list(range(100))},
            ProcessError,
            r"100 items in a row gave no group \(.*max_fruitless_items\): 100 gave none, and 0 groups were of no use\."
            r" The last one: the environment gave no group \(.* in collect_tr",
        ),
        (
            MalformedEnv,
            {"taken": 2},
            TooManyFailures,
            r"3: WrongReturn: collect_trajectories returned None .*errors.py:\d+ in collect_trajectories",
        ),
    ],
)
async def test_process_ends_likewise(
    tmp_path: Path, env_cls: type[CountingEnv], attributes: dict[str, Any], error: type[Exception], says: str
) -> None:
    async with FakeInferenceServer() as server:
        groups = str(tmp_path / "groups.jsonl")
        env = env_cls(config(tmp_path, "", max_failed_items=0, data_path_to_save_groups=groups), server_config(server))
        for name, value in attributes.items():
            setattr(env, name, value)
        with pytest.raises(error, match=says):
            await process(env)


async def test_group_that_the_api_refuses_counts_against_the_budget(tmp_path: Path) -> None:
    class HugeIdEnv(MalformedEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            text: Any = [["x"]] * 4
            return ScoredDataGroup(tokens=text, masks=[[1]] * 4, scores=[0.0, 1.0, 2.0, 3.0]), []

    async with running_api() as api, FakeInferenceServer() as server:
        env = HugeIdEnv(config(tmp_path, api.url, max_failed_items=0), server_config(server))
        await Trainer(api.url, batch_size=4).register()
        with pytest.raises(TooManyFailures, match=r"MalformedGroup: the API refused 1 group.* in collect_trajectories"):
            await asyncio.wait_for(env.env_manager(), 60)


async def test_many_useless_groups_in_a_row_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeInferenceServer() as server:
        env = CountingEnv(config(tmp_path, ""), server_config(server))
    caplog.set_level("INFO")
    short = ScoredDataGroup(tokens=[[1]], masks=[[1]], scores=[1.0])
    for number in range(50):
        await env.handle_send_to_api(short, number, do_send_to_api=False)
    assert "Dropped a group of the item 0: 1 rollouts instead of 4" in caplog.text
    assert "Dropped a group of the item 1" not in caplog.text  # a line a minute says how many there were
    assert "50 groups in a row were dropped and nothing was sent, the last because 1 rollouts" in caplog.text


async def test_groups_that_are_kept_between_end_the_row_with_dynamic_sampling_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeInferenceServer() as server:
        env = CountingEnv(config(tmp_path, "", max_items_per_batch=8), server_config(server))
    short, good = (
        ScoredDataGroup(tokens=[[1]] * size, masks=[[1]] * size, scores=[float(place) for place in range(size)])
        for size in (1, 4)
    )
    for number in range(50):
        for group in (short, good):
            env._env_run._chosen(group, number, send=True, limit_lengths=False)
    assert "in a row" not in caplog.text


def test_groups_without_a_score_are_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    drops = DropLog(ErrorLog(), Outcomes(), ())
    for number in range(49):
        drops.unscored(Unscored(f"score has returned None for {number}"))
    assert [record.getMessage() for record in caplog.records] == ["Dropped a group: score has returned None for 0"]


def test_giver_is_the_last_method_that_the_author_wrote() -> None:
    class Asked(QuestionEnv):
        async def score(self, item: Any, answer: str) -> float:
            return 1.0

    def giver(env_cls: type) -> str:
        return ErrorLog(written_by_author(env_cls)).giver

    assert giver(Asked).endswith("in score")
    assert giver(FailingEnv).endswith("in collect_trajectory")
    assert giver(QuestionEnv) == ""


def test_an_error_is_logged_in_full_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    errors = ErrorLog(now=lambda: clock[0])
    budget = ErrorBudget(allowed=200, errors=errors)

    def fail(item: str, index: int = 9) -> None:
        try:
            [].pop(index)
        except IndexError as error:
            budget.note_failure(error, item)

    for number in range(40):
        fail(str(number))
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert re.search(rf"Dropped the item 0: IndexError: .* at {re.escape(__file__)}:\d+ in fail$", caplog.messages[0])
    clock[0] = 61.0
    fail("40")
    assert len(caplog.records) == 2
    assert caplog.records[1].exc_info is None
    assert caplog.messages[1].startswith("Dropped the item 40: ")
    assert caplog.messages[1].endswith("(the same error 39 more times before)")
    budget.note_failure(ValueError("another"), "41")
    assert "Dropped the item 41: ValueError: another" in caplog.messages[2]
    strict = ErrorBudget(allowed=0, errors=errors)
    with pytest.raises(TooManyFailures, match=r"ValueError: another \(the same error 1 more times\)"):
        strict.note_failure(ValueError("another"), "42")


def test_a_reason_that_says_all_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    errors = ErrorLog(now=lambda: clock[0])
    for number in range(100):
        errors.note_reason("scorer", f"answer {number} has no score")
    errors.note_reason("timeout", "answer 7 took too long")
    clock[0] = 61.0
    errors.note_reason("scorer", "answer 100 has no score")
    assert caplog.messages == [
        "answer 0 has no score",
        "answer 7 took too long",
        "answer 100 has no score (99 more by scorer before)",
    ]


# --- what the registered trainer cannot use -------------------------------------------------------------------


class TrainableOnly(Trainer):
    """Needs what our trainer needs."""

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__(url, batch_size=4, **fields)
        self.registration |= {"trainable_only": True, "vocab_size": 1000}


class UntrainableEnv(CountingEnv):
    """Each item gives a group that is whole, and one that no policy gradient can be computed from."""

    async def collect_trajectories(self, item: Any) -> Any:
        good = ScoredDataGroup(
            tokens=[[1, 2]] * 4,
            masks=[[-100, 2]] * 4,
            scores=[0.0, 1.0, 2.0, 3.0],
            inference_logprobs=[[1.0, -1.0]] * 4,
        )
        return [good, {**good, "advantages": [[1e30]] * 4}], []


@pytest.mark.parametrize(
    ("env_cls", "trainer_cls", "says"),
    [
        (
            MalformedEnv,
            partial(Trainer, batch_size=4),
            rf"2: MalformedGroup: .*3 masks for 4 sequences at .*{Path(__file__).name}:"
            rf"{MalformedEnv.collect_trajectories.__code__.co_firstlineno} in collect_trajectories",
        ),
        (
            UntrainableEnv,
            TrainableOnly,
            r"a group cannot be trained on: advantages\[0\]\[0\]: 1e\+30 is not a number",
        ),
    ],
)
async def test_a_malformed_or_useless_group_is_named_before_it_is_posted_and_the_whole_ones_get_through(
    tmp_path: Path, env_cls: type[CountingEnv], trainer_cls: Callable[[str], Trainer], says: str
) -> None:
    async with running_api() as api, FakeInferenceServer() as server:
        fields: dict[str, Any] = {"max_failed_items": 1, "max_num_workers": 1, "max_batches_offpolicy": 4}
        env = env_cls(config(tmp_path, api.url, **fields), server_config(server))
        trainer = trainer_cls(api.url)
        await trainer.register()
        with pytest.raises(TooManyFailures, match=rf"2 of the last 2 items .*{says}"):
            await asyncio.wait_for(env.env_manager(), 60)
        assert [len(group["tokens"]) for group in await trainer.fetch()] == [4]
    counts = env._env_run.counts
    assert (counts["groups_malformed"], counts["items_failed"], counts["items_refused_by_api"]) == (2, 2, 0)


@pytest.mark.parametrize("logprob", [-1e39, 0.5])
async def test_garbage_of_the_inference_server_is_put_down_to_it(
    tmp_path: Path, logprob: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The author's budget of failed items is 0: the environment continues, and sends groups once the server is well."""
    monkeypatch.setattr("atroposlib.testing.fake_inference_server.fake_logprob", lambda token, at: logprob)
    async with running_api() as api, FakeInferenceServer() as server:
        env = CountingEnv(config(tmp_path, api.url, max_failed_items=0, max_num_workers=1), server_config(server))
        trainer = TrainableOnly(api.url)
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await until(lambda: env._env_run.counts["items_failed"] >= 2)
        assert not serving.done()
        monkeypatch.undo()
        (group,) = await asyncio.wait_for(trainer.fetch(), 30)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert all(value <= 0 or value == 1.0 for row in group["inference_logprobs"] for value in row)
    assert "returned what no model can sample: logprobs[0][0]" in caplog.text
    assert env._env_run.counts["groups_malformed"] == 0
