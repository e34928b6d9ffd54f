"""Waiting for what another task or process is about to do."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable


async def until(holds: Callable[[], bool | Awaitable[bool]], limit_s: float = 60.0) -> None:
    """Return once `holds()` is true. Raises TimeoutError after `limit_s` seconds, enough for a slow machine."""
    async with asyncio.timeout(limit_s):
        while True:  # nothing notifies us: the code that makes it true does not know that a test waits
            found = holds()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)
