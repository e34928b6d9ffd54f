"""One wait for a peer, by a clock that the test hands in."""

import logging
from collections.abc import Callable

import pytest

from atroposlib.clients.waiting import NotYet, Wait, backoff_s, wait_for, wait_for_async
from tests.waiting import Clock


@pytest.fixture(autouse=True)
def log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def wait(clock: Clock, deadline_s: float = 30.0) -> Wait:
    return Wait("a batch", "http://api", deadline_s, lambda reason: TimeoutError(f"no batch: {reason}"), now=clock)


def ready_after(tries: int, error: Callable[[], Exception] = lambda: NotYet("the queue is empty")) -> Callable[[], str]:
    left = iter(range(tries))

    def attempt() -> str:
        if next(left, None) is not None:
            raise error()
        return "batch"

    return attempt


def test_a_peer_that_is_ready_costs_neither_a_pause_nor_a_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    assert wait_for(ready_after(0), wait(clock), clock.sleep) == "batch"
    assert (clock.pauses, caplog.messages) == ([], [])


def test_pauses_grow_and_the_log_tells_whom_it_waits_for_and_how_long_it_took(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    assert wait_for(ready_after(12), wait(clock), clock.sleep) == "batch"
    assert clock.pauses[:3] == pytest.approx([0.05, 0.075, 0.1125])
    assert clock.pauses[-1] == 1.0
    assert caplog.messages == [
        "Waiting for a batch from http://api, 0 s of at most 30 s so far (the queue is empty)",
        f"Got a batch from http://api after {clock.now:.1f} s",
    ]


def test_every_ten_seconds_a_line_says_how_long_it_has_been(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with pytest.raises(TimeoutError, match="no batch: the queue is empty"):
        wait_for(ready_after(10**9), wait(clock, 25.0), clock.sleep)
    assert [message.partition(",")[2] for message in caplog.messages] == [
        f" {at} s of at most 25 s so far (the queue is empty)" for at in (0, 10, 20)
    ]


def test_the_last_attempt_is_at_the_deadline_and_not_after() -> None:
    clock = Clock()
    with pytest.raises(TimeoutError):
        wait_for(ready_after(10**9), wait(clock, 2.0), clock.sleep)
    assert clock.now == pytest.approx(2.0)


def test_a_peer_that_says_when_is_asked_again_then() -> None:
    clock = Clock()
    wait_for(ready_after(2, lambda: NotYet("full", after_s=7.0)), wait(clock), clock.sleep)
    assert clock.pauses == [7.0, 7.0]


def test_any_other_error_ends_the_wait_at_once() -> None:
    clock = Clock()
    with pytest.raises(ValueError, match="refused"):
        wait_for(ready_after(1, lambda: ValueError("refused")), wait(clock), clock.sleep)
    assert clock.pauses == []


async def test_on_an_event_loop_it_is_the_same() -> None:
    clock, attempt = Clock(), ready_after(3)

    async def attempt_async() -> str:
        return attempt()

    assert await wait_for_async(attempt_async, wait(clock), clock.sleep_async) == "batch"
    assert clock.pauses == pytest.approx([0.05, 0.075, 0.1125])


def test_with_reasons_the_lines_are_fewer_and_tell_them(caplog: pytest.LogCaptureFixture) -> None:
    clock, asked = Clock(), []

    def why(otherwise: str) -> str:
        asked.append(otherwise)
        return f"{len(asked)} of 8 groups are there"

    explained = wait(clock, 200.0)
    explained.why = why
    with pytest.raises(TimeoutError, match="no batch: 4 of 8 groups are there"):
        wait_for(ready_after(10**9), explained, clock.sleep)
    assert [message.partition(", ")[2] for message in caplog.messages] == [
        "0 s of at most 200 s so far (the queue is empty)",
        "30 s of at most 200 s so far (1 of 8 groups are there)",
        "90 s of at most 200 s so far (2 of 8 groups are there)",
        "150 s of at most 200 s so far (3 of 8 groups are there)",
    ]


@pytest.mark.parametrize(("failures", "pause_s"), [(1, 0.5), (2, 1.0), (6, 16.0), (7, 30.0), (100_000, 30.0)])
def test_a_pause_doubles_up_to_the_longest_however_long_an_outage_lasts(failures: int, pause_s: float) -> None:
    assert backoff_s(failures, 0.5, 30.0) == pause_s
