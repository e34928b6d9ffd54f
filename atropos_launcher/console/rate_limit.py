"""Limits similar lines to one per minute."""

import re
import time
from collections.abc import Callable

EVERY_S = 60.0
_VARIES = re.compile(r"\d+")


class Repeated:
    """Tells which lines are new. Two are alike if they differ in digits only."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._shown: dict[str, float] = {}
        self._held: dict[str, tuple[int, str]] = {}  # how many were not shown since, and the last of them

    def thinned(self, line: str) -> str | None:
        """The line, with the number of those held back before it; None if it is to be held back too."""
        kind, now = _VARIES.sub("0", line), self._now()
        held, _ = self._held.get(kind, (0, ""))
        if kind in self._shown and now - self._shown[kind] < EVERY_S:
            self._held[kind] = (held + 1, line)
            return None
        self._shown[kind] = now
        self._held.pop(kind, None)
        return f"{line} ({held} more like it before)" if held else line

    def rest(self) -> list[str]:
        """Return what is still held back, one line for each kind, which is late."""
        lines = [
            f"{line} (earlier, with {count - 1} more like it before)" if count > 1 else f"{line} (earlier)"
            for count, line in self._held.values()
        ]
        self._held.clear()
        return lines
