"""Everything that the journal restores: queue, leases, answered posts, who trains. Pure: no clock, no I/O.

    decide (next_delivery, ...) ──▶ a Change ──▶ journal ──▶ apply

Only `apply` changes the state, in service and in a replay, and it is deterministic: the same changes lead to the same
state. Posts may come between changes that were decided one after the other; posts only ever add groups.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec.structs import astuple

from atroposlib.api.state import changes
from atroposlib.api.state.changes import Change, GroupsPosted, StoredGroup
from atroposlib.api.state.leases import Lease, LeaseBook
from atroposlib.api.state.queue import BatchQueue, GroupTooLarge, UnknownEnvironment, is_same_run
from atroposlib.api.state.selection import Group
from atroposlib.api.state.staleness import WaitingVersions
from atroposlib.wire.batching import Registration, TrainerStep
from atroposlib.wire.servers import State

MAX_ANSWERED = 65_536  # idempotency keys that are remembered, the latest ones
REFUSALS = (UnknownEnvironment, GroupTooLarge)  # of a change that came too late; the state is as before

Batch = Sequence[Group[StoredGroup]]


class RolloutState:
    """See the module's head. What `apply` returns is said at each `_on_...`."""

    def __init__(self) -> None:
        self.next_id = 1
        self._clear("")

    def _clear(self, instance: str) -> None:
        self.trainer = 0  # uuid; 0 is nobody
        self.queue: BatchQueue[StoredGroup] = BatchQueue(instance)
        self.leases: LeaseBook[StoredGroup] = LeaseBook()
        self.rejected = 0  # groups that were set aside
        self.answered: OrderedDict[str, list[int | None]] = OrderedDict()  # key of a post -> the reply to it
        self.digests: dict[str, int] = {}  # key of a post -> what was posted
        self.servers: dict[str, State] = {}  # that have joined or left since the trainer registered
        self._versions = WaitingVersions()
        self._gone: list[int] = []

    def apply(self, change: Change) -> object:  # noqa: C901  one case per kind of change
        """Carry out a change. Raises one of REFUSALS, and then changes nothing."""
        match change:
            case GroupsPosted():
                return self._on_post(change)
            case changes.BatchTaken():
                return self._on_batch(change)
            case changes.LeasesTaken():
                return self._on_leases_taken(change)
            case changes.LeasesReturned():
                self._wait_again(self.leases.give_back(change.leases), step=True)
            case changes.LeasesAcknowledged():
                self._forget(self.leases.close(change.leases))
            case changes.GroupsDropped():
                return self._on_dropped(change.orders)
            case changes.GroupsRejected():
                return self._on_rejected(change.orders)
            case changes.TrainerRegistered():
                return self._on_registered(change.registration, change.trainer)
            case changes.TrainerPolled():
                self.queue.started = True
            case changes.TrainerReported():
                self.queue.report = TrainerStep(*astuple(change))
            case changes.EnvironmentJoined():
                return self.queue.register_env(change.request)  # None while no trainer has polled
            case changes.EnvironmentLeft():
                self.queue.disconnect_env(change.env_id)
            case changes.EnvironmentsForgotten():
                self._versions.add(self.queue.forget_envs(change.env_ids))
            case changes.EvaluationPosted():
                self.queue.add_evaluation(change.evaluation)
            case changes.ServerChanged():
                self.servers[change.url] = change.state
            case changes.Founded():
                gone = [group.record.id for _, group in self.groups()]
                self._clear(change.instance)
                self._gone = gone
            case changes.Snapshot():
                self._on_snapshot(change)
            case _:
                raise TypeError(f"{type(change).__name__} is not a change")
        return None

    def drain_released(self) -> list[int]:
        """Ids of groups that nobody needs any more, each returned once."""
        gone, self._gone = self._gone, []
        return gone

    # --- decisions ---------------------------------------------------------------------------------------------------

    def next_delivery(self, trainer: int = 0, new_lease: int = 0) -> tuple[Change, Batch] | None:
        """The next batch for a lease of `trainer`, or (0) to be taken for good; None: not yet. Returned batches go
        first.

        `new_lease` is the id of its lease, unless it has one.

        Raises NotRegistered.
        """
        registration = self.queue.registration
        returned = self.leases.waiting(registration.batch_size) if registration is not None else None
        if returned is not None:
            return changes.LeasesTaken([returned.lease_id], trainer), returned.groups
        chosen = self.queue.choose()
        if chosen is None:
            return None
        return changes.BatchTaken([group.order for group in chosen], new_lease, trainer), chosen

    def stale(self, max_staleness: int) -> list[int]:
        """Orders of waiting groups that were sampled more than so many policy versions ago."""
        version = self.policy_version
        return [] if version is None else self._versions.before(version - max_staleness)

    @property
    def policy_version(self) -> int | None:
        """The policy version that the trainer last reported."""
        return None if self.queue.progress is None else self.queue.progress[1]

    def groups(self) -> Iterator[tuple[str, Group[StoredGroup]]]:
        """Every group whose content is still needed, with where it is: `waiting`, `buffered`, `leased`, `returned`."""
        dump = self.queue.dump()
        yield from (("waiting", group) for group in dump.waiting)
        yield from (("buffered", group) for group in dump.buffered)
        for lease in self.leases.values():
            yield from (("returned" if lease.returned else "leased", group) for group in lease.groups)

    def snapshot(self) -> changes.Snapshot:
        """The state as one change; shares nothing that changes later."""
        return changes.Snapshot(
            instance=self.queue.instance,
            trainer=self.trainer,
            next_id=self.next_id,
            queue=self.queue.dump(),
            leases=[
                Lease(lease.lease_id, lease.trainer, list(lease.groups), lease.returned)
                for lease in self.leases.values()
            ],
            answered=list(self.answered.items()),
            rejected=self.rejected,
            digests=dict(self.digests),
            servers=dict(self.servers),
        )

    # --- changes -----------------------------------------------------------------------------------------------------

    def _on_post(self, change: GroupsPosted) -> list[int | None]:
        """For each group what `BatchQueue.accept` says; for a key that was answered, that answer again."""
        if change.key is not None and (answer := self.answered.get(change.key)) is not None:
            self._gone += range(change.first, change.first + len(change.groups))
            return answer
        self.next_id = max(self.next_id, change.first + len(change.groups))
        try:
            for group in change.groups:
                self.queue.check_size(group.size)
        except GroupTooLarge:
            self._gone += range(change.first, change.first + len(change.groups))
            raise
        answer = []
        for identity, group in enumerate(change.groups, change.first):
            buffered, queued = self.queue.accept(group.size, group.env_id, StoredGroup(identity, group.version))
            answer.append(buffered)
            self._versions.add(queued)
        if change.key is not None:
            self.answered[change.key] = answer
            if change.digest:
                self.digests[change.key] = change.digest
            if len(self.answered) > MAX_ANSWERED:
                forgotten, _ = self.answered.popitem(last=False)
                self.digests.pop(forgotten, None)
        return answer

    def _on_batch(self, change: changes.BatchTaken) -> Lease[StoredGroup] | None:
        groups = self.queue.take(change.orders)
        self._versions.discard(groups)
        if change.lease:
            self.leases[change.lease] = Lease(change.lease, change.trainer, groups)
            return self.leases[change.lease]
        self._forget(groups)
        return None

    def _on_leases_taken(self, change: changes.LeasesTaken) -> Lease[StoredGroup] | None:
        """The last of the leases, if any is left."""
        lease = None
        for lease_id in change.leases:
            self.queue.current_step += 1
            self._versions.discard(self.leases[lease_id].groups)
            if change.trainer:
                lease = self.leases[lease_id]
                lease.trainer = change.trainer
                lease.returned = False
            else:
                self._forget(self.leases.close([lease_id]))
        return lease

    def _on_rejected(self, rejected: Sequence[int]) -> list[Group[StoredGroup]]:
        """The groups that were set aside. A held batch keeps its others; an empty one counts as never delivered."""
        orders = set(rejected)
        removed, empty = self.leases.remove(orders)
        self.queue.current_step -= empty
        self._forget(removed)
        if left := orders - {group.order for group in removed}:
            removed += self._on_dropped(sorted(left))
        self.rejected += len(removed)
        return removed

    def _on_dropped(self, gone: Sequence[int]) -> list[Group[StoredGroup]]:
        """The groups that were dropped. A returned batch that held one is a batch no more: its other groups wait by
        themselves.
        """
        orders = set(gone)
        broken = [
            lease.lease_id
            for lease in self.leases.values()
            if lease.returned and any(group.order in orders for group in lease.groups)
        ]
        self.queue.put_back(self.leases.close(broken))
        dropped = self.queue.drop(orders)
        self._forget(dropped)
        return dropped

    def _on_registered(self, registration: Registration, trainer: int) -> int:
        """Register a trainer, and return how many groups of another run were forgotten. The previous trainer's batches
        wait again, unless this one has trained on them.
        """
        before = self.queue.registration
        self.trainer = trainer
        self.servers = {}  # it begins with those of its configuration
        self._forget(self.leases.close(registration.trained_leases))
        self._wait_again(self.leases.give_back(self.leases), step=False)
        forgotten: list[Group[StoredGroup]] = []
        if before is not None and not is_same_run(before, registration):
            forgotten = [*self.queue.clear_groups(), *self.leases.close(list(self.leases))]
            self._versions = WaitingVersions()
            self._forget(forgotten)
        self.queue.register(registration)
        self.queue.put_back(
            self.leases.close(
                [lease.lease_id for lease in self.leases.values() if lease.size != registration.batch_size]
            )
        )
        return len(forgotten)

    def _on_snapshot(self, snapshot: changes.Snapshot) -> None:
        self._clear(snapshot.instance)
        self.trainer, self.next_id = snapshot.trainer, snapshot.next_id
        self.queue.load(snapshot.queue)
        self.leases = LeaseBook({lease.lease_id: lease for lease in snapshot.leases})
        self.answered = OrderedDict(snapshot.answered)
        self.digests = dict(snapshot.digests)
        self.servers = dict(snapshot.servers)
        self.rejected = snapshot.rejected
        returned = [group for lease in snapshot.leases if lease.returned for group in lease.groups]
        self._versions.add([*snapshot.queue.waiting, *returned])

    def _wait_again(self, leases: list[Lease[StoredGroup]], *, step: bool) -> None:
        for lease in leases:
            self.queue.current_step -= step
            self._versions.add(lease.groups)

    def _forget(self, groups: Sequence[Group[StoredGroup]]) -> None:
        self._versions.discard(groups)  # those of a returned batch have waited
        self._gone += [group.record.id for group in groups]
