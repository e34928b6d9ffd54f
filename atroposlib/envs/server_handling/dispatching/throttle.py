"""The pace of all calls to one server that refuses some of them for a while (429, or 503 with a Retry-After).

    refused ──▶ closed for as long as the server asks ──▶ open: one call every `interval_s` ──answers──▶ faster
       ▲                                                                                         │
       └──────────────────────────────── refused again: half as fast ◀───────────────────────────┘

A refusal holds up every call to that server, not only the one that was refused: the others would only be refused, too.
The interval doubles with each refusal of a call that began after the last one, and shrinks with each answer: quickly
up to the pace that was last refused, slowly beyond it. A server that never refuses is never slowed down.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from atroposlib.logs import get_logger

log = get_logger(__name__)

FIRST_INTERVAL_S = 0.05
LONGEST_INTERVAL_S = 30.0
UNNOTICED_S = 0.005  # a shorter interval is none
FASTER, FASTER_THAN_REFUSED = 0.9, 0.99  # of the interval, with each answer
NEAR_REFUSED = 1.25  # times the interval that was refused: from here on slowly
TOLD_EVERY_S = 10.0


class Pauses(Protocol):
    """A `RetryPolicy`."""

    @property
    def sleep(self) -> Callable[[float], Awaitable[None]]: ...

    def refused_pause_s(self, refused: int, asked_s: float) -> float: ...


class Throttle:
    """Decides whether a call to the server may begin now. For one event loop; `now` is the clock, in seconds."""

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._now = now
        self.interval_s = 0.0
        self.answered = 0  # calls
        self.listeners: list[Callable[[], None]] = []
        self._refused_interval_s = 0.0
        self._refused_in_row = 0
        self._refused = 0  # since the log was told
        self._slowed_at = self._told_at = -math.inf
        self._hold: asyncio.Task[None] | None = None
        self._sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    @property
    def is_open(self) -> bool:
        """Return whether a call may begin."""
        return self._hold is None

    def began(self) -> None:
        """A call begins: the next one may after the interval."""
        if self.interval_s and self.is_open:
            self._close(self.interval_s)

    def note_answer(self) -> None:
        """The server has answered a call."""
        self.answered += 1
        self._refused_in_row = 0
        is_near = self.interval_s < NEAR_REFUSED * self._refused_interval_s
        self.interval_s *= FASTER_THAN_REFUSED if is_near else FASTER
        if self.interval_s < UNNOTICED_S:
            self.interval_s = 0.0

    def note_refusal(self, began_at: float, asked_s: float, policy: Pauses, reason: str) -> None:
        """The server has refused a call that began at `began_at`, and wants none for `asked_s` seconds (0: it did not
        say). Calls that began before the last slow-down are of the same burst, and slow down no further.
        """
        self._refused += 1
        if began_at <= self._slowed_at:
            return
        self._refused_in_row += 1
        self._slowed_at, self._refused_interval_s = self._now(), self.interval_s
        self.interval_s = min(LONGEST_INTERVAL_S, max(FIRST_INTERVAL_S, 2.0 * self.interval_s))
        pause_s = policy.refused_pause_s(self._refused_in_row, asked_s)
        self._sleep = policy.sleep
        self._tell(pause_s, reason)
        self._close(pause_s)

    async def close(self) -> None:
        """End the pause."""
        if self._hold is not None:
            self._hold.cancel()
            await asyncio.gather(self._hold, return_exceptions=True)
            self._hold = None

    def _close(self, seconds: float) -> None:
        if self._hold is not None:
            self._hold.cancel()
        self._hold = asyncio.create_task(self._held(seconds), name=f"pause of {self._name}")

    async def _held(self, seconds: float) -> None:
        await self._sleep(seconds)
        self._hold = None
        for listener in self.listeners:
            listener()

    def _tell(self, pause_s: float, reason: str) -> None:
        if self._now() - self._told_at < TOLD_EVERY_S:
            return
        log.warning(
            "%s refuses calls (%d since the last such line): sending it none for %.1f s, then at most %.1f a second"
            " (%s)",
            self._name,
            self._refused,
            pause_s,
            1.0 / self.interval_s,
            reason,
        )
        self._told_at, self._refused = self._now(), 0
