"""Ends the services of a run and nothing else: TERM, a time of grace, KILL. The supervisor calls it for what it has
started, `atropos stop` for what records name.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from atropos_launcher.services.events import Ending, Event, Killed, Listener, StillThere
from atropos_launcher.services.records import Record, Records
from atropos_launcher.services.shared_memory import SharedMemory
from atroposlib.processes.groups import KILL_S, Group, end_groups

GRACE_S = 5.0  # from TERM to KILL


def end(
    records: Records, services: Sequence[Record], memory: SharedMemory, tell: Listener, kill_s: float = KILL_S
) -> list[str]:
    """After at most GRACE_S and `kill_s` seconds, return the names of those that are still there: the kernel has not
    ended what was killed. Of none, the records are gone, too. A second call finds nothing.
    """
    names = {service.group: service.name for service in services}

    def tell_of(groups: Sequence[Group], event: Callable[..., Event], *limits: float) -> None:
        with suppress(OSError):  # a console that is gone does not keep us from ending
            tell(event(tuple(names[group] for group in groups), *limits))

    def asked(groups: Sequence[Group]) -> None:
        tell_of(groups, Ending, GRACE_S + kill_s)
        with suppress(OSError):  # a full disk: they are in memory
            memory.note(groups)

    def killing(groups: Sequence[Group]) -> None:
        tell_of(groups, Killed, GRACE_S)

    left = end_groups(list(names), GRACE_S, kill_s, asked=asked, killing=killing)
    memory.remove()
    if left:
        tell_of(left, StillThere)
        records.release()
    else:
        records.forget()
    return [names[group] for group in left]


def end_leftovers(records: Records, memory: SharedMemory, tell: Listener) -> None:
    """Claim the directory of a run, and end the services of a launcher that was killed there. Raises RunInUse and
    ForeignRecord.
    """
    records.claim()
    memory.read()
    if leftovers := records.services():
        end(records, leftovers, memory, tell)
        records.claim()
