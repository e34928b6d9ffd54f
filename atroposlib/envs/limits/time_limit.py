"""A time limit that does not count the time spent in a queue.

    async with time_limit(600) as limit:      # TimeoutError after 600 s of its own time
        with paused(): ...                    # code below that waits for its turn stops the clock

A rollout that waits for a free place on an inference server is not slow. If that time counted, long rollouts would be
the ones that fail when many run at once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar

SHORTEST_S = 0.001  # that a clock is left with when it is stopped just before its end


class Clock:
    """The time that is left, and whether it ran out. `seconds` 0 or less is no limit."""

    def __init__(self, seconds: float) -> None:
        self.timeout = asyncio.timeout(seconds if seconds > 0 else None)
        self.is_running = True
        self._left = seconds
        self._pauses = 0

    @property
    def ran_out(self) -> bool:
        """Return whether the limit was reached."""
        return self.timeout.expired()

    def pause(self) -> None:
        """Stop, until as many calls of `go_on`."""
        self._pauses += 1
        deadline = self.timeout.when()
        if self._pauses == 1 and deadline is not None and self._can_change:
            self._left = max(SHORTEST_S, deadline - asyncio.get_running_loop().time())
            self.timeout.reschedule(None)

    def go_on(self) -> None:
        """See `pause`."""
        self._pauses -= 1
        if not self._pauses and self._left > 0 and self._can_change:
            self.timeout.reschedule(asyncio.get_running_loop().time() + self._left)

    @property
    def _can_change(self) -> bool:
        return self.is_running and not self.timeout.expired()


_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[Clock]:
    """Raises TimeoutError when what is inside takes longer; a limit around it is paused."""
    with paused():
        clock = Clock(seconds)
        token = _clock.set(clock)
        try:
            async with clock.timeout:
                yield clock
        finally:
            clock.is_running = False
            _clock.reset(token)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """While this lasts, the clock of the time limit around this code is stopped."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    clock.pause()
    try:
        yield
    finally:
        clock.go_on()
