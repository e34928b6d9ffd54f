"""Checks with a cheap request every few seconds whether a server answers."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from atroposlib.logs import get_logger

log = get_logger(__name__)

LIVE_INTERVAL_S = 5.0
# A busy server may miss a probe; one that misses this many in a row gets no new requests.
FAILURES_UNTIL_DEAD = 3
LONGEST_REST_S = 60.0

# Returns None when the server is able to serve, else why not.
Probe = Callable[[], Awaitable[str | None]]


class HealthMonitor:
    """Probes one server from the first `start` until `close`; listeners hear of every change.

    A monitored server counts as dead until its first probe succeeds, after three failed probes in a row, and at once
    after a request could not connect or was answered 503 (`report_unreachable`). An unmonitored one always counts as
    live.
    """

    def __init__(self, name: str, probe: Probe, *, enabled: bool, dead_interval_s: float) -> None:
        self._name = name
        self._probe = probe
        self._enabled = enabled
        self.dead_interval_s = dead_interval_s
        self._failures = 0
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._rest_s = 0.0
        self.live = not enabled
        self.problem = "not asked yet"
        self.listeners: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to probe unless that is under way; needs a running event loop."""
        if self._enabled and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._watch(), name=f"health of {self._name}")

    def report_unreachable(self, problem: str, for_s: float = 0.0) -> None:
        """A request could not connect, or the server asked to be left alone `for_s` seconds: dead until the next
        probe, then.
        """
        if not self._enabled:
            return
        self._failures = FAILURES_UNTIL_DEAD
        self._rest_s = min(for_s, LONGEST_REST_S)
        self._become(live=False, problem=problem)
        self._wake.set()

    async def close(self) -> None:
        """Stop probing."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _watch(self) -> None:
        while True:
            problem = await self._probe()
            self._failures = 0 if problem is None else self._failures + 1
            if problem is None:
                self._become(live=True, problem="")
            elif not self.live or self._failures >= FAILURES_UNTIL_DEAD:
                self._become(live=False, problem=problem)
            self._wake.clear()
            interval = LIVE_INTERVAL_S if problem is None else self.dead_interval_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), interval)
                # A request has just failed to connect: leave the server the time that a dead one gets, or that it asked
                # for.
                await asyncio.sleep(max(self.dead_interval_s, self._rest_s))

    def _become(self, *, live: bool, problem: str) -> None:
        changed, self.live, self.problem = live != self.live, live, problem
        if not changed:
            return
        log.log(
            logging.INFO if live else logging.WARNING,
            "Inference server %s %s",
            self._name,
            "is live" if live else f"is unreachable: {problem}",
        )
        for listener in self.listeners:
            listener()
