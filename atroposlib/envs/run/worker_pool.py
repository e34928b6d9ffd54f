"""The groups being sampled: one task each, counted, timed, and slowed down together when every one of them fails."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TypedDict

from atroposlib.clients.waiting import backoff_s
from atroposlib.envs.authors.author_errors import ErrorBudget, shown
from atroposlib.envs.errors import EnvError
from atroposlib.envs.payloads import Item
from atroposlib.logs import get_logger

log = get_logger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class RunningItem(TypedDict):
    """An item that is being sampled for; `start_time` is seconds since the epoch."""

    item: Item
    worker: asyncio.Task[None]
    start_time: float


class WorkerPool:
    """Runs `handle` on items, as tasks that stand in `tasks`.

    An item whose handling raises is logged with its traceback, counted by `on_end` and by `budget`, and dropped;
    nothing starts for a while that doubles with each failure in a row, up to half a minute. What is not a failure of an
    item, an EnvError or a spent budget, is kept in `fatal`.
    """

    def __init__(
        self,
        handle: Callable[[Item], Awaitable[None]],
        tasks: set[object],
        on_end: Callable[[bool, float], None],
        budget: ErrorBudget,
    ) -> None:
        self._handle = handle
        self._tasks = tasks
        self._on_end = on_end
        self._budget = budget
        self._workers: set[asyncio.Task[None]] = set()
        self.running: dict[str, RunningItem] = {}
        self._failures_in_row = 0
        self._not_before = 0.0
        self.fatal: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Groups being sampled."""
        return len(self._workers)

    @property
    def is_paused(self) -> bool:
        """Return whether failures forbid to start anything just now."""
        return time.monotonic() < self._not_before

    def start(self, item: Item) -> None:
        """Begin to work on `item`."""
        key = uuid.uuid4().hex
        task = asyncio.create_task(self._work(item))
        self.running[key] = {"item": item, "worker": task, "start_time": time.time()}
        task.add_done_callback(lambda done: self.running.pop(key, None))
        self._workers.add(task)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    async def wait(self, timeout_s: float) -> None:
        """Return when a worker ends, at the latest after `timeout_s` seconds."""
        if self._workers:
            await asyncio.wait(self._workers, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(timeout_s)

    async def cancel_all(self) -> None:
        """End all workers; their items are lost."""
        tasks = list(self._workers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, item: Item) -> None:
        start = time.monotonic()
        try:
            await self._handle(item)
        except EnvError:
            raise
        except Exception as error:
            self._on_end(False, time.monotonic() - start)
            self.note_failure(error, shown(item))
        else:
            self._failures_in_row = 0
            self._not_before = 0.0
            self._budget.note_success()
            self._on_end(True, time.monotonic() - start)

    def note_failure(self, error: Exception, item: str) -> None:
        """Log what was lost and where, and start nothing for a while. Raises TooManyFailures."""
        self._failures_in_row += 1
        pause_s = backoff_s(self._failures_in_row, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + pause_s
        then = f" ({self._failures_in_row} failure(s) in a row, pausing {pause_s:.1f} s)"
        self._budget.note_failure(error, item, then)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._workers.discard(task)
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()  # of every task, or asyncio logs it as never retrieved
            self.fatal = self.fatal or error
