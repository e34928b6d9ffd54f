"""Replays a journal: the state that its changes lead to, and the bytes of the groups in it.

For the API at its start, and for the commands of `run-api journal`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from atroposlib.api.journal.journal_file import Body, JournalError, JournalReader
from atroposlib.api.state.changes import decode_change
from atroposlib.api.state.state import REFUSALS, RolloutState


@dataclass(frozen=True, slots=True)
class Replayed:
    """`number` is the newest change's (0 for an empty journal), `changes` how many there are."""

    state: RolloutState
    number: int
    changes: int


def replay(journal: JournalReader) -> Replayed:
    """The journal's state. Raises JournalError."""
    state, newest, count = RolloutState(), 0, 0
    for number, encoded in journal.changes():
        try:
            state.apply(decode_change(encoded))
        except REFUSALS:
            pass  # it was refused when it was made, too
        except (LookupError, TypeError, ValueError) as error:
            if isinstance(msgspec.msgpack.decode(encoded), dict):  # the API's changes are arrays
                raise JournalError(
                    f"--journal {journal.path} is no journal of the batching API: another program wrote it, such as"
                    " `atropos agent-endpoint`; give another path"
                ) from error
            raise journal.damaged(f"change {number} cannot be replayed ({type(error).__name__}: {error})") from error
        state.drain_released()
        newest, count = number, count + 1
    return Replayed(state, newest, count)


def bodies_of(journal: JournalReader, state: RolloutState) -> Iterator[Body]:
    """The bytes of every group in the state. Raises JournalError, in the end if some have none."""
    needed = {group.record.id for _, group in state.groups()}
    for body in journal.bodies():
        if body.id in needed:
            needed.remove(body.id)
            yield body
    if needed:
        raise journal.damaged(f"{len(needed)} groups have no body")
