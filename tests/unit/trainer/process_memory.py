"""How much memory a process comes to hold while it does something."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def anonymous_memory() -> Iterator[list[int]]:
    """Bytes of anonymous memory that this process had: at first, and at most, looked at every few milliseconds."""
    seen = [_anonymous(), 0]
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.003):
            seen[1] = max(seen[1], _anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        seen[1] = max(seen[1], _anonymous())


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
