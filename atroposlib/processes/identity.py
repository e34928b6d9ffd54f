"""Which process a pid means. The kernel reuses pids, so three things identify a process: its pid, when it started, and
in which boot. /proc has the start in clock ticks after boot, which, unlike the times of psutil, stays the same when
somebody sets the clock. `Process` of the wire adds the container. Loading this module needs nothing but Python.
"""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atroposlib.wire.processes import Process

STOPPED = "Tt"  # by SIGSTOP, by the terminal, or by a debugger
DEAD = "ZX"  # a zombie still has its number


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine. Raises OSError where the kernel is not Linux."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def this_process() -> "Process":
    """Return what identifies this process to another on this machine."""
    from atroposlib.wire.processes import Process

    started = first_ticks(os.getpid())
    assert started is not None
    return Process(boot_id(), os.stat("/proc/self/ns/pid").st_ino, os.getpid(), started)


def still_runs(process: "Process") -> bool:
    """Return whether `process`, of this machine and container, still runs. A stopped one does; a zombie's memory is
    gone already.
    """
    return is_alive(process.pid, process.started)


def has_ended(process: "Process") -> bool:
    """Return whether `process`, of any machine and user, is known to have ended."""
    if process.boot_id != boot_id():  # first, as it costs nothing: an API may know thousands of other machines'
        return False
    if not process.same_place(this_process()) or still_runs(process):
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's, which /proc may hide
        return False
    return True


def first_ticks(pid: int) -> int | None:
    """When the process started, also if it has died since and nobody has asked for its status. None: it is gone."""
    fields = _fields(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int, start: int | None = None) -> bool:
    """Return whether the process with this number runs, and started then. A zombie does not run."""
    fields = _fields(pid)
    return bool(fields) and fields[0] not in DEAD and start in (None, int(fields[19]))


def is_stopped(pid: int) -> bool:
    """Return whether the process exists and is stopped."""
    fields = _fields(pid)
    return bool(fields) and fields[0] in STOPPED


def all_pids() -> list[int]:
    """List the processes of this container."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def descendants(pid: int) -> list[int]:
    """List the processes below `pid`, also those that have ended and whose status nobody has asked for."""
    parents: dict[int, int] = {}
    for each in all_pids():
        with suppress(PermissionError):  # another user's, where /proc is mounted with hidepid=1
            if fields := _fields(each):
                parents[each] = int(fields[1])
    found = {pid}
    while below := {each for each, parent in parents.items() if parent in found} - found:
        found |= below
    return sorted(found - {pid})


def _fields(pid: int) -> list[str]:
    """State, parent, group, session, ... of a process; empty if it is gone. Its name, before them, may hold blanks."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()
    return []
