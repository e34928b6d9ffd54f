"""A control group with a limit of memory, in which a test lets the kernel kill for want of it. Needs root on Linux."""

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(megabytes: int) -> Iterator[list[str]]:
    """The words before a command that is to run in the group. Raises PermissionError where nobody may make
    one."""
    first_version = (CONTROL / "memory/memory.limit_in_bytes").exists()
    root = CONTROL / "memory" if first_version else CONTROL
    limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if first_version else ("memory.max",)
    group = root / f"atropos-test-{uuid.uuid4().hex[:12]}"
    try:
        if not first_version:
            (root / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        (group / limits[0]).write_text(str(megabytes << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise PermissionError(str(error)) from error
    for more in (*limits[1:], "memory.swap.max"):  # so that no swap stretches the limit
        if (group / more).exists():
            (group / more).write_text("0" if more == "memory.swap.max" else str(megabytes << 20))
    try:
        yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
    finally:
        _end(group)


def _end(group: Path) -> None:
    for _ in range(100):
        pids = (group / "cgroup.procs").read_text().split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        with suppress(OSError):
            group.rmdir()
            return
        subprocess.run(["sleep", "0.05"], check=True)
    raise TimeoutError(f"{group} has processes that do not end")
