import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atroposlib.child_processes import pool
from atroposlib.child_processes.math_child import judge
from atroposlib.grading import Grader, GraderSettings, Outcome
from tests.waiting import until

pytestmark = pytest.mark.services

NEVER_ENDING = "9^{9^{9^{9^9}}} - 1"


@pytest.fixture
async def grader() -> AsyncIterator[Grader]:
    grader = Grader(GraderSettings(time_limit_s=2.0))
    yield grader
    await grader.close()


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("18", Outcome.RIGHT),
        (r"\frac{36}{2}", Outcome.RIGHT),
        ("18.0", Outcome.RIGHT),
        (r"18 \text{ dollars}", Outcome.RIGHT),
        ("17", Outcome.WRONG),
        ("x", Outcome.WRONG),
        ("", Outcome.UNPARSEABLE),
        (None, Outcome.UNPARSEABLE),
        ("1" * 5000, Outcome.UNPARSEABLE),
    ],
)
async def test_answer_is_judged(grader: Grader, answer: str | None, outcome: Outcome) -> None:
    assert await grader.grade(answer, "18") is outcome
    assert grader.outcomes == {outcome: 1}


async def test_endless_answer_is_a_grader_failure_in_time_and_the_next_is_judged(grader: Grader) -> None:
    assert await grader.grade(r"\sqrt{4}", "2") is Outcome.RIGHT  # the process is up
    start = time.monotonic()
    assert await grader.grade(NEVER_ENDING, "18") is Outcome.GRADER_FAILED
    assert time.monotonic() - start < 6
    assert await grader.grade("18.0", "18") is Outcome.RIGHT


async def test_killed_child_is_a_grader_failure_and_is_replaced(grader: Grader) -> None:
    assert await grader.grade(r"\sqrt{4}", "2") is Outcome.RIGHT
    process = grader._pool._children[0]._process
    assert process is not None
    grading = asyncio.create_task(grader.grade(NEVER_ENDING, "18"))
    await until(grader._pool._idle.empty)  # the child has the answer
    os.kill(process.pid, 9)
    assert await grading is Outcome.GRADER_FAILED
    assert await grader.grade("18.0", "18") is Outcome.RIGHT


async def test_known_answer_that_is_no_mathematics_is_a_grader_failure(grader: Grader) -> None:
    assert await grader.grade(r"\sqrt{4}", "") is Outcome.GRADER_FAILED


async def test_cancelled_grading_leaves_no_reply_for_the_next(grader: Grader) -> None:
    assert await grader.grade(r"\sqrt{4}", "2") is Outcome.RIGHT
    grading = asyncio.create_task(grader.grade(NEVER_ENDING, "18"))
    await until(grader._pool._idle.empty)  # the child has the answer
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    assert await grader.grade("17.0", "18") is Outcome.WRONG


async def test_concurrent_answers_get_their_own_verdicts() -> None:
    grader = Grader(GraderSettings(processes=2))
    try:
        outcomes = await asyncio.gather(*(grader.grade(f"{number}.0", "7") for number in range(20)))
    finally:
        await grader.close()
    assert [outcome is Outcome.RIGHT for outcome in outcomes] == [number == 7 for number in range(20)]


def cpu_s_of(process_group: int) -> float:
    """Seconds of processor time that the live processes of a group have used, which others' load does not change."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            ticks += (int(fields[11]) + int(fields[12])) * (int(fields[2]) == process_group)
    return ticks / os.sysconf("SC_CLK_TCK")


async def test_sixty_four_answers_take_less_than_a_second(grader: Grader) -> None:
    await grader.grade(r"\sqrt{4}", "2")
    process = grader._pool._children[0]._process
    assert process is not None
    childs, ours = cpu_s_of(process.pid), time.process_time()
    assert childs > 0
    await asyncio.gather(*(grader.grade(rf"\sqrt{{{number}}}", "7") for number in range(64)))
    assert cpu_s_of(process.pid) - childs + time.process_time() - ours < 1.0


def test_plain_integers_are_judged_as_math_verify_does() -> None:
    generator = random.Random(0)
    pairs = [(str(generator.randint(-200, 200)), str(generator.randint(-200, 200))) for _ in range(50)]
    pairs += [
        ("007", "7"),
        ("-0", "0"),
        ("0", "0"),
        ("-5", "-5"),
        ("-5", "5"),
        ("999999999999999999", "999999999999999998"),
    ]

    async def quickly() -> list[str]:
        grader = Grader()
        return [str(await grader.grade(answer, gold)) for answer, gold in pairs]

    assert asyncio.run(quickly()) == [judge(gold, answer)["verdict"] for answer, gold in pairs]


async def test_a_reply_to_another_request_is_a_grader_failure(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = pool._exchange

    async def late(process: asyncio.subprocess.Process, request: dict[str, object]) -> object:
        return {**await exchange(process, request), "id": "another"}

    assert await grader.grade(r"\sqrt{4}", "2") == Outcome.RIGHT
    monkeypatch.setattr(pool, "_exchange", late)
    assert await grader.grade(r"\sqrt{4}", "2") == Outcome.GRADER_FAILED


async def test_closing_leaves_no_process(grader: Grader) -> None:
    await grader.grade(r"\sqrt{4}", "2")
    process = grader._pool._children[0]._process
    assert process is not None
    await grader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
