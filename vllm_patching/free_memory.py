"""How much memory can still be taken, here or in a container. Loads no torch."""

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
