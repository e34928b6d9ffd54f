"""Busy and idle seconds of trainer and sampler."""

from example_trainer.bridges.base import BridgeError
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.loop.timeline import Timeline


class Server(VllmClient):
    """A server that was generating for so long at each question; None: it does not answer."""

    def __init__(self, *seconds: float | None) -> None:
        self._seconds = list(seconds)

    def generating_s(self) -> float:
        found = self._seconds.pop(0)
        if found is None:
            raise BridgeError("no such route")
        return found


def rows(*servers: Server, steps: int) -> list[tuple[float | int | None, ...]]:
    """Of steps of 10 s each, of which the trainer computes 4."""
    times = iter([0.0, 5.0, *(15.0 + 10 * step for step in range(steps))])
    timeline = Timeline(servers, lambda: next(times))
    timeline.begin()
    found = [timeline.row(4.0) for _ in range(steps)]
    names = ("trainer_busy_s", "trainer_idle_s", "sampler_busy_s", "sampler_idle_s")
    return [tuple(row[name] for name in names) for row in found]


def test_what_is_not_busy_is_idle() -> None:
    assert rows(Server(100.0, 107.0, 110.0), steps=2) == [(4, 6, 7, 3), (4, 6, 3, 7)]


def test_several_servers_count_with_their_mean() -> None:
    assert rows(Server(0.0, 6.0), Server(50.0, 52.0), steps=1) == [(4, 6, 4, 6)]


def test_a_server_that_was_started_again_counts_from_its_start() -> None:
    assert rows(Server(100.0, 2.0), steps=1) == [(4, 6, 2, 8)]


def test_what_a_server_generated_before_it_is_started_again_counts_too() -> None:
    times = iter([0.0, 5.0, 15.0])
    timeline = Timeline([Server(100.0, 107.0, 2.0)], lambda: next(times))
    timeline.begin()
    timeline.look()
    row = timeline.row(4.0)
    assert (row["sampler_busy_s"], row["sampler_idle_s"]) == (9, 1)


def test_a_server_that_does_not_tell_leaves_the_sampler_unknown() -> None:
    assert rows(Server(1.0, None, 5.0, 6.0), steps=3) == [(4, 6, None, None), (4, 6, None, None), (4, 6, 1, 9)]
