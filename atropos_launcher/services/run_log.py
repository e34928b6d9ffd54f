"""launcher.log of a run: what happened to its services, to read later. `atropos logs` shows it beside the
services' own logs, and `atropos status` why a run ended.
"""

import time
from contextlib import suppress
from pathlib import Path

from atropos_launcher.service import LAUNCHER
from atropos_launcher.services.event_text import text
from atropos_launcher.services.events import (
    Died,
    Event,
    Interrupted,
    Killed,
    LogLine,
    Lost,
    NotUp,
    Outlived,
    StillThere,
)
from atroposlib.files import open_regular
from atroposlib.processes.log_files import last_lines
from atroposlib.view.run_data.run_end import end_of


class RunLog:
    """A listener of the supervisor. Where the file cannot be written, the run continues without it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / f"{LAUNCHER}.log"

    def __call__(self, event: Event) -> None:
        if isinstance(event, LogLine):  # it is in the service's log
            return
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {_level(event):<7} [{LAUNCHER}] {text(event)}\n"
        with suppress(OSError), open_regular(self._path, "a", encoding="utf-8") as file:
            file.write(line)


def _level(event: Event) -> str:
    if isinstance(event, Died) and event.restart_in_s is not None:
        return "WARNING"
    if isinstance(event, Died | NotUp | Outlived | Interrupted):
        return "ERROR"
    return "WARNING" if isinstance(event, Killed | Lost | StillThere) else "INFO"


def why_it_ended(run_dir: Path) -> str | None:
    """Return what made the run's last start end before its time."""
    end = end_of(last_lines(run_dir / f"{LAUNCHER}.log", 100))
    return end and end.why
