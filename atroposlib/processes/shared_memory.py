"""Which files in /dev/shm a process has mapped, and how those go that no process has any more.

A name alone proves nothing: a file is removed only if it has the inode that a process had mapped. Nor does a map: a
file that was there before the process started may be a user's own data.
"""

import os
import stat
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path

from atroposlib.processes.identity import all_pids

SHARED_MEMORY = "/dev/shm"


def mapped_shared_memory(pids: Iterable[int]) -> set[int]:
    """Inodes of the files in /dev/shm that these processes have mapped, as far as this user may see; semaphores are
    mapped too.
    """
    device = os.stat(SHARED_MEMORY).st_dev
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    inodes = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
            fields = (line.split(maxsplit=5) for line in maps)  # address, permissions, offset, device, inode, path
            inodes |= {int(inode) for _, _, _, device_name, inode, *_ in fields if device_name == wanted}
    return inodes


def present_inodes() -> set[int]:
    """The inodes of the files that are in /dev/shm now."""
    return {entry.inode() for entry in os.scandir(SHARED_MEMORY)}


def mapped_files(pids: Iterable[int], before: Set[int]) -> dict[str, int]:
    """The files in /dev/shm that these processes have mapped, by name, with their inodes; none with an inode of those
    `before` they started.
    """
    inodes = mapped_shared_memory(pids) - before
    return {entry.name: entry.inode() for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes}


def remove_unused(files: Mapping[str, int]) -> None:
    """Remove those of the files that no process has mapped."""
    in_use = mapped_shared_memory(all_pids()) if files else set()
    for name, inode in files.items():
        path = Path(SHARED_MEMORY, name)
        if inode not in in_use and _is_ours(path, inode):
            path.unlink(missing_ok=True)


def _is_ours(path: Path, inode: int) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_ino == inode and status.st_uid == os.geteuid()
