"""Which files in /dev/shm a process has mapped."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = "/dev/shm"


def mapped_shared_memory(pids: Iterable[int]) -> set[int]:
    """Inodes of the files in /dev/shm that these processes have mapped, as far as this user may see; semaphores are
    mapped too.
    """
    device = os.stat(SHARED_MEMORY).st_dev
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    found = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
            fields = (line.split(maxsplit=5) for line in maps)  # address, permissions, offset, device, inode, path
            found |= {int(inode) for _, _, _, device_name, inode, *_ in fields if device_name == wanted}
    return found
