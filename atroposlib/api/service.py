"""The running API: decides what changes in the state, which is as it is on disk (journalled_state.py).

    routes ──▶ RolloutService ──change, bytes──▶ JournalledState ──on disk, applied──▶ reply

Everything but the journal's thread runs on the event loop. Deliveries are decided one at a time, while posts continue.
"""

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from atroposlib.api.groups.group_checks import flaw
from atroposlib.api.journal.journal import Journal
from atroposlib.api.journal.journal_file import Body, DeadLetter
from atroposlib.api.journalled_state import JournalledState
from atroposlib.api.settings import RunApiConfig
from atroposlib.api.state import changes
from atroposlib.api.state.activity import Reports
from atroposlib.api.state.changes import Change, PostedGroup, StoredGroup
from atroposlib.api.state.counters import Counters
from atroposlib.api.state.leases import Lease
from atroposlib.api.state.liveness import Liveness
from atroposlib.api.state.queue import NOT_REGISTERED, Environment, NotRegistered
from atroposlib.api.state.selection import Group
from atroposlib.api.state.state import Batch
from atroposlib.groups import staleness_weight
from atroposlib.logs import get_logger
from atroposlib.processes.identity import has_ended
from atroposlib.wire.batching import (
    Acknowledged,
    Activity,
    Arrivals,
    EnvActivity,
    EnvRegistration,
    EnvStatus,
    Evaluation,
    GroupRequirements,
    Outcome,
    Registration,
    RejectionTaken,
    SetAside,
    TrainerStep,
)
from atroposlib.wire.servers import MOST, State

UUID_LIMIT = 2**53  # JSON readers keep integers below it exact
MAX_UNTOLD = 1_000  # groups set aside at delivery that the trainer is told of with its next batch
MAX_LOGGED = 10  # of the groups set aside together
LOOK_EVERY_S = 1.0  # for environments that were killed
MAX_AHEAD = 4096  # groups that are checked before they are about to be delivered

log = get_logger(__name__)
Content = tuple[bytes, bool, float]  # a group's bytes, whether they are MessagePack, its staleness weight


class QueueFull(Exception):
    """The queue is full; try again later."""


