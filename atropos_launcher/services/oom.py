"""Whether the system has killed processes for want of memory since a moment: counters of the control group, and of the
machine. The supervisor asks when a service has died.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
# The group of a container whose mount begins there, in both versions of control groups; and the machine.
WHOLE = ("sys/fs/cgroup/memory.events", "sys/fs/cgroup/memory/memory.oom_control", "proc/vmstat")


class OomKills:
    """Counts since it was made. `root` is the file system's, for tests."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._seen = dict(_counters(root))

    def since_last(self) -> str | None:
        """Return which counter rose since the last call, or since the start: the words for a line; None if none did."""
        now = dict(_counters(self._root))
        risen = [name for name, count in now.items() if count > self._seen.get(name, count)]
        self._seen = now
        return risen[0] if risen else None


def _counters(root: Path) -> Iterator[tuple[str, int]]:
    """The nearest first: that of our own group, then the machine's."""
    groups: list[tuple[str, str]] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, path = (*line.split(":", 2), "", "")[:3]
        if kinds == "":
            groups.append((f"sys/fs/cgroup{path.rstrip('/')}/memory.events", "oom_kill"))
        elif "memory" in kinds.split(","):
            groups.append((f"sys/fs/cgroup/memory{path.rstrip('/')}/memory.oom_control", "oom_kill"))
    for file, key in dict.fromkeys([*groups, *((file, "oom_kill") for file in WHOLE)]):
        for line in _lines(root / file):
            name, _, count = line.partition(" ")
            if name == key and count.strip().isdecimal():
                yield f"{key} of /{file}", int(count)


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
