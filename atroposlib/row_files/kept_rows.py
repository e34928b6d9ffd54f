"""How much of a growing file of JSON lines is kept: samples.jsonl of an environment, trained.jsonl of a trainer.

    samples.jsonl ──full──▶ samples_s000120-000160.jsonl ──the next is full──▶ ....jsonl.gz ──above the limit──▶ gone

A part that is full is moved aside under the steps that it holds, so readers of `samples*.jsonl` find the current and
the previous part as they are. Older parts are compressed by a thread (packed_rows.py), and the oldest are removed:
`samples_removed.json` has how many rows, bytes and steps that were. Parts of earlier starts of a run count, too.
Nothing is removed before it is replaced: a killed process leaves whole files.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from pydantic import AfterValidator

from atroposlib.files import write_whole
from atroposlib.logs import get_logger
from atroposlib.row_files.packed_rows import SUFFIX, Packed, pack

log = get_logger(__name__)

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
GRAMMAR = re.compile(
    r"(?:(?P<count>[0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?P<unit>MB|GB|TB)|(?P<steps>[0-9]{1,15}) ?steps?|(?P<all>all))"
)
DEFAULT = "20GB"
PARTS = 5  # of the limit in one part: the current, the previous, and compressed ones
LARGEST_PART = 2 * 10**9  # what the window indexes at once
REMOVED = "_removed.json"  # behind the stem of the file


class Keep(NamedTuple):
    """A limit in bytes of one file with its parts, or in steps; without either everything is kept."""

    bytes: int | None = None
    steps: int | None = None

    @property
    def is_all(self) -> bool:
        return self.bytes is None and self.steps is None


def parse_keep(text: str) -> Keep:
    """`20GB`, `500MB`, `200steps` or `all`. Raises ValueError."""
    match = GRAMMAR.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not how much to keep: give bytes (20GB, 500MB), steps (200steps) or all")
    if match["all"]:
        return Keep()
    keep = (
        Keep(steps=int(match["steps"])) if match["steps"] else Keep(int(float(match["count"]) * UNITS[match["unit"]]))
    )
    if not (keep.steps or keep.bytes):
        raise ValueError(f"{text!r} keeps nothing: give more, or drop what writes the file")
    return keep


def _checked(text: str) -> str:
    parse_keep(text)
    return text


KeepText = Annotated[str, AfterValidator(_checked)]


class Parts:
    """The parts of the file `path`, whose rows come with rising steps. `base` is what an earlier start wrote to."""

    def __init__(self, path: Path, keep: Keep, base: Path | None = None) -> None:
        self._path, self._keep, self._base = path, keep, base or path
        self._since = time.time()
        stem, suffix = re.escape(self._base.stem), re.escape(path.suffix)
        self._mine = re.compile(rf"{stem}(?P<start>_\d+)?(?P<part>_s\d+-(?P<last>\d+))?{suffix}(?P<packed>\.gz)?")
        self._first: int | None = None  # step of the current part
        self._last = self._next = 0
        self._thread: threading.Thread | None = None
        self._removing = threading.Lock()

    def is_full(self, size: int, step: int) -> bool:
        """Return whether to move the current part, now of `size` bytes, aside before rows of `step` are added."""
        self._next = step
        if self._first is None:
            self._first = step
        if self._keep.bytes is not None:
            full = size >= min(LARGEST_PART, self._keep.bytes // PARTS)
        else:
            span = max(1, (self._keep.steps or 0) // PARTS)
            full = self._keep.steps is not None and step > self._last and step - self._first >= span
        if not full:
            self._last = max(step, self._last)
        return full

    def move_aside(self) -> Path:
        """Move the current part, which is closed; the caller begins another. Older ones are taken care of beside."""
        last = max(self._first or 0, self._last)
        name = f"{self._path.stem}_s{self._first or 0:06d}-{last:06d}"
        target = self._path.with_name(f"{name}{self._path.suffix}")
        while target.exists() or packed_path(target).exists():  # several parts of one step
            last += 1
            target = self._path.with_name(f"{self._path.stem}_s{self._first or 0:06d}-{last:06d}{self._path.suffix}")
        os.replace(self._path, target)
        self._first = self._last = self._next
        self.settle()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.settle_all, args=(target,), name="compress", daemon=True)
            self._thread.start()
        return target

    def settle_all(self, previous: Path) -> None:
        """Compress all parts but the current one and `previous`, and remove what is above the limit."""
        for part in self._parts():
            if part != previous and part.suffix != SUFFIX:
                compress(part)
        self.settle()

    def settle(self) -> None:
        """Remove the oldest parts until the limit holds."""
        with self._removing:
            parts = self._parts()
            sizes = {part: _size(part) for part in parts}
            total = sum(sizes.values()) + _size(self._path)
            for part in parts:
                if not self._is_above(total, part):
                    break
                log.info("Removing %s (%.1f MB), which is above the limit (keep_samples)", part, sizes[part] / 1e6)
                self._note_removed(part)
                part.unlink(missing_ok=True)
                total -= sizes[part]

    def cut(self, first_step: int) -> None:
        """Drop the rows of `first_step` and later ones from the parts: a resumed run does these steps again. Raises
        OSError, ValueError.
        """
        for part in self._parts():
            named = self._mine.fullmatch(part.name)
            if named is None or named["last"] is None or int(named["last"]) < first_step:
                continue
            log.info("Dropping the rows of step %d and later, which the run does again, from %s", first_step, part)
            unfinished = part.with_name(f".{part.name}.cut")
            try:
                if _copy_before(part, unfinished, first_step):
                    shutil.copystat(part, unfinished)
                    os.replace(unfinished, part)
                else:
                    part.unlink()
            finally:
                unfinished.unlink(missing_ok=True)

    def set_aside(self, stem: str) -> None:
        """Rename all parts that are named for their steps, and what is known of removed ones, as those of `stem`."""
        for path in [*self._parts(), self._removed_path()]:
            named = self._mine.fullmatch(path.name)
            if path.exists() and (named is None or named["part"]):
                os.replace(path, path.with_name(f"{stem}{path.name.removeprefix(self._path.stem)}"))

    def _removed_path(self) -> Path:
        return self._path.with_name(f"{self._base.stem}{REMOVED}")

    def _note_removed(self, part: Path) -> None:
        """Before it is removed; a part that a killed process has noted and not removed is not counted twice."""
        path = self._removed_path()
        try:
            removed = read_removed(path)
            if removed.newest == part.name:
                return
            size, rows = _text_size(part)
            named = self._mine.fullmatch(part.name)
            last = int(named["last"]) if named is not None and named["last"] else removed.last_step
            found = Removed(removed.rows + rows, removed.bytes + size, removed.parts + 1, last, part.name)
            write_whole(path, json.dumps(found._asdict()).encode() + b"\n")
        except (OSError, ValueError) as error:
            log.warning("%s does not have that %s was removed: %s", path, part.name, error)

    def _is_above(self, total: int, part: Path) -> bool:
        if self._keep.bytes is not None:
            return total > self._keep.bytes
        match = self._mine.fullmatch(part.name)
        last = int(match["last"] or 0) if match else 0
        return self._keep.steps is not None and last <= self._last - self._keep.steps

    def _parts(self) -> list[Path]:
        """Oldest first, without the current one."""
        paths = []
        with suppress(OSError):
            for entry in os.scandir(self._path.parent):
                named = self._mine.fullmatch(entry.name)
                if named is None or entry.name == self._path.name:
                    continue
                with suppress(OSError):  # removed meanwhile
                    written = entry.stat(follow_symlinks=False).st_mtime
                    # a whole file that is still written is another environment's
                    if entry.is_file(follow_symlinks=False) and (
                        named["part"] or named["packed"] or written < self._since
                    ):
                        last = int(named["last"]) if named["part"] else sys.maxsize  # what no step names came last
                        paths.append((named["start"] or "", last, written, entry.name))
        paths.sort(reverse=True)  # by steps: a copy, or a clock, may have mixed the times up
        oldest, of_start, by_age = 0.0, None, []
        for start, last, written, name in paths:
            oldest = min(oldest, written) if start == of_start else written
            of_start = start
            by_age.append((oldest, last, name))
        return [self._path.with_name(name) for _, _, name in sorted(by_age)]


class Removed(NamedTuple):
    """Counts what was removed of a file so far, as text; `last_step` is the newest step in it, if parts were named for
    theirs, and `newest` the part that was removed last.
    """

    rows: int = 0
    bytes: int = 0
    parts: int = 0
    last_step: int | None = None
    newest: str = ""


def read_removed(path: Path) -> Removed:
    """The record at `path`; nothing was removed if there is none. Raises OSError, ValueError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, int | str | None])
        return msgspec.convert([found[name] for name in Removed._fields], Removed)
    except FileNotFoundError:
        return Removed()
    except KeyError as error:
        raise ValueError(f"{path} has no {error}") from None


