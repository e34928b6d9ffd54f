"""Waiting for what another task or process is about to do, and a clock for what would wait."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def until(holds: Callable[[], bool | Awaitable[bool]], limit_s: float = 60.0) -> None:
    """Return once `holds()` is true. Raises TimeoutError after `limit_s` seconds, enough for a slow machine."""
    async with asyncio.timeout(limit_s):
        while True:  # nothing notifies us: the code that makes it true does not know that a test waits
            found = holds()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


def wait_until(holds: Callable[[], object], limit_s: float = 60.0) -> None:
    """Return once `holds()` is true, where there is no loop of asyncio."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"not so within {limit_s} s"
        time.sleep(0.02)


class Clock:
    """Time that passes where a test sets it, and by sleeping."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    monotonic = __call__

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)
