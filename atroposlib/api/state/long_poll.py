"""Requests that wait for a batch instead of polling.

    POST /batch/lease, wait_s ──▶ look ──a batch──▶ reply
                                  ▲  └─none yet──▶ until the state changes ──┐
                                  └──────────────────────────────────────────┘   after wait_s: "none yet"

Nothing is decided or reserved while a request waits, and a look is never interrupted. So a batch is leased either to a
client that was connected when the look began, or to nobody. If the client disconnects after that, the reply is lost:
the trainer gets the batch when it asks again, or its successor does.

Only the newest request of a trainer waits: a client that asks again does not read the reply to its earlier request. A
wait also ends when the client disconnects, when the API ends, or when the look raises because the trainer was replaced.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import takewhile
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

PAUSE_S = 0.01  # between a change and the look that it causes: so many posts cause one
LOOK_EVERY_S = 1.0  # some batches become possible by time alone: claims of silent environments lapse

T = TypeVar("T")


class Wait:
    """One request that waits until `deadline`, by the event loop's clock."""

    def __init__(self, deadline: float) -> None:
        self.is_over = False
        self.client_is_gone = False
        self._deadline = deadline
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Have it look again."""
        self._woken.set()

    def end(self) -> None:
        """Have it answer that there is no batch."""
        self.is_over = True
        self._woken.set()

    async def until_client_goes(self, receive: Receive) -> None:
        """End it when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.client_is_gone = True
        self.end()

    async def is_worth_a_look(self) -> bool:
        """Return True after a change, or after LOOK_EVERY_S; False when the wait is over. What changes during a look is
        not missed.
        """
        left_s = self._deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, LOOK_EVERY_S)):
                await self._woken.wait()
                await asyncio.sleep(PAUSE_S)
        self._woken.clear()
        return not self.is_over


class LongPoll:
    """All requests of one API that wait."""

    def __init__(self) -> None:
        self._waits: dict[Wait, None] = {}  # oldest first
        self._is_open = True

    def wake(self) -> None:
        """The state has changed."""
        for wait in self._waits:
            wait.wake()

    def close(self) -> None:
        """Answer all that wait; from now on none does."""
        self._is_open = False
        for wait in self._waits:
            wait.end()

    async def first(self, look: Callable[[], Awaitable[T | None]], wait_s: float, receive: Receive) -> T | None:
        """Return what `look` finds within `wait_s` seconds, or None. Raises what it raises, and ClientDisconnect."""
        wait = Wait(asyncio.get_running_loop().time() + wait_s * self._is_open)
        self._waits[wait] = None
        watch = asyncio.create_task(wait.until_client_goes(receive))
        try:
            result = await look()
            for older in takewhile(lambda each: each is not wait, self._waits):
                older.end()
            while result is None and await wait.is_worth_a_look():
                result = await look()
        finally:
            watch.cancel()
            del self._waits[wait]
        if result is None and wait.client_is_gone:
            raise ClientDisconnect
        return result
