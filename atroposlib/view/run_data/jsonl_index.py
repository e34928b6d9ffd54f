"""Where each row of a growing JSONL file is, and a few numbers of each row.

The index is built newest first, one block of the file at a time, so that the newest rows are there at once however
large the file is. What was indexed is kept as segments of numpy arrays: at most 67 bytes per row, however long the row
is.

         0            low                    high    size
         │ not indexed │ segment │ … │ segment │ new  │       new rows first, then one block below `low`

A compressed file (packed_rows.py) is indexed by the places in its text. A file that shrinks, is replaced, or has other
bytes where the index ends is indexed again. The last line counts once it is complete. A row that cannot be read is
counted as damaged, and left out.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atroposlib.row_files.packed_rows import SUFFIX
from atroposlib.view.run_data.files import Text, after_newline, identity, opened_text, read_at, text_size

BLOCK_BYTES = 4 << 20
MAX_ROW_BYTES = 64 << 20  # a longer row is damaged: reading it would take too much memory
SEAM_BYTES = 64  # compared before the index continues where it ended

Numbers = NDArray[np.void]  # a structured array, one entry per row
ReadNumbers = Callable[[memoryview], tuple[object, ...]]  # of one line; ValueError: the row is damaged


@dataclass(frozen=True, eq=False)
class Segment:
    """The rows that start in the bytes [start, end), in the file's order. Never changed once made."""

    start: int
    end: int
    rows: Numbers
    damaged: int = 0


@dataclass
class _Extent:
    """Holds what is indexed of one file, as long as it stays the same file."""

    identity: tuple[int, ...]
    low: int
    high: int
    seam: bytes
    segments: list[Segment] = field(default_factory=list)  # in the file's order
    rows: int = 0


class JsonlIndex:
    """The index of one file, which may be absent. `numbers` turns a line into the fields of `kind` after the first two,
    `offset` and `length`. Methods may be called from any thread.
    """

    def __init__(self, path: Path, kind: np.dtype[Any], numbers: ReadNumbers, max_rows: int = 2_500_000) -> None:
        self.path = path
        self._kind, self._numbers, self._max_rows = kind, numbers, max_rows
        self._extent: _Extent | None = None
        self._size = 0
        self._behind = self.is_packed  # it is indexed beside, not when somebody asks
        self._problem: str | None = None
        self._lock = threading.Lock()

    @property
    def is_packed(self) -> bool:
        """Return whether the file is compressed, and so never grows."""
        return self.path.suffix == SUFFIX

    @property
    def name(self) -> str:
        """Return the file's stem, as `stem_of` does."""
        return stem_of(self.path)

    @property
    def segments(self) -> Sequence[Segment]:
        """Return the indexed segments, newest first."""
        with self._lock:
            return [] if self._extent is None else self._extent.segments[::-1]

    @property
    def rows(self) -> int:
        """Return how many rows are indexed."""
        return sum(len(segment.rows) for segment in self.segments)

    @property
    def problems(self) -> list[str]:
        """Say what is wrong with the file, in sentences."""
        found = [] if self._problem is None else [self._problem]
        if damaged := sum(segment.damaged for segment in self.segments):
            found.append(f"{self.path.name}: {damaged} damaged row{'s' if damaged > 1 else ''} left out")
        if self._is_full():
            found.append(f"{self.path.name}: only the newest {self.rows} rows are shown")
        return found

    @property
    def is_behind(self) -> bool:
        """Return whether rows that are in the file are not indexed yet."""
        return self._behind

    @property
    def extent(self) -> tuple[int, int]:
        """Bytes that are indexed, and bytes of the file."""
        with self._lock:
            extent = self._extent
            return (extent.high - extent.low, self._size) if extent is not None and self._behind else (1, 1)

    def advance(self, most_bytes: int = BLOCK_BYTES) -> bool:
        """Look at the file and index up to about `most_bytes` of it. Returns whether that left some rows unindexed."""
        with self._lock:
            try:
                with opened_text(self.path) as text:
                    self._problem = None
                    self._behind = self._advance(text, most_bytes)
            except OSError as error:
                self._extent, self._size, self._behind = None, 0, False
                is_gone = isinstance(error, FileNotFoundError | NotADirectoryError)
                self._problem = None if is_gone else f"{self.path.name} cannot be read: {error.strerror or error}"
            return self._behind

    def _advance(self, text: Text, most_bytes: int) -> bool:
        self._size = text_size(text)
        extent = self._extent
        if extent is None or not self._goes_on(text, extent, self._size):
            end = _start_of_last_line(text, self._size)
            extent = self._extent = _Extent(identity(text), end, end, _seam(text, end))
        left = most_bytes
        is_behind = False
        while extent.high < self._size:
            if left <= 0:
                is_behind = True
                break
            if not (used := self._index_new(text, extent)):
                break
            left -= used
        while left > 0 and extent.low > 0 and not self._is_full():
            left -= self._index_older(text, extent)
        return is_behind or (extent.low > 0 and not self._is_full())

    def _is_full(self) -> bool:
        extent = self._extent
        return extent is not None and extent.low > 0 and extent.rows >= self._max_rows

    @staticmethod
    def _goes_on(text: Text, extent: _Extent, size: int) -> bool:
        same = extent.identity == identity(text) and size >= extent.high
        return same and _seam(text, extent.high) == extent.seam

    def _index_new(self, text: Text, extent: _Extent) -> int:
        """Index complete lines after `high`. Returns the bytes that were taken, 0 if no line is complete."""
        count = BLOCK_BYTES
        while True:
            data = read_at(text, extent.high, min(count, self._size - extent.high))
            end = data.rfind(b"\n") + 1
            if end or len(data) < count:
                break
            if count >= MAX_ROW_BYTES:
                end = after_newline(text, extent.high, self._size) - extent.high
                data = b"\0"  # one damaged row
                break
            count *= 2
        if end <= 0:
            return 0
        last = extent.segments[-1] if extent.segments else None
        made = self._segment(extent.high, extent.high + end, data[:end])
        if last is not None and last.end - last.start < BLOCK_BYTES:
            rows = np.concatenate([last.rows, made.rows])
            extent.segments[-1] = Segment(last.start, made.end, rows, last.damaged + made.damaged)
        else:
            extent.segments.append(made)
        extent.rows += len(made.rows)
        extent.high = made.end
        extent.seam = _seam(text, made.end)
        return end

    def _index_older(self, text: Text, extent: _Extent) -> int:
        """Index the block below `low`. Returns the bytes that were taken."""
        end, count = extent.low, BLOCK_BYTES
        while True:
            start = max(0, end - count)
            data = read_at(text, start, end - start)
            if start == 0:
                break
            newline = data.find(b"\n", 0, -1)  # the last byte ends the block's last row
            if newline >= 0:
                start, data = start + newline + 1, data[newline + 1 :]
                break
            if count >= MAX_ROW_BYTES:
                start, data = _start_of_last_line(text, start), b"\0"  # one damaged row
                break
            count *= 2
        made = self._segment(start, end, data)
        extent.segments.insert(0, made)
        extent.rows += len(made.rows)
        extent.low = start
        return end - start

    def _segment(self, start: int, end: int, data: bytes) -> Segment:
        rows: list[tuple[object, ...]] = []
        damaged, at, view = 0, 0, memoryview(data)
        while at < len(data):
            newline = data.find(b"\n", at)
            newline = len(data) if newline < 0 else newline
            if newline > at:
                try:
                    rows.append((start + at, newline - at, *self._numbers(view[at:newline])))
                except (ValueError, RecursionError, OverflowError):
                    damaged += 1
            at = newline + 1
        return Segment(start, end, np.array(rows, self._kind), damaged)


