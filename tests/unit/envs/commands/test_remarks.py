"""`process` tells an author what a training run would make nothing of."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.loop_watch import HeldLines, LoopWatch
from atroposlib.envs.commands.process import process
from atroposlib.envs.commands.remarks import Remarks
from atroposlib.envs.payloads import ScoredDataGroup, group_items, with_failed
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.wire.batching import Cause
from tests.unit.envs.fakes import Asking, server_config
from tests.unit.envs.fakes import config as base_config

LONG = {"tokens": [*range(9)], "masks": [-100] * 8 + [8], "inference_logprobs": [0.0] * 9}


class Lengths(Asking):
    """Scores an answer by its length."""

    async def score(self, item: str, answer: str) -> float:
        return float(len(answer))


class Blocking(Lengths):
    """Its score holds the event loop for less than any single limit, again and again."""

    async def score(self, item: str, answer: str) -> float:
        time.sleep(0.5)  # noqa: ASYNC251
        return float(len(answer))


async def remarks_of(env_cls: type[Asking], folder: Path, server: FakeInferenceServer, **settings: Any) -> None:
    fields = base_config(folder, "http://127.0.0.1:1").model_dump() | {
        "total_steps": 2,
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
        "ensure_scores_are_not_same": False,
    }
    env = env_cls(env_cls.env_config_cls(**(fields | settings)), server_config(server))  # type: ignore[arg-type]
    await process(env)


def trained(**changes: Any) -> ScoredDataGroup:
    item = {"tokens": [1, 2, 3], "masks": [-100, 2, 3], "scores": 1.0, "inference_logprobs": [0.0, -1.0, -1.0]}
    return group_items([item | changes] * 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 1}, "--env.group_size 1: an answer is compared with the others of its group"),
        (
            {"max_new_tokens": 4_000_000},
            "--env.max_new_tokens 4000000 leaves no room for a prompt: the server's",
        ),
        ({}, ""),
    ],
)
async def test_settings_that_teach_nothing_are_told(
    settings: dict[str, int], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeInferenceServer(lambda prompt: ["a", "bb"]) as server:
        server.max_model_len = 2048
        with caplog.at_level(logging.WARNING):
            await remarks_of(Lengths, tmp_path, server, **settings)
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inference_logprobs": None}, "a trainer would refuse it: inference_logprobs: missing"),
        ({"masks": [-100, 9, 3]}, "a trainer would refuse it: masks"),
        ({"masks": [-100, -100, -100]}, "its masks mark no token to train on"),
        (
            {"tokens": [*range(9)], "masks": [-100] * 8 + [8], "inference_logprobs": [0.0] * 9},
            "its prompt has 8 tokens",
        ),
        ({}, ""),
    ],
)
def test_a_group_that_cannot_be_trained_on_is_told_once(
    changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    remarks = Remarks((8, "the server's context"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            remarks.look(trained(**changes), "item")
        first = caplog.text
        remarks.tell(3)
    assert said in first
    assert first.count("WARNING") == bool(said)
    assert ("3 of 3 groups" in caplog.text) == bool(said)


async def test_many_short_holds_of_one_line_are_told_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    score = Blocking.score
    with caplog.at_level(logging.WARNING):
        async with LoopWatch(held_after_s=0.6):
            for _ in range(5):
                await asyncio.sleep(0.11)
                await score(None, "", "")  # type: ignore[arg-type]
    assert f"{__file__}:" in caplog.text
    assert "in score: nothing is sampled" in caplog.text


def test_a_line_is_told_again_at_twice_as_much_and_forgotten_after_a_minute() -> None:
    lines = HeldLines(3.0, 10.0)
    assert [lines.note("score", True, 1.0, now) for now in range(7)] == [None, None, 3.0, None, None, 6.0, None]
    assert lines.note("other", True, 2.0, 8.0) is None
    assert lines.note("other", True, 2.0, 90.0) is None, "a hold a minute ago is no pattern"
    assert lines.note("library", False, 9.0, 91.0) is None
    assert lines.note("library", False, 1.0, 92.0) == 10.0


def test_answers_without_a_score_are_counted_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    remarks = Remarks((8, "the server's context"))
    causes: list[dict[Cause, int]] = [{"scorer": 2}, {"timeout": 1, "scorer": 1}, {}]
    for failed in causes:
        remarks.look(with_failed(trained(), failed), "item")
    remarks.tell(3)
    assert [record.getMessage() for record in caplog.records] == [
        "The group of 'item': some of its answers have no score (2 scorer)",
        "2 of 3 groups: some of their answers have no score",
    ]
