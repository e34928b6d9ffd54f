"""Reads the logs of services: the last lines, and new ones as they are written. Text of a log reaches a terminal only
through `printable`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from atroposlib.logs import escape

TAIL_BYTES = 64 << 10
CHUNK_BYTES = 1 << 20
LINE_BYTES = 64 << 10  # a line that is longer is cut there
_BREAK = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with a carriage return
_ACCESS = re.compile(r'"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) \S+ HTTP/\d')


def printable(text: str) -> str:
    """On one line, and with nothing in it that a terminal obeys."""
    return escape(text.replace("\t", "    "))


def last_lines(log: Path, count: int, end: int | None = None, start: int = 0) -> tuple[str, ...]:
    """Return the last lines of a regular file, as many as fit, from byte `start` to byte `end`; none of other files."""
    if not log.is_file() or log.is_symlink():
        return ()
    with log.open("rb") as file:
        end = log.stat().st_size if end is None else end
        start = max(start, end - TAIL_BYTES)
        file.seek(start)
        lines = [line for line in _BREAK.split(file.read(max(0, end - start))) if line]
    return tuple(line.decode(errors="replace") for line in lines[len(lines) - min(count, len(lines)) :])


def last_word(log: Path) -> str:
    """The last line that is not an access line of a web server."""
    return next((line for line in reversed(last_lines(log, 1000)) if not _ACCESS.search(line)), "")


class Follower:
    """The lines that are added to a log from now on."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.offset = log.stat().st_size if log.exists() else 0
        self._partial = b""

    def new_lines(self) -> Iterator[str]:
        """Yield the new lines that are complete."""
        try:
            with self._log.open("rb") as file:
                file.seek(self.offset)
                chunk = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return
        self.offset += len(chunk)
        *lines, self._partial = _BREAK.split(self._partial + chunk)
        if len(self._partial) > LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        yield from (line.decode(errors="replace") for line in lines if line)

    def rest(self) -> Iterator[str]:
        """Yield what was written since, once nobody writes any more, the line without an end included."""
        while True:
            before = self.offset
            yield from self.new_lines()
            if self.offset == before:
                break
        if self._partial:
            yield self._partial.decode(errors="replace")
            self._partial = b""
