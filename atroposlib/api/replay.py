"""Replays a journal: the state that its changes lead to, and the bytes of the groups in it.

For the API at its start, and for the commands of `run-api journal`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from atroposlib.api.changes import Rollout, decode_change
from atroposlib.api.journal_file import Body, JournalError
from atroposlib.api.selection import Group
from atroposlib.api.state import REFUSALS, RolloutState


class Source(Protocol):
    """What can be replayed: an open journal, or a reader of one."""

    def changes(self) -> Iterator[tuple[int, bytes]]: ...
    def bodies(self) -> Iterator[Body]: ...
    def damaged(self, what: str) -> JournalError: ...


@dataclass(frozen=True, slots=True)
class Replayed:
    """`number` is the newest change's (0 for an empty journal), `changes` how many there are."""

    state: RolloutState
    number: int
    changes: int


def replay(journal: Source) -> Replayed:
    """The journal's state. Raises JournalError."""
    state, newest, count = RolloutState(), 0, 0
    for number, encoded in journal.changes():
        try:
            state.apply(decode_change(encoded))
        except REFUSALS:
            pass  # it was refused when it was made, too
        except (LookupError, TypeError, ValueError) as error:
            raise journal.damaged(f"change {number} cannot be replayed ({type(error).__name__}: {error})") from error
        state.drain_released()
        newest, count = number, count + 1
    return Replayed(state, newest, count)


def groups_of(state: RolloutState) -> Iterator[tuple[str, Group[Rollout]]]:
    """Every group in the state, with where it is: `waiting`, `buffered`, `leased` or `returned`."""
    dump = state.queue.dump()
    yield from (("waiting", group) for group in dump.waiting)
    yield from (("buffered", group) for group in dump.buffered)
    for lease in state.leases:
        yield from (("returned" if lease.returned else "leased", group) for group in lease.groups)


def bodies_of(journal: Source, state: RolloutState) -> Iterator[Body]:
    """The bytes of every group in the state. Raises JournalError, in the end if some have none."""
    needed = {rollout.id for rollout in state.rollouts()}
    for body in journal.bodies():
        if body.id in needed:
            needed.remove(body.id)
            yield body
    if needed:
        raise journal.damaged(f"{len(needed)} groups have no body")
