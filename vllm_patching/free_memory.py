"""How much memory there is, and how much can still be taken, here or in a container. Loads no torch."""

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def available_memory() -> int:
    """Return the bytes that the machine has free, or that a container's limit leaves."""
    available: int = psutil.virtual_memory().available
    left = (limit - _occupied(group) for group, limit in _limits())
    return max(0, min([available, *left]))


def total_memory() -> int:
    """Return the bytes that the machine has, or that a container's limit allows."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for _, limit in _limits())])


def _limits() -> Iterator[tuple[Path, int]]:
    """The control groups of version 2 around this process that limit its memory, as far as they are mounted."""
    lines = OWN_GROUP.read_text().splitlines() if OWN_GROUP.is_file() else []
    own = Path(next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/").lstrip("/"))
    for group in (own, *own.parents):
        limit = CGROUP / group / "memory.max"
        if limit.is_file() and (text := limit.read_text().strip()) != "max":
            yield CGROUP / group, int(text)


def _occupied(group: Path) -> int:
    """What the kernel cannot give back: it drops pages of files that nobody has read lately, such as a model's."""
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / "memory.current").read_text()) - int(counts["inactive_file"])
