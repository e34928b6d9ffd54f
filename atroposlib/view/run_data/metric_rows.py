"""metrics.jsonl as a table that a page asks for piece by piece, and as the trainer's timeline."""

import math
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atroposlib.view.run_data.files import after_newline, opened, read_at
from atroposlib.view.run_data.rows import finite
from atroposlib.wire.step_seconds import StepSeconds

REPLY_BYTES = 4 << 20  # of the file, that one reply is made of
LONGEST_LINE_BYTES = 64 << 20  # what follows a longer one is not shown
TIMELINE_BYTES = 16 << 20  # the newest rows of a longer file
MAX_CELLS = 1_000_000  # of a reply's table; rows of equal columns never have as many in its bytes
SEAM_BYTES = 64

Number = int | float


@dataclass
class MetricRows:
    """Rows after those that the page has. `generation` says where they end, for the next request. With `reset` these
    are the first rows again, because the file is another one; with `more` there are more already.
    """

    columns: list[str]
    rows: list[list[Number | None]]
    next: int
    generation: str
    reset: bool
    more: bool


class TimedRow(StepSeconds, kw_only=True):
    """Holds what the timeline needs of a row."""

    step: int
    time: float


def read_metrics(path: Path, after: int, generation: str | None) -> MetricRows:
    """The rows after the first `after`, which ended where `generation` says. Raises NotReadable, OSError."""
    try:
        with opened(path) as descriptor:
            found = os.fstat(descriptor)
            identity = f"{found.st_dev:x}-{found.st_ino:x}"
            start = _start(descriptor, identity, generation) if after and generation else None
            offset = start or 0
            data, end = _whole_lines(descriptor, offset, found.st_size)
            seam = _seam(descriptor, end)
    except FileNotFoundError:
        return MetricRows([], [], 0, "", bool(after), False)
    lines = data.split(b"\n")[:-1]
    known = after if start is not None else 0
    skipped = min(after, len(lines)) if generation is None else 0
    rows = [row for row in map(json_object, lines[skipped:]) if row is not None]
    columns = list(dict.fromkeys(key for row in rows for key in row))[: MAX_CELLS // max(1, len(rows))]
    return MetricRows(
        columns,
        [[finite_number(row.get(key)) for key in columns] for row in rows],
        known + len(lines),
        f"{identity}-{end:x}-{seam:x}",
        reset=generation is not None and after > 0 and start is None,
        more=bool(data) and end < found.st_size,
    )


def trainer_steps(path: Path, first: int | None, last: int | None) -> list[dict[str, object]]:
    """Return what the trainer did in each step from `first` to `last`. Rows without `time` are left out."""
    with suppress(FileNotFoundError), opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        data = read_at(descriptor, max(0, size - TIMELINE_BYTES), TIMELINE_BYTES)
        rows = [row for row in map(_timed, data.split(b"\n")) if row is not None]
        lowest, highest = first or 0, math.inf if last is None else last
        return [_of_step(row) for row in rows if lowest <= row.step <= highest]
    return []


def json_object(line: bytes) -> dict[str, object] | None:
    """The object on a line; None for anything else."""
    with suppress(ValueError, RecursionError):
        row = msgspec.json.decode(line) if line else None
        return row if isinstance(row, dict) else None
    return None


def finite_number(value: object) -> Number | None:
    """A number that every reader of JSON can hold; None for anything else."""
    number = finite(value)
    return value if isinstance(value, int) and number is not None and abs(value) < 2**53 else number


def _whole_lines(descriptor: int, start: int, size: int) -> tuple[bytes, int]:
    """Return the complete lines of one reply, and where they end. One that is too long for it is an empty one."""
    data = read_at(descriptor, start, REPLY_BYTES)
    end = data.rfind(b"\n") + 1
    if end or len(data) < REPLY_BYTES:
        return data[:end], start + end
    after = after_newline(descriptor, start, min(size, start + LONGEST_LINE_BYTES))
    return b"\n" if after > start else b"", after


def _timed(line: bytes) -> TimedRow | None:
    with suppress(ValueError, RecursionError):
        return _TIMED_ROW.decode(line)
    return None


def _of_step(row: TimedRow) -> dict[str, object]:
    """A row's durations in their order: the trainer waits, trains, syncs and waits for evaluations."""
    spent = row.by_activity()
    at, found = row.time - sum(spent.values()), []
    for what, duration in spent.items():
        if duration > 0:
            found.append({"start": at, "end": at + duration, "what": what})
        at += duration
    return {"step": row.step, "trainer": found}


def _start(descriptor: int, identity: str, generation: str) -> int | None:
    """Return the offset where the rows that the page has end; None if the file is another one by now."""
    *known, end, checksum = generation.split("-")[-4:]
    with suppress(ValueError):
        offset = int(end, 16)
        if "-".join(known) == identity and 0 < offset < 2**62 and _seam(descriptor, offset) == int(checksum, 16):
            return offset
    return None


def _seam(descriptor: int, end: int) -> int:
    start = max(0, end - SEAM_BYTES)
    return zlib.crc32(read_at(descriptor, start, end - start))


_TIMED_ROW = msgspec.json.Decoder(TimedRow)
