"""Which server a call goes to, how long it waits for one, and how often it is tried again.

A `Dispatcher` hands the free slots of live servers to waiting calls, first come first served; `run_with_retries`
sends one call through it until it succeeds, fails for good, or has used up its attempts. A call that failed on one
server goes to another live one.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from atroposlib.clients.waiting import backoff_s
from atroposlib.envs.limits.time_limit import paused
from atroposlib.envs.server_handling.dispatching.admission import AdmissionGate
from atroposlib.envs.server_handling.dispatching.health import HealthMonitor
from atroposlib.envs.server_handling.dispatching.throttle import Throttle
from atroposlib.envs.server_handling.errors import NoLiveServerError, RetryableServerError, ServerUnreachableError
from atroposlib.logs import get_logger

log = get_logger(__name__)

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")
REPORT_INTERVAL_S = 60.0
LONGEST_WISH_S = 60.0  # of a server that asks to be left alone
REFUSED_FACTOR = 4.0  # how much longer pauses are after a refusal: six tries outlast a limit per minute


class Dispatchable(Protocol):
    """Lists what a dispatcher knows of a server."""

    gates: dict[Split, AdmissionGate]
    throttle: Throttle
    timings: dict[Split, deque[tuple[float, int]]]
    health: HealthMonitor
    dedicated_users: int

    @property
    def name(self) -> str:
        """The address, as it appears in logs and errors."""

    @property
    def timeout_s(self) -> float:
        """Seconds that one request may take."""


T = TypeVar("T")
Server = TypeVar("Server", bound=Dispatchable)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `attempts` tries; before try k+1 a pause of 50-100 % of min(cap, base * 2**(k-1)) seconds.

    A server that does not answer is asked again every `dead_interval_s` seconds. A try that a server refuses for its
    rate does not count while that server answers others: the call has only to wait for its turn.
    """

    attempts: int = 6
    base_s: float = 0.5
    cap_s: float = 10.0
    dead_interval_s: float = 1.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def pause_s(self, failed: int, asked_s: float = 0.0) -> float:
        """Seconds to pause after `failed` tries; a server's Retry-After (`asked_s`) is honoured up to a minute."""
        backoff = backoff_s(failed, self.base_s, self.cap_s) * random.uniform(0.5, 1.0)
        return max(backoff, min(asked_s, LONGEST_WISH_S))

    def refused_pause_s(self, refused: int, asked_s: float) -> float:
        """Seconds for which nothing is sent to a server that has refused calls `refused` times in a row."""
        if asked_s > 0:
            return min(asked_s, LONGEST_WISH_S)
        return backoff_s(refused, REFUSED_FACTOR * self.base_s, LONGEST_WISH_S)


@dataclass(eq=False, slots=True)
class _Waiter(Generic[Server]):
    """A call that waits for a slot. `expiry` runs only while no server is live."""

    granted: asyncio.Future[Server]
    prefer: Server | None
    avoid: Server | None
    since: float = field(default_factory=time.monotonic)
    expiry: asyncio.TimerHandle | None = None


