"""Why a run ended, as the last lines of its launcher.log say. The window and `atropos status` read it here; the
launcher writes it (atropos_launcher/services/run_log.py).
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

LAUNCHER = "launcher"
LINE = re.compile(rf"\S+ \S+ (?P<level>[A-Z]+) +\[{LAUNCHER}\] (?P<text>.*)")
BEGINS = "Started "  # the first line of a start
INTERRUPTED = "Interrupted by "

How = Literal["failed", "interrupted"]


class End(NamedTuple):
    """Says what made a run end before its time."""

    how: How
    why: str


def end_of(lines: Sequence[str]) -> End | None:
    """Find the end of the run's last start in its launcher.log; None if nothing there ended it before its time."""
    for line in reversed(lines):
        found = LINE.fullmatch(line)
        if found and found["level"] == "ERROR":
            why = found["text"].rstrip(".")
            return End("interrupted" if why.startswith(INTERRUPTED) else "failed", why)
        if found and found["text"].startswith(BEGINS):  # before this, it was another start
            return None
    return None