class KeyReused(Exception):
    """An idempotency key stands for another post."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"Idempotency-Key {key[:40]!a} is that of a post with other groups: nothing was stored, each post needs"
            " its own"
        )


class TooManyServers(Exception):
    """The list of servers that joined or left is full."""


class NotTheTrainer(Exception):
    """Another trainer has registered since this one did."""

    def __init__(self, trainer: int | None) -> None:
        super().__init__(f"trainer {trainer} is not the one registered here: another has taken over its batches")


class RolloutService(JournalledState):
    """See the module's head. `clock` is in seconds. Raises JournalError when the journal cannot be replayed."""

    def __init__(
        self, settings: RunApiConfig, journal: Journal | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(journal)
        self.settings = settings
        self.counters = Counters()
        self.new_lease: Callable[[], int] = _random_id
        self.reports = Reports(clock)
        self._clock = clock
        self._untold: deque[SetAside] = deque(maxlen=MAX_UNTOLD)
        self._posting: dict[str, tuple[asyncio.Future[Any], int]] = {}  # by key, with the digest of what is posted
        self._deciding = asyncio.Lock()
        self._environments = Liveness(settings.env_timeout)
        self._forget_s = max(settings.env_forget, settings.env_timeout)
        self._remembered = Liveness(self._forget_s)
        self._trainers = Liveness(settings.trainer_timeout)
        self._looked_at = -math.inf  # for processes that have ended
        self._asked_at: float | None = None  # when this trainer last asked for a batch
        self._trainer_heard = False  # since this process began: one of the journal may be resumed at an earlier step
        self._next_id = self.state.next_id
        if journal is not None:  # all that were known then may return
            for env_id in self.state.queue.environments:
                self.hear_environment(env_id)
            self._trainers.heard(self.state.trainer, self._clock())

    # --- trainer -----------------------------------------------------------------------------------------------------

    async def register(self, registration: Registration) -> tuple[int, int]:
        """The trainer's uuid, and how many groups of another run were forgotten."""
        trainer = _random_id()
        async with self._deciding:
            forgotten = await self._submit(changes.TrainerRegistered(registration, trainer))
        self.counters.forgotten += forgotten
        self._trainers.heard(trainer, self._clock())
        self._trainer_heard = True
        self._asked_at = None
        return trainer, forgotten

    async def pop(self) -> list[Content] | None:
        """Remove and return the next batch; None if there is none yet. Raises NotRegistered."""
        async with self._deciding:
            await self._before_delivery()
            delivery = await self._next_delivery()
            if delivery is None:
                return None
            change, groups = delivery
            contents = self._contents(groups)
            await self._submit(change)
        self._count_delivery(groups)
        self._count_weights(contents)
        return contents

    async def lease(self, trainer: int, holding: Sequence[int]) -> tuple[Lease[StoredGroup], list[Content]] | None:
        """The next batch, kept until it is acknowledged; None: not yet.

        One that the trainer was given and does not name in `holding` is given again. Raises NotRegistered,
        NotTheTrainer.
        """
        async with self._turn_of(trainer, NOT_REGISTERED):
            await self._before_delivery()
            lease = self.state.leases.lost_in_transit(trainer, holding)
            if lease is None:
                delivery = await self._next_delivery(trainer, self.new_lease())
                if delivery is None:
                    return None
                lease = await self._submit(delivery[0])
                self._count_delivery(lease.groups)
                self.counters.redelivered += isinstance(delivery[0], changes.LeasesTaken)
            contents = self._contents(lease.groups)
            self._count_weights(contents)
            return lease, contents

    async def arrivals(
        self, trainer: int, holding: Sequence[int], known: Collection[int]
    ) -> tuple[list[int], list[Content]] | None:
        """Ids and contents of groups that wait for the next batch and are not among the `known`; none if there is a
        batch to lease. None: nothing new yet. Raises NotRegistered, NotTheTrainer.
        """
        async with self._turn_of(trainer, Arrivals([], whole=True)):  # the lease tells what is wrong
            await self._before_delivery()
            if self.state.leases.lost_in_transit(trainer, holding) or self.state.next_delivery(trainer):
                return [], []
            new = [group for group in self.state.queue.foreseen() if group.record.id not in known]
            unusable = {group for group, _ in await self._unusable(new)}  # set aside when their batch is whole
            groups = [group for group in new if group not in unusable]
            return ([group.record.id for group in groups], self._contents(groups)) if groups else None

    async def acknowledge(self, trainer: int, leases: Sequence[int]) -> Acknowledged:
        """End these leases: the trainer has trained on their batches. Raises NotRegistered, NotTheTrainer."""
        async with self._turn_of(trainer, Acknowledged("error", 0, list(leases))):
            known = self.state.leases.known_to(trainer, leases)
            if known:
                await self._submit(changes.LeasesAcknowledged(known))
        self.counters.acknowledged += len(known)
        return Acknowledged("success", len(known), [lease for lease in leases if lease not in known])

    async def reject(self, trainer: int, lease_id: int, reasons: Mapping[int, str]) -> RejectionTaken:
        """Set aside groups of a leased batch, named by their ids, that the trainer cannot train on.

        Raises NotRegistered, NotTheTrainer.
        """
        async with self._turn_of(trainer, RejectionTaken("error", [], list(reasons))):
            groups = {
                group.record.id: group
                for lease in self.state.leases.known_to(trainer, [lease_id])
                for group in self.state.leases[lease].groups
            }
            refused = [(groups[identity], reason) for identity, reason in reasons.items() if identity in groups]
            rejected = await self._set_aside(refused, "trainer") if refused else []
        return RejectionTaken("success", rejected, [identity for identity in reasons if identity not in groups])

    def take_untold(self) -> list[SetAside]:
        """The groups set aside at delivery since the last call."""
        untold = list(self._untold)
        self._untold.clear()
        return untold

    async def trainer_heartbeat(self, trainer: int) -> None:
        """Record a sign of life of the trainer. Raises NotRegistered, NotTheTrainer."""
        async with self._turn_of(trainer, Outcome("failure", "no trainer is registered")):
            pass

    async def report_step(self, report: TrainerStep) -> None:
        """Record what the trainer has finished, and what vLLM serves. Raises NotTheTrainer where it names another."""
        async with self._deciding:
            if self.state.queue.registration is not None and report.trainer not in (None, self.state.trainer):
                raise NotTheTrainer(report.trainer)
            progress = asdict(report)
            del progress["trainer"]
            await self._submit(changes.TrainerReported(**progress))

    def servers(self) -> dict[str, State]:
        """Inference servers that have joined or left. Those of the journal count once their trainer is heard of: one
        that resumes the run begins with the servers of its configuration.
        """
        return self.state.servers if self._trainer_heard else {}

    async def change_server(self, url: str, state: State) -> None:
        """Record that an inference server joins, serves, leaves or has left. Raises TooManyServers."""
        async with self._deciding:
            if url not in self.state.servers and len(self.state.servers) >= MOST:
                raise TooManyServers(
                    f"{MOST} servers have joined or left since the trainer registered: no more are listed"
                )
            await self._submit(changes.ServerChanged(url, state))

    @asynccontextmanager
    async def _turn_of(self, trainer: int, unless_registered: Struct) -> AsyncIterator[None]:
        """Nothing else is decided meanwhile. The trainer is alive, so batches that it had given up are its own again.

        Raises NotRegistered with the answer `unless_registered`, NotTheTrainer.
        """
        async with self._deciding:
            if self.state.queue.registration is None:
                raise NotRegistered(unless_registered)
            if trainer != self.state.trainer:
                raise NotTheTrainer(trainer)
            self._trainers.heard(trainer, self._clock())
            self._trainer_heard = True
            if returned := self.state.leases.reclaimable(trainer):
                log.info("The trainer is back and keeps %d batch(es)", len(returned))
                await self._submit(changes.LeasesTaken(returned, trainer))
            yield

    async def _before_delivery(self) -> None:
        """Whatever has to happen first: environments let in, batches of a silent trainer returned, stale groups
        dropped.
        """
        if self.state.queue.registration is None:
            raise NotRegistered
        self._asked_at = self._clock()
        self._trainer_heard = True
        self.expire_silent()
        if not self.state.queue.started:
            await self._submit(changes.TrainerPolled())
        if self.state.trainer in self._trainers.silent and (held := self.state.leases.held()):
            log.warning(
                "The trainer has been silent for %.0f s: %d batch(es) return to the queue",
                self.settings.trainer_timeout,
                len(held),
            )
            await self._submit(changes.LeasesReturned([lease.lease_id for lease in held]))
        limit = self.settings.max_staleness
        if limit is not None and self.settings.stale_groups == "drop" and (stale := self.state.stale(limit)):
            dropped = await self._submit(changes.GroupsDropped(stale))
            self.counters.stale_dropped += len(dropped)
            log.info("Dropped %d groups that were sampled more than %d policy versions ago", len(dropped), limit)

    async def _next_delivery(self, trainer: int = 0, new_lease: int = 0) -> tuple[Change, Batch] | None:
        """Return the state's next delivery, but set aside groups from before the trainer registered that it cannot use.

        More and more of those behind them are looked at, too: each time that some are set aside costs time in the
        length of the queue.
        """
        ahead = 1
        while (delivery := self.state.next_delivery(trainer, new_lease)) is not None:
            if not (unusable := await self._unusable(delivery[1])):
                return delivery
            self._untold += await self._set_aside(unusable, "delivery")
            ahead = min(2 * ahead, MAX_AHEAD)
            if unusable := await self._unusable(list(islice(self._unread(self.state.queue.lanes), ahead))):
                self._untold += await self._set_aside(unusable, "delivery")
        return None

    async def _unusable(self, groups: Sequence[Group[StoredGroup]]) -> list[tuple[Group[StoredGroup], str]]:
        """Find the groups that do not meet the trainer's needs, with reasons. One that met them is not read again."""
        needs, unread = self.needs, list(self._unread(groups))
        if not unread:
            return []
        bodies = [self._bodies[group.record.id] for group in unread]
        reasons = await asyncio.to_thread(lambda: [flaw(body.data, body.packed, needs) for body in bodies])
        for body, reason in zip(bodies, reasons, strict=True):
            if reason is None:
                self._bodies[body.id] = replace(body, checked=needs)
        return [(group, reason) for group, reason in zip(unread, reasons, strict=True) if reason is not None]

    def _unread(self, groups: Iterable[Group[StoredGroup]]) -> Iterator[Group[StoredGroup]]:
        needs = self.needs
        required = needs != GroupRequirements()
        return (group for group in groups if required and self._bodies[group.record.id].checked != needs)

    async def _set_aside(self, refused: Sequence[tuple[Group[StoredGroup], str]], found_by: str) -> list[SetAside]:
        letters = []
        for identity, (group, reason) in enumerate(refused, self.dead_letters.next_id):
            letters.append(
                DeadLetter(
                    time.time(),
                    group.env_id,
                    self.state.queue.name_of(group.env_id),
                    reason,
                    replace(self._bodies[group.record.id], id=identity),
                )
            )
        await self._submit(changes.GroupsRejected([group.order for group, _ in refused]), letters=letters)
        self.dead_letters.add(letters)
        self.counters.rejected[found_by] += len(letters)
        told = [
            SetAside(group.record.id, group.env_id, letter.environment, reason)
            for (group, reason), letter in zip(refused, letters, strict=True)
        ]
        for each in told[:MAX_LOGGED]:
            log.warning(
                "Set aside group %d of environment %s, which cannot be trained on (found by the %s): %s",
                each.id,
                each.environment,
                found_by,
                each.reason,
            )
        if len(told) > MAX_LOGGED:
            log.warning("Set aside %d more groups; /dead-letters lists them", len(told) - MAX_LOGGED)
        return told

    @property
    def needs(self) -> GroupRequirements:
        """Return what the registered trainer needs of a group, as far as is known."""
        run = self.state.queue.registration
        needs = GroupRequirements() if run is None else run.requirements()
        needs.vocab_size = self.settings.vocab_size or needs.vocab_size
        return needs

    def _count_delivery(self, groups: Sequence[Group[StoredGroup]]) -> None:
        self.counters.batches += 1
        self.counters.rollouts_delivered += sum(group.size for group in groups)

    def _count_weights(self, contents: Sequence[Content]) -> None:
        self.counters.stale_down_weighted += sum(weight < 1 for *_, weight in contents)

    # --- environments ------------------------------------------------------------------------------------------------

    async def join(self, request: EnvRegistration) -> Environment | None:
        """The new environment; None while no trainer has polled, or the journal's has not been heard of again. Raises
        QueueFull.
        """
        if not self.state.queue.started or not self._trainer_heard:
            return None
        self.expire_silent()
        if len(self.state.queue.environments) >= self.settings.max_environments:
            raise QueueFull(
                f"{self.settings.max_environments} environments are registered, which is the limit "
                f"(--max-environments); silent ones are removed after {self._forget_s:.0f} s"
            )
        environment: Environment | None = await self._submit(changes.EnvironmentJoined(request))
        if environment is not None:
            self.hear_environment(environment.env_id)
        return environment

    async def leave(self, env_id: int) -> Environment:
        """Take an environment out. Raises UnknownEnvironment."""
        environment = self.state.queue.environment(env_id)
        await self._submit(changes.EnvironmentLeft(env_id))
        return environment

    def hear_environment(self, env_id: int | None) -> None:
        """Record a sign of life of an environment; ignored if it is unknown."""
        if env_id is None or env_id not in self.state.queue.environments:
            return
        self._remembered.heard(env_id, self._clock())
        if self._environments.heard(env_id, self._clock()):
            log.info("Environment %s is back", self.state.queue.environment(env_id).name)
            self.state.queue.set_silent(env_id, False)

    def expire_silent(self) -> None:
        """Let the claims of environments lapse that were silent for too long, and forget those silent for longer."""
        now = self._clock()
        self._leave_ended(now)
        self._trainers.newly_silent(now)
        silent = [env_id for env_id in self._environments.newly_silent(now) if env_id in self.state.queue.environments]
        for env_id in silent:
            self.state.queue.set_silent(env_id, True)
        lapsed = [env_id for env_id in silent if self.state.queue.environment(env_id).connected]
        for env_id in lapsed[:MAX_LOGGED]:
            log.warning(
                "Environment %s has been silent for %.0f s: its minimum and weight do not apply until it is back",
                self.state.queue.name_of(env_id),
                self.settings.env_timeout,
            )
        if len(lapsed) > MAX_LOGGED:
            log.warning("%d more environments are silent", len(lapsed) - MAX_LOGGED)
        if gone := [env_id for env_id in self._remembered.newly_silent(now) if env_id in self.state.queue.environments]:
            self._submit(changes.EnvironmentsForgotten(gone)).add_done_callback(partial(self._forgotten, gone))

    def _leave_ended(self, now: float) -> None:
        """Take out environments of this machine that were killed."""
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        for each in list(self.state.queue.environments.values()):
            if each.counts and (process := each.request.process) is not None and has_ended(process):
                log.warning("Environment %s has ended without disconnecting", each.name)
                left = self._submit(changes.EnvironmentLeft(each.env_id))
                left.add_done_callback(asyncio.Future.exception)  # it could not be written: again after a while

    def _forgotten(self, env_ids: Sequence[int], done: asyncio.Future[Any]) -> None:
        if done.exception() is not None:  # it could not be written: again after another such time
            for env_id in env_ids:
                self._remembered.heard(env_id, self._clock())
            return
        for env_id in env_ids:
            self._environments.forget(env_id)
            self._remembered.forget(env_id)
            self.reports.forget(env_id)
        log.info("Removed %d environment(s) that were silent for %.0f s", len(env_ids), self._forget_s)

    def env_status(self, env_id: int) -> EnvStatus:
        """The queue as the environment sees it. Raises UnknownEnvironment."""
        self.hear_environment(env_id)
        self.expire_silent()
        return self.state.queue.env_status(env_id)

    async def add_evaluation(self, evaluation: Evaluation) -> None:
        """Keep a result. Raises UnknownEnvironment."""
        self.state.queue.environment(evaluation.env_id)
        self.hear_environment(evaluation.env_id)
        await self._submit(changes.EvaluationPosted(evaluation))

    def activity(self, most: int = 100) -> Activity:
        """Who does what, and what is missing for the next batch; at most so many environments."""
        self.expire_silent()
        now, queue, limits = self._clock(), self.state.queue, self.settings
        run = queue.registration
        known = [
            EnvActivity(
                each.name,
                each.env_id,
                self._environments.silence(each.env_id, now),
                each.request.group_size,
                each.connected,
                self.reports.registered.get(each.env_id),
            )
            for each in sorted(queue.environments.values(), key=lambda each: not each.connected)[:most]
        ]
        starting = [EnvActivity(report.name, None, age, report=report) for report, age in self.reports.unregistered()]
        return Activity(
            trainer=run is not None,
            trainer_heard_s=self._trainers.silence(self.state.trainer, now),
            asked_s=None if self._asked_at is None else now - self._asked_at,
            batch_size=run.batch_size if run is not None else 0,
            waiting=queue.lanes.size,
            waiting_groups=queue.lanes.groups,
            obstacle=queue.obstacle(),
            queue_full=len(self._bodies) >= limits.max_queued_groups or self.held_bytes >= limits.max_queued_bytes,
            journal_error=self.journal_error,
            current_step=queue.current_step,
            trained_steps=queue.status().trained_steps,
            num_steps=queue.num_steps,
            environments=[*starting, *known],
            more_environments=len(queue.environments) - len(known),
        )

    # --- groups ------------------------------------------------------------------------------------------------------

    async def post(
        self,
        groups: Sequence[PostedGroup],
        contents: Sequence[tuple[bytes, bool]],
        key: str | None,
        checked: GroupRequirements | None = None,
        digest: int = 0,
    ) -> tuple[list[int | None], bool]:
        """Store groups, all or none; for each what `BatchQueue.accept` says, and whether they were stored. A repeated
        `key` gets the answer of the first post, if `digest`, of what is posted, is the same.

        `checked` is what they were found to meet.

        Raises QueueFull, JournalError, GroupTooLarge, KeyReused.
        """
        if key is not None:
            if (answer := self.state.answered.get(key)) is not None:
                if len(answer) == len(groups) and self.state.digests.get(key, digest) != digest:
                    raise KeyReused(key)
                self.counters.repeated_posts += 1
                return answer, False
            if key in self._posting:
                posting, of_first = self._posting[key]
                if of_first != digest:
                    raise KeyReused(key)
                return list(await asyncio.shield(posting)), False
        self._expect_room(groups, contents)
        first = self._next_id
        self._next_id += len(groups)
        posting = self._submit(
            changes.GroupsPosted(first, list(groups), key, digest),
            [Body(first + index, data, packed, checked) for index, (data, packed) in enumerate(contents)],
        )
        if key is None:
            return list(await posting), True
        self._posting[key] = posting, digest
        try:
            return list(await asyncio.shield(posting)), True
        finally:
            self._posting.pop(key, None)

    def _expect_room(self, groups: Sequence[PostedGroup], contents: Sequence[tuple[bytes, bool]]) -> None:
        limits = self.settings
        waiting = len(self._bodies) + self._unwritten_groups
        if waiting + len(groups) > limits.max_queued_groups:
            raise QueueFull(
                f"{waiting} groups wait, at most {limits.max_queued_groups} are allowed (--max-queued-groups); post "
                "again when the trainer has "
                "taken some"
            )
        if self.held_bytes + sum(len(data) for data, _ in contents) > limits.max_queued_bytes:
            raise QueueFull(
                f"the waiting groups take {self.held_bytes} bytes of at most {limits.max_queued_bytes} "
                "(--max-queued-mb); post again when the trainer has taken some"
            )

    def _contents(self, groups: Sequence[Group[StoredGroup]]) -> list[Content]:
        contents = []
        for group in groups:
            body = self._bodies[group.record.id]
            contents.append((body.data, body.packed, self._weight(group.record)))
        return contents

    def _weight(self, group: StoredGroup) -> float:
        limit, version = self.settings.max_staleness, self.state.policy_version
        if limit is None or group.version is None or version is None or self.settings.stale_groups == "drop":
            return 1.0
        return float(staleness_weight(max(0, version - group.version), limit))

    async def reset(self) -> None:
        """Forget everything."""
        async with self._deciding:
            await self._submit(changes.Founded(secrets.token_hex(8)))
        self.latest = None
        self.reports.clear()
        self._environments.clear()
        self._remembered.clear()
        self._trainers.clear()


def _random_id() -> int:
    return secrets.randbelow(UUID_LIMIT - 1) + 1
