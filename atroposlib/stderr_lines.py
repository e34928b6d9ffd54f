"""Turns what libraries write to stderr into records of this process's log: Python's warnings, progress bars,
and lines of loggers that have handlers of their own. On a terminal nothing is changed.

    warnings.warn ──▶ one line; INFO if it is meant for developers (a deprecation)
    tqdm          ──▶ its bar after a second, then every five, and when it is full
    other lines   ──▶ as they are

It does not see what C++ code writes to the file descriptor.
"""

import io
import logging
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

NAME = "stderr"  # of the logger
BAR_FIRST_S, BAR_EVERY_S = 1.0, 5.0
LONGEST = 64 << 10  # characters: a line that is longer is cut there
BAR_LENGTH = 500
_BREAK = re.compile(r"\r\n|\r|\n")  # a progress bar begins with a carriage return
_UP = "\x1b[A"  # what tqdm moves the cursor by, from one of several bars to the next
_BAR = re.compile(r"(?P<what>[^|%\d]*).*?(?P<percent>\d+)%(\||.*\[\d+:\d\d)|.*\[\d+:\d\d(:\d\d)?, ")
_FOR_DEVELOPERS = (DeprecationWarning, FutureWarning, PendingDeprecationWarning, ResourceWarning, ImportWarning)


class Bars:
    """Chooses the states of progress bars that are worth a line. `now` is the clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._told: dict[str, tuple[float, bool]] = {}  # by what it is of: when, and whether it was full

    def are_told(self, line: str) -> bool:
        """Return whether `line` is to be written: it is not a bar, a full one, or the last state is old."""
        match = _BAR.match(line[:BAR_LENGTH])
        if not match:
            return True
        what, full, now = (match["what"] or "").strip(" :"), match["percent"] == "100", self._now()
        at, was_full = self._told.get(what, (now + BAR_FIRST_S - BAR_EVERY_S, False))
        told = (full and not was_full) or now - at >= BAR_EVERY_S
        self._told[what] = (now if told else at, full)
        return told


class StderrLines(io.TextIOBase):
    """In place of sys.stderr, whose file descriptor it keeps."""

    def __init__(self, plain: TextIO) -> None:
        self.plain = plain
        self._log = logging.getLogger(NAME)
        self._bars = Bars()
        self._of_thread = threading.local()

    def write(self, text: str) -> int:
        """Log every line that is complete. What logging itself says of its failures goes out as it is."""
        mine = self._of_thread.__dict__
        if mine.get("logs"):
            with suppress(OSError):  # a full disk
                self.plain.write(text)
            return len(text)
        *lines, begun = _BREAK.split(mine.get("begun", "") + text)
        if len(begun) > LONGEST:
            lines, begun = [*lines, begun], ""
        mine["begun"] = begun
        mine["logs"] = True
        try:
            for line in lines:
                shown = line.replace(_UP, "").rstrip()
                if shown and self._bars.are_told(shown):
                    self._log.info("%s", shown)
        finally:
            mine["logs"] = False
        return len(text)

    def flush(self) -> None:
        """Flush, but let no writer (a warning, a progress bar) fail because the log's disk is full."""
        with suppress(OSError):
            self.plain.flush()

    def fileno(self) -> int:
        return self.plain.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def buffer(self) -> object:
        """For bytes, which are not lines."""
        return self.plain.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.plain.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.plain.errors


def plain_stderr() -> TextIO:
    """Return the stream to which the log itself goes."""
    return sys.stderr.plain if isinstance(sys.stderr, StderrLines) else sys.stderr


def take_stderr() -> None:
    """From now on lines on stderr are records, those of the handlers that libraries have made before too."""
    plain = plain_stderr()
    if plain.isatty():
        return
    logging.getLogger(NAME).setLevel(logging.INFO)
    warnings.showwarning = _show_warning
    if sys.stderr is plain:
        sys.stderr = StderrLines(plain)
        for logger in list(logging.root.manager.loggerDict.values()):
            for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
                if isinstance(handler, logging.StreamHandler) and handler.stream is plain:
                    handler.setStream(sys.stderr)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if file is not None:
        file.write(warnings.formatwarning(message, category, filename, lineno, line))
        return
    level = logging.INFO if issubclass(category, _FOR_DEVELOPERS) else logging.WARNING
    logging.getLogger(NAME).log(level, "%s: %s (%s:%d)", category.__name__, message, filename, lineno)
