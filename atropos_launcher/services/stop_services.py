"""Ends the services of a run and nothing else: TERM, a time of grace, KILL. The supervisor calls it for what it has
started, `atropos stop` for what records name.
"""

from collections.abc import Sequence
from contextlib import suppress

from atropos_launcher.services.events import Ending, Event, Killed, Listener, StillThere
from atropos_launcher.services.records import Record, Records
from atropos_launcher.services.shared_memory import SharedMemory
from atroposlib.processes.groups import KILL_S, end_groups

GRACE_S = 5.0  # from TERM to KILL


def end(records: Records, services: Sequence[Record], memory: SharedMemory, tell: Listener) -> None:
    """At most 7 s, then every group is gone, and so are the records. A second call finds nothing."""

    def asked(running: Sequence[Record]) -> None:
        _try(tell, Ending(_names(running), GRACE_S + KILL_S))
        with suppress(OSError):  # a full disk: they are in memory
            memory.note(running)

    def killing(left: Sequence[Record]) -> None:
        _try(tell, Killed(_names(left), GRACE_S))

    left = end_groups(services, GRACE_S, asked=asked, killing=killing)
    memory.remove()
    if left:
        _try(tell, StillThere(_names(left)))
        records.release()
    else:
        records.forget()


def _names(services: Sequence[Record]) -> tuple[str, ...]:
    return tuple(service.name for service in services)


def _try(tell: Listener, event: Event) -> None:
    """A console that is gone does not keep us from ending."""
    with suppress(OSError):
        tell(event)
