"""How much memory there is, and how much can still be taken, here or in a container. Loads no torch."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes that the machine has free, or that a container's limit leaves."""
    available: int = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int((CGROUP / "memory.current").read_text()))
    return available


def total_memory() -> int:
    """Return the bytes that the machine has, or that a container's limit allows."""
    total: int = psutil.virtual_memory().total
    limit = CGROUP / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total