def packed_path(part: Path) -> Path:
    """Where a part lies once it is compressed."""
    return part.with_name(f"{part.name}{SUFFIX}")


def compress(part: Path) -> None:
    """`part` as `part.gz`, whole or not at all; on a full disk it stays as it is."""
    target = packed_path(part)
    unfinished = part.with_name(f".{target.name}.new")
    try:
        with part.open("rb") as rows, unfinished.open("wb") as packed:
            pack(rows, packed)
        shutil.copystat(part, unfinished)
        os.replace(unfinished, target)
        part.unlink()
    except OSError as error:
        log.warning("%s stays uncompressed: %s", part, error.strerror)
        unfinished.unlink(missing_ok=True)


def _copy_before(part: Path, target: Path, first_step: int) -> bool:
    """Copy the rows up to the first one of `first_step`; whether there are any."""
    is_packed = part.suffix == SUFFIX
    with part.open("rb") as source, tempfile.TemporaryFile(dir=part.parent) as kept:
        rows = _lines_of(Packed(source.fileno())) if is_packed else source
        for line in rows:
            if line.strip() and step_of(line) >= first_step:
                break
            kept.write(line)
        if not kept.tell():
            return False
        kept.seek(0)
        with target.open("wb") as file:
            pack(kept, file) if is_packed else shutil.copyfileobj(kept, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    return True


def _lines_of(packed: Packed) -> Iterator[bytes]:
    held = b""
    for block in packed.blocks():
        *lines, held = (held + block).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if held:
        yield held


class _Row(msgspec.Struct):
    """Holds what is read of a row."""

    step: int


def step_of(line: bytes) -> int:
    """The step of a row. Raises ValueError for anything else."""
    return msgspec.json.decode(line, type=_Row).step


def _text_size(part: Path) -> tuple[int, int]:
    """Bytes and rows of a part, unpacked. Raises OSError."""
    with part.open("rb") as file:
        if part.suffix == SUFFIX:
            packed = Packed(file.fileno())
            return packed.size, packed.lines
        return part.stat().st_size, sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
