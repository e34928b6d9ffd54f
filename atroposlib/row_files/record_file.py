"""A file of JSON lines that only record what happened: a disk without room must not end a run for their sake.

    row ──▶ file        the disk takes no more: one ERROR      it takes rows again: one WARNING, with what is missing
     └────▶ memory ────▶ file
               └──▶ dropped, the oldest first, above HELD_BYTES

Samples, held-out answers, evaluations, metrics and trained groups are such rows. What an author asked for as data
(`process`, `evaluate`) is not: there `append_line` raises. Lines are written whole or not at all.
"""

import errno
import os
import shutil
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from atroposlib.files import NotRegularFile, expect_regular, open_regular
from atroposlib.logs import get_logger
from atroposlib.row_files.json_text import encode
from atroposlib.row_files.kept_rows import Parts

log = get_logger(__name__)

HELD_BYTES = 64 << 20  # of rows that wait in memory for room on the disk


class _Held(NamedTuple):
    """Rows that belong together, which are written all or none."""

    rows: int
    lines: bytes
    step: int | None


class RecordFile:
    """Appends rows to `path`, and moves full `parts` of it aside. No disk's failure reaches the caller. Raises
    NotRegularFile for a device or a link.
    """

    def __init__(self, path: Path, parts: Parts | None = None) -> None:
        self.path, self.parts = expect_regular(path), parts
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._missing = 0
        self._is_waiting = False

    def append(self, *records: Mapping[str, object], step: int | None = None) -> None:
        """A line for each record, all or none: now, or when the disk has room again."""
        lines = as_lines(*records)
        self._held.append(_Held(len(records), lines, step))
        self._held_bytes += len(lines)
        try:
            self._write_held()
        except NotRegularFile:
            raise
        except OSError as error:
            self._wait(error)

    def close(self) -> None:
        """Try once more to write what waits; what cannot be written is said to be missing."""
        if not self._held:
            return
        try:
            self._write_held()
        except OSError as error:
            rows = self._missing + sum(held.rows for held in self._held)
            log.error("%s ends without %d rows: %s", self.path, rows, error.strerror)

    def _write_held(self) -> None:
        """Raises OSError, with what is left to write still held."""
        while self._held:
            held = self._held[0]
            if self.parts is not None and held.step is not None and self.parts.is_full(_size(self.path), held.step):
                self.parts.move_aside()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_regular(self.path, "a+b", buffering=0) as file:
                write_lines(file, held.lines)
            self._held_bytes -= len(self._held.popleft().lines)
        if self._is_waiting:
            self._is_waiting = False
            log.warning("%s is written again; %d rows are missing in it", self.path, self._missing)
            self._missing = 0

    def _wait(self, error: OSError) -> None:
        while self._held_bytes > HELD_BYTES:
            dropped = self._held.popleft()
            self._held_bytes -= len(dropped.lines)
            self._missing += dropped.rows
        if self._is_waiting:
            return
        self._is_waiting = True
        log.error(
            "%s cannot be written: %s (%s). The run continues, and its rows wait in memory (%d MB at most; then the"
            " oldest are dropped): free space, and they are written",
            self.path,
            error.strerror,
            free_space(self.path.parent),
            HELD_BYTES >> 20,
        )


def as_lines(*records: Mapping[str, object]) -> bytes:
    """A line of JSON for each record. Raises TypeError for what is not JSON."""
    return b"".join(encode(record) + b"\n" for record in records)


def write_lines(file: IO[bytes], lines: bytes) -> None:
    """Append `lines` to an unbuffered `file` that can be read, too, all of them or none. They begin a line of their
    own, after what a killed process has left of one. Raises OSError.
    """
    if end := file.seek(0, os.SEEK_END):
        file.seek(end - 1)
        if file.read(1) != b"\n":
            lines = b"\n" + lines
    try:
        if file.write(lines) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(end)
        raise


def free_space(folder: Path) -> str:
    """Say in words what is free on the disk of `folder`."""
    with suppress(OSError):
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free"
    return "free space unknown"


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
