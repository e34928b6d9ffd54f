"""starting.json of a run: what its services load and wait for until the first step is done. The window shows it
(atroposlib/view/run_data/run_files.py).
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from atropos_launcher.console.progress import RunProgress
from atropos_launcher.services.events import Event
from atroposlib.files import open_regular

FILE = "starting.json"
EVERY_S = 1.0


class ProgressFile:
    """A listener of the supervisor, whose `write` is called several times a second. Where the file cannot be written,
    the run continues without it. `now` is the clock, in seconds.
    """

    def __init__(self, run_dir: Path, progress: RunProgress, now: Callable[[], float] = time.monotonic) -> None:
        self._path = run_dir / FILE
        self._progress, self._now = progress, now
        self._written_at: float | None = None
        self._is_over = False

    def __call__(self, event: Event) -> None:
        self._progress.see(event, self._now())

    def write(self) -> None:
        """Write the file if a second is over since the last time, and remove it after the first step."""
        now = self._now()
        if self._is_over or (self._written_at is not None and now - self._written_at < EVERY_S):
            return
        if self._progress.done:
            return self.close()
        self._written_at = now
        with suppress(OSError):
            self._replace(json.dumps({"bars": [asdict(bar) for bar in self._progress.bars(now)]}))

    def close(self) -> None:
        """Remove the file; nothing writes it again."""
        self._is_over = True
        with suppress(OSError):
            self._path.unlink()

    def _replace(self, content: str) -> None:
        """Without a flush to the disk, for which the supervisor would wait: nobody needs the file after a crash."""
        partial = self._path.with_name(f".{FILE}.partial")
        with open_regular(partial, "w", encoding="utf-8") as file:
            file.write(content + "\n")
        partial.replace(self._path)