class Dispatcher(Generic[Server]):
    """The calls of one split that wait for one of `servers`."""

    def __init__(self, servers: Sequence[Server], split: Split) -> None:
        self._servers: list[Server] = []
        self._split = split
        self._waiters: deque[_Waiter[Server]] = deque()
        self._outage_since: float | None = None
        self._report: asyncio.TimerHandle | None = None
        for server in servers:
            self.add(server)

    def add(self, server: Server) -> None:
        """Send calls to one more server from now on."""
        self._servers.append(server)
        server.gates[self._split].listeners.append(self._dispatch)
        server.health.listeners.append(self._dispatch)
        if self._waiters:
            server.health.start()
            self._dispatch()

    def remove(self, server: Server) -> None:
        """Send no more calls to a server; those under way end there."""
        self._servers.remove(server)

    @contextlib.asynccontextmanager
    async def slot(self, prefer: Server | None = None, avoid: Server | None = None) -> AsyncIterator[Server]:
        """Hold a slot of a live server: `prefer` if it has one free, else the one with most; never `avoid` if another
        is live.

        Waits as long as live servers are merely busy. Raises NoLiveServerError when none is live for their timeout.
        """
        for server in self._servers:
            server.health.start()
        granted: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._waiters.append(_Waiter(granted, prefer, avoid))
        self._dispatch()
        try:
            with paused():
                server = await granted
            yield server
        finally:  # also for a call that was cancelled at the moment it was granted the slot
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().gates[self._split].give_back()

    def _dispatch(self) -> None:
        """Hand out what can be handed out; called on every arrival, freed slot, weight and health change."""
        self._note_outage()
        unserved: list[_Waiter[Server]] = []
        while self._waiters and any(
            server.health.live and server.gates[self._split].free > 0 for server in self._servers
        ):
            waiter = self._waiters.popleft()
            if waiter.granted.done():
                continue
            server = self._choose(waiter)
            if server is None:
                unserved.append(waiter)
                continue
            server.gates[self._split].take()
            server.throttle.began()
            waiter.granted.set_result(server)
        self._waiters.extendleft(reversed(unserved))
        if self._waiters and self._report is None:
            self._report = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._report_waiting)

    def _choose(self, waiter: _Waiter[Server]) -> Server | None:
        live = [server for server in self._servers if server.health.live]
        candidates = [server for server in live if server is not waiter.avoid] or live
        free = [server for server in candidates if server.gates[self._split].free > 0]
        if waiter.prefer in free:
            return waiter.prefer
        return max(free, key=lambda server: server.gates[self._split].free - server.dedicated_users, default=None)

    # --- outages --------------------------------------------------------------------------------------------------

    def _note_outage(self) -> None:
        """Start or end the clocks of the waiting calls as the last live server goes or the first one comes."""
        if any(server.health.live for server in self._servers):
            if self._outage_since is not None:
                log.info("An inference server is live after %.1f s", time.monotonic() - self._outage_since)
            self._outage_since = None
            for waiter in self._waiters:
                if waiter.expiry is not None:
                    waiter.expiry.cancel()
                    waiter.expiry = None
            return
        if not self._waiters:
            return
        for waiter in self._waiters:
            if waiter.expiry is None and not waiter.granted.done():
                waiter.expiry = asyncio.get_running_loop().call_later(self._timeout_s, self._expire, waiter)
        if self._outage_since is None:
            self._outage_since = time.monotonic()
            names = ", ".join(server.name for server in self._servers)
            log.info("Waiting for an inference server to be live at %s, at most %.0f s", names, self._timeout_s)

    @property
    def _timeout_s(self) -> float:
        return max(server.timeout_s for server in self._servers)

    def _expire(self, waiter: _Waiter[Server]) -> None:
        if waiter.granted.done():
            return
        problems = "; ".join(f"{server.name}: {server.health.problem}" for server in self._servers)
        waiter.granted.set_exception(
            NoLiveServerError(
                f"no inference server was live within {self._timeout_s:.0f} s ({problems}); start it, correct base_url,"
                " or raise timeout"
            )
        )
        self._waiters.remove(waiter)

    def _report_waiting(self) -> None:
        """Log one line per minute while calls wait, whether for a slot or for a server."""
        self._report = None
        waiting = [waiter for waiter in self._waiters if not waiter.granted.done()]
        if not waiting:
            return
        state = ", ".join(
            f"{server.name} ({f'{server.gates[self._split].in_use} of {server.gates[self._split].limit} in use'}"
            f"{'' if server.health.live else f', unreachable: {server.health.problem}'})"
            for server in self._servers
        )
        log.info(
            "%d %s calls wait for a slot, the oldest for %.0f s: %s",
            len(waiting),
            self._split,
            time.monotonic() - waiting[0].since,
            state,
        )
        self._report = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._report_waiting)


async def run_with_retries(
    dispatcher: Dispatcher[Server],
    policy: RetryPolicy,
    split: Split,
    what: str,
    operation: Callable[[Server], Awaitable[T]],
    prefer: Server | None = None,
) -> tuple[T, Server]:
    """The result of `operation` and the server that gave it; each try is bounded by that server's timeout.

    Raises PermanentServerError at the first permanent failure, RetryableServerError when all attempts failed,
    NoLiveServerError when nothing was live for too long.
    """
    avoid: Server | None = None
    failure = RetryableServerError(f"{what} was not tried")
    failed, tries, first_try = 0, 0, time.monotonic()
    answered: dict[str, int] = {}  # by each server, when it failed this call last
    while failed < policy.attempts:
        async with dispatcher.slot(prefer, avoid) as server:
            tries += 1
            start = time.monotonic()
            try:
                async with asyncio.timeout(server.timeout_s):
                    result = await operation(server)
                server.timings[split].append((time.monotonic() - start, tries))
                server.throttle.note_answer()
                return result, server
            except TimeoutError:
                failure = RetryableServerError(
                    f"{what} took longer than the timeout of {server.timeout_s:g} s at {server.name}"
                )
            except RetryableServerError as error:
                failure = error
            avoid = server
            if failure.is_refusal:
                server.throttle.note_refusal(start, failure.retry_after_s, policy, str(failure))
            if isinstance(failure, ServerUnreachableError):
                server.health.report_unreachable(str(failure), failure.retry_after_s)
            before, answered[server.name] = answered.get(server.name), server.throttle.answered
        is_its_turn_to_come = (
            failure.is_refusal
            and before is not None
            and before < answered[server.name]
            and time.monotonic() - first_try < server.timeout_s
        )
        failed += not is_its_turn_to_come
        if failed < policy.attempts and not failure.is_refusal:
            pause_s = policy.pause_s(failed)
            log.warning(
                "%s failed (try %d of %d): %s; trying again in %.1f s", what, failed, policy.attempts, failure, pause_s
            )
            await policy.sleep(pause_s)
    raise RetryableServerError(f"{what} failed {tries} times, most recently: {failure}") from failure


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
