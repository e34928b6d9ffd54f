"""Which process is which, for good: on this machine, in this container, not a later one that was given the same pid.

A trainer that shares vLLM's weights must be on the same machine; so each side can see for itself whether the other
still lives.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from atroposlib.wire.typed import Name

Count = Annotated[int, msgspec.Meta(ge=0)]


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process of one boot of one machine. Two are the same only if all four agree."""

    boot_id: Name
    pid_namespace: Count
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**22)]  # the kernel's own limit
    started: Count  # clock ticks after the boot

    def same_place(self, other: "Process") -> bool:
        """Whether a pid means the same to both: same machine since its last boot, same container."""
        return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)


def this_process() -> Process:
    return Process(
        Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
        os.stat("/proc/self/ns/pid").st_ino,
        os.getpid(),
        _stat(os.getpid())[1],
    )


def is_alive(process: Process) -> bool:
    """Whether `process`, of this machine and container, still runs. A stopped one does; a zombie's memory is gone
    already.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        state, started = _stat(process.pid)
        return started == process.started and state not in "ZX"
    return False


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of `pid`, out of /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])
