"""Busy and idle seconds of trainer and sampler."""

from collections.abc import Sequence

import pytest

from atroposlib.wire.bridge import ServerActivity
from example_trainer.bridges.base import BridgeError
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.loop.timeline import Phase, Timeline
from example_trainer.output.metrics import Row
from tests.waiting import Clock


class Server(VllmClient):
    """A server that was generating for so long at each question; None: it does not answer."""

    def __init__(self, *seconds: float | None) -> None:
        self._seconds = list(seconds)

    def activity(self) -> ServerActivity:
        found = self._seconds.pop(0)
        if found is None:
            raise BridgeError("no such route")
        return ServerActivity(found, prompt_tokens=int(10 * found), cached_tokens=int(found), tokens_again=3)


def step(timeline: Timeline, clock: Clock, phases: Sequence[tuple[Phase, float]]) -> Row:
    for name, seconds in phases:
        with timeline.phase(name):
            clock.now += seconds
    return timeline.row()


def rows(*servers: Server, steps: int) -> list[tuple[float | int | None, ...]]:
    """Of steps of 10 s each, of which the trainer computes 4."""
    clock = Clock()
    timeline = Timeline(servers, clock)
    timeline.begin()
    found = [step(timeline, clock, [("sampling", 6), ("forward and backward", 4)]) for _ in range(steps)]
    names = ("trainer_busy_s", "trainer_idle_s", "sampler_busy_s", "sampler_idle_s")
    return [tuple(row[name] for name in names) for row in found]


def test_what_a_server_generated_before_it_is_started_again_counts_too() -> None:
    clock = Clock()
    timeline = Timeline([Server(100.0, 107.0, 2.0)], clock)
    timeline.begin()
    timeline.look()
    row = step(timeline, clock, [("sampling", 10)])
    assert (row["sampler_busy_s"], row["sampler_idle_s"]) == (9, 1)


def test_a_step_has_the_tokens_that_all_servers_read_one_of_which_was_started_again() -> None:
    clock = Clock()
    timeline = Timeline([Server(100.0, 107.0), Server(50.0, 2.0)], clock)
    timeline.begin()
    row = step(timeline, clock, [("sampling", 10)])
    assert (row["prompt_tokens"], row["prompt_tokens_cached"], row["tokens_read_again"]) == (70 + 20, 7 + 2, 0 + 3)


UNKNOWN = (4, 6, None, None)


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([Server(100.0, 107.0, 110.0)], [(4, 6, 7, 3), (4, 6, 3, 7)]),
        ([Server(0.0, 6.0), Server(50.0, 52.0)], [(4, 6, 4, 6)]),  # their mean
        ([Server(100.0, 2.0)], [(4, 6, 2, 8)]),  # started again: it counts from its start
        ([Server(1.0, None, 5.0, 6.0)], [UNKNOWN, UNKNOWN, (4, 6, 1, 9)]),  # it does not tell
    ],
)
def test_what_is_not_busy_is_idle(servers: list[Server], expected: list[tuple[float | None, ...]]) -> None:
    assert rows(*servers, steps=len(expected)) == expected


def test_each_second_is_in_the_innermost_phase_and_each_column_has_its_phases() -> None:
    """As a step goes: --overlap computes while it waits for samples, a bridge updates in its sync."""
    clock = Clock()
    timeline = Timeline([Server(*[0.0] * 4)], clock)
    timeline.begin()
    with timeline.phase("sampling"):
        clock.now += 3
        with timeline.phase("overlap"):
            clock.now += 5
        clock.now += 4
    clock.now += 100  # of no phase
    with timeline.phase("forward and backward"):
        clock.now += 11
    with timeline.phase("sync"):
        clock.now += 13
        timeline.phase("optimizer")(lambda: step_on(clock, 17))()
        clock.now += 19
    row = step(timeline, clock, [("report", 23), ("evaluation", 29)])
    assert {name: row[name] for name in ("generate_s", "early_s", "train_s", "step_s", "eval_wait_s")} == {
        "generate_s": 7,
        "early_s": 5,
        "train_s": 5 + 11 + 17,
        "step_s": 7 + 33 + 32 + 23,
        "eval_wait_s": 29,
    }
    assert (row["trainer_busy_s"], row["trainer_idle_s"]) == (33, 224 - 33)
    after = step(timeline, clock, [("save", 31), ("sampling", 2)])  # of the step before: idle, and in no other column
    assert (after["step_s"], after["generate_s"], after["trainer_idle_s"]) == (2, 2, 33)


def step_on(clock: Clock, seconds: float) -> None:
    clock.now += seconds


def test_a_phase_that_fails_is_left() -> None:
    clock = Clock()
    timeline = Timeline([Server(*[0.0] * 4)], clock)
    with pytest.raises(KeyError), timeline.phase("sync"):
        timeline.phase("optimizer")(dict[str, float]().__getitem__)("no such key")
    clock.now += 5
    assert step(timeline, clock, [("sampling", 1)])["step_s"] == 1