class Indexer:
    """One thread that indexes what requests have asked for, and sleeps otherwise. Its process may end at any time."""

    def __init__(self) -> None:
        self._work: dict[JsonlIndex, None] = {}  # in the order of the requests
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, index: JsonlIndex) -> None:
        """Index this file to its start. It is the next one."""
        with self._changed:
            self._work = {index: None, **self._work}
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="indexer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, index: JsonlIndex) -> None:
        """Leave this file."""
        with self._changed:
            self._work.pop(index, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._work:
                    self._changed.wait()
                index = next(iter(self._work))
            if not index.advance():
                self.forget(index)


def stem_of(path: Path) -> str:
    """Return the name of a file without `.jsonl` or `.jsonl.gz`: the same before and after it is compressed."""
    return path.name.removesuffix(SUFFIX).removesuffix(".jsonl")


def lines_at(path: Path, places: Sequence[tuple[int, int]]) -> Iterator[bytes | None]:
    """The lines at these (offset, length), None where the file has no line there any more. Raises as `opened`."""
    with opened_text(path) as text:
        for offset, length in places:
            data = read_at(text, offset, length + 1)
            yield data[:length] if len(data) > length and data[length:] == b"\n" else None


def line_from(path: Path, offset: int) -> bytes | None:
    """The complete line that starts at `offset`; None if none does. Raises as `opened`."""
    with opened_text(path) as text:
        if offset and read_at(text, offset - 1, 1) != b"\n":
            return None
        count = 1 << 16
        while True:
            data = read_at(text, offset, count)
            end = data.find(b"\n")
            if end >= 0:
                return data[:end]
            if len(data) < count or count > MAX_ROW_BYTES:
                return None
            count *= 4


def _seam(text: Text, end: int) -> bytes:
    start = max(0, end - SEAM_BYTES)
    return read_at(text, start, end - start)


def _start_of_last_line(text: Text, end: int) -> int:
    """After the last newline before `end`; 0 if there is none."""
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        newline = read_at(text, start, end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
