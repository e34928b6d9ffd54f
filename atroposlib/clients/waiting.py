"""Waiting for a peer: a log line before, one every ten seconds, one with the duration after, and a deadline.

wait_for(attempt, Wait("a batch", url, 60, failed))             `attempt` raises NotYet until the peer is ready
await wait_for_async(attempt, Wait("a batch", url, 60, failed)) the same on an event loop
with waiting(log, "the group", peer=url, deadline_s=60): ...    around one call that blocks and has its own deadline
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from atroposlib.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")
REPORT_EVERY_S = 10.0
WHY_FIRST_S = 30.0
WHY_EVERY_S = 60.0
GROWTH = 1.5  # of each pause between attempts over the previous one


def backoff_s(failures: int, first_s: float, longest_s: float, growth: float = 2.0) -> float:
    """Seconds to pause after so many failures in a row, at least one: `first_s`, then `growth` times as long each time,
    at most `longest_s`.
    """
    return min(longest_s, first_s * growth ** min(failures - 1, 100))  # a float ends at 2**1024


class NotYet(Exception):
    """The peer is not ready; the message is the reason. `after_s`: seconds until the next attempt, if it asked for
    them; 0 after an attempt that has itself waited.
    """

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


@dataclass
class Wait:
    """Describes what this process waits for, from whom and for how long. `failed` makes the error of the last reason.

    Pauses between attempts grow from `first_pause_s` to `last_pause_s`. Nothing is logged if the first attempt
    succeeds. `now` is the clock, in seconds. With `why`, which may ask the peers, the lines are fewer: one at once, one
    after half a minute and one a minute from then on, with what `why` tells in place of the last attempt's reason.
    """

    what: str
    peer: str
    deadline_s: float
    failed: Callable[[str], Exception]
    first_pause_s: float = 0.05
    last_pause_s: float = 1.0
    now: Callable[[], float] = time.monotonic
    why: Callable[[str], str] | None = None
    _start: float = field(init=False)
    _next_report_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._start = self.now()

    def pause_after(self, reason: NotYet) -> float:
        """Seconds until the next attempt. Raises what `failed` makes once the deadline has passed."""
        waited = self.now() - self._start
        if waited >= self.deadline_s:
            raise self.failed(self._reason(reason)) from reason.__cause__
        if waited >= self._next_report_s:
            told = self._reason(reason) if waited else str(reason)
            self._next_report_s = self._after(self._next_report_s)
            log.info(
                "Waiting for %s from %s, %.0f s of at most %.0f s so far (%s)",
                self.what,
                self.peer,
                waited,
                self.deadline_s,
                told,
            )
        pause = self.first_pause_s if reason.after_s is None else reason.after_s
        self.first_pause_s = min(self.first_pause_s * GROWTH, self.last_pause_s)
        return min(pause, self.deadline_s - waited)

    def _reason(self, reason: NotYet) -> str:
        return str(reason) if self.why is None else self.why(str(reason))

    def _after(self, reported_s: float) -> float:
        if self.why is None:
            return reported_s + REPORT_EVERY_S
        return reported_s + WHY_EVERY_S if reported_s else WHY_FIRST_S

    def over(self, value: T) -> T:
        """The peer is ready: log how long it took, and return `value`."""
        if self._next_report_s:
            log.info("Got %s from %s after %.1f s", self.what, self.peer, self.now() - self._start)
        return value


def wait_for(attempt: Callable[[], T], wait: Wait, sleep: Callable[[float], None] = time.sleep) -> T:
    """The first value that `attempt` returns. Raises what it raises but NotYet, and `wait.failed` at the deadline."""
    while True:
        try:
            return wait.over(attempt())
        except NotYet as reason:
            sleep(wait.pause_after(reason))


async def wait_for_async(
    attempt: Callable[[], Awaitable[T]], wait: Wait, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> T:
    """Wait as `wait_for` does, on an event loop."""
    while True:
        try:
            return wait.over(await attempt())
        except NotYet as reason:
            await sleep(wait.pause_after(reason))


@contextlib.contextmanager
def waiting(log: logging.Logger, what: str, *, peer: str, deadline_s: float) -> Iterator[None]:
    """Log what this process waits for before it blocks, and how long it took after; `deadline_s` in seconds."""
    log.info("Waiting for %s from %s, at most %.0f s", what, peer, deadline_s)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        log.warning("Gave up waiting for %s from %s after %.1f s", what, peer, time.monotonic() - start)
        raise
    log.info("Got %s from %s after %.1f s", what, peer, time.monotonic() - start)
