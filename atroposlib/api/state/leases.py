"""Batches that are leased to a trainer and not yet acknowledged. Pure.

    waiting ─── sent ──▶ held ── close (acknowledged) ──▶ gone
                        │  ▲
       give_back (silent│  │taken again (redelivered, or its own trainer is back)
       or replaced)     ▼  │
                       returned ── close (batch size changed, too old) ──▶ waiting

A returned batch stays together, so that a run that resumes from its checkpoint trains on the same batches.
"""

from collections.abc import Collection, Iterable, Set
from typing import Generic

from msgspec import Struct

from atroposlib.api.state.selection import Group, R


class Lease(Struct, Generic[R]):
    """One delivered batch. `trainer` has it, or had it last if it is `returned`."""

    lease_id: int
    trainer: int
    groups: list[Group[R]]
    returned: bool = False

    @property
    def size(self) -> int:
        """Sequences of the batch."""
        return sum(group.size for group in self.groups)


class LeaseBook(dict[int, Lease[R]]):
    """All leases by their ids, oldest first. The ids are random, so that a trainer can name them to another API without
    harm.
    """

    def held(self, trainer: int | None = None) -> list[Lease[R]]:
        """Leases that a trainer (default: any) holds."""
        return [lease for lease in self.values() if not lease.returned and trainer in (None, lease.trainer)]

    def lost_in_transit(self, trainer: int, holding: Collection[int]) -> Lease[R] | None:
        """The oldest batch that was sent to the trainer but that it does not list: the reply never arrived."""
        return next((lease for lease in self.held(trainer) if lease.lease_id not in holding), None)

    def reclaimable(self, trainer: int) -> list[int]:
        """Returned leases whose trainer turns out to be alive."""
        return [lease.lease_id for lease in self.values() if lease.returned and lease.trainer == trainer]

    def waiting(self, size: int) -> Lease[R] | None:
        """The oldest returned batch of that many rollouts."""
        return next((lease for lease in self.values() if lease.returned and lease.size == size), None)

    def known_to(self, trainer: int, leases: Iterable[int]) -> list[int]:
        """Return those of the leases that this trainer holds, or held last."""
        return [lease for lease in dict.fromkeys(leases) if lease in self and self[lease].trainer == trainer]

    def give_back(self, leases: Iterable[int]) -> list[Lease[R]]:
        """Queue these batches again. Returns those that were held."""
        given = [self[lease] for lease in leases if lease in self and not self[lease].returned]
        for lease in given:
            lease.returned = True
        return given

    def close(self, leases: Iterable[int]) -> list[Group[R]]:
        """End these leases. Returns the groups of those that were known."""
        return [group for lease in leases if lease in self for group in self.pop(lease).groups]

    def remove(self, orders: Set[int]) -> tuple[list[Group[R]], int]:
        """Take groups out of the batches that a trainer holds. Returns them, and how many batches closed as empty."""
        removed: list[Group[R]] = []
        for lease in self.held():
            removed += [group for group in lease.groups if group.order in orders]
            lease.groups = [group for group in lease.groups if group.order not in orders]
        empty = [lease.lease_id for lease in self.held() if not lease.groups]
        self.close(empty)
        return removed, len(empty)
