"""Ends the services of a run and nothing else: TERM, a time of grace, KILL. The supervisor calls it for what it has
started, `atropos stop` for what records name.
"""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from atropos_launcher.services.events import Ending, Event, Killed, Listener, StillThere
from atropos_launcher.services.records import Record, Records
from atropos_launcher.services.shared_memory import SharedMemory

GRACE_S = 5.0  # from TERM to KILL
KILL_S = 2.0  # in which the kernel ends what was killed
POLL_S = 0.1


def end(records: Records, services: Sequence[Record], memory: SharedMemory, tell: Listener) -> None:
    """At most 7 s, then every group is gone, and so are the records. A second call finds nothing."""
    running = _signal(services, signal.SIGTERM)
    if running:
        _try(tell, Ending(_names(running), GRACE_S + KILL_S))
    with suppress(OSError):  # a full disk: they are in memory
        memory.note(running)
    left = _await_gone(running, GRACE_S)
    if left:
        _signal(left, signal.SIGKILL)
        _try(tell, Killed(_names(left), GRACE_S))
        left = _await_gone(left, KILL_S)
    memory.remove()
    if left:
        _try(tell, StillThere(_names(left)))
        records.release()
    else:
        records.forget()


def _signal(services: Sequence[Record], number: signal.Signals) -> list[Record]:
    return [service for service in services if service.signal(number)]


def _await_gone(services: Sequence[Record], seconds: float) -> list[Record]:
    """Wait until the services are gone, at most `seconds`. Return those that still have members then."""
    deadline = time.monotonic() + seconds
    while left := [service for service in services if service.members()]:
        if time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)
    return []


def _names(services: Sequence[Record]) -> tuple[str, ...]:
    return tuple(service.name for service in services)


def _try(tell: Listener, event: Event) -> None:
    """A console that is gone does not keep us from ending."""
    with suppress(OSError):
        tell(event)
