"""How much of a growing file of JSON lines is kept: samples.jsonl of an environment, trained.jsonl of a trainer.

    samples.jsonl ──full──▶ samples_s000120-000160.jsonl ──the next is full──▶ ....jsonl.gz ──above the limit──▶ gone

A part that is full is moved aside under the steps that it holds, so readers of `samples*.jsonl` find the current and
the previous part as they are. Older parts are compressed by a thread, and the oldest are removed. Parts of earlier
starts of a run count, too. Nothing is removed before it is replaced: a killed process leaves whole files.
"""

import gzip
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

from atroposlib.logs import get_logger

log = get_logger(__name__)

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
GRAMMAR = re.compile(r"(?:(?P<count>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>MB|GB|TB)|(?P<steps>[0-9]+) ?steps?|(?P<all>all))")
DEFAULT = "20GB"
PARTS = 5  # of the limit in one part: the current, the previous, and compressed ones
LARGEST_PART = 2 * 10**9  # what the window indexes at once
LEVEL = 1  # of gzip: the rows are digits, which the fastest level halves


class Keep(NamedTuple):
    """A limit in bytes of one file with its parts, or in steps; without either everything is kept."""

    bytes: int | None = None
    steps: int | None = None

    @property
    def is_all(self) -> bool:
        return self.bytes is None and self.steps is None


def parse_keep(text: str) -> Keep:
    """`20GB`, `500MB`, `200steps` or `all`. Raises ValueError."""
    found = GRAMMAR.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not how much to keep: give bytes (20GB, 500MB), steps (200steps) or all")
    if found["all"]:
        return Keep()
    keep = (
        Keep(steps=int(found["steps"])) if found["steps"] else Keep(int(float(found["count"]) * UNITS[found["unit"]]))
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
        self._path, self._keep = path, keep
        self._since = time.time()
        stem, suffix = re.escape((base or path).stem), re.escape(path.suffix)
        self._mine = re.compile(rf"{stem}(?:_\d+)?(?P<part>_s\d+-(?P<last>\d+))?{suffix}(?P<packed>\.gz)?")
        self._first: int | None = None  # step of the current part
        self._last = 0
        self._thread: threading.Thread | None = None

    def is_full(self, size: int, step: int) -> bool:
        """Whether the current part, now of `size` bytes, is to be moved aside before rows of `step` are added."""
        if self._first is None:
            self._first = step
        new_step, self._last = step > self._last, max(step, self._last)
        if self._keep.bytes is not None:
            return size >= min(LARGEST_PART, self._keep.bytes // PARTS)
        return self._keep.steps is not None and new_step and step - self._first >= max(1, self._keep.steps // PARTS)

    def move_aside(self) -> Path:
        """Move the current part, which is closed; the caller begins another. Older ones are taken care of beside."""
        last = max(self._first or 0, self._last)
        name = f"{self._path.stem}_s{self._first or 0:06d}-{last:06d}"
        target = self._path.with_name(f"{name}{self._path.suffix}")
        while target.exists() or target.with_name(f"{target.name}.gz").exists():  # several parts of one step
            last += 1
            target = self._path.with_name(f"{self._path.stem}_s{self._first or 0:06d}-{last:06d}{self._path.suffix}")
        os.replace(self._path, target)
        self._first = None
        self.settle()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.settle_all, args=(target,), name="compress", daemon=True)
            self._thread.start()
        return target

    def settle_all(self, previous: Path) -> None:
        """Compress all parts but the current one and `previous`, and remove what is above the limit."""
        for part in self._parts():
            if part != previous and part.suffix != ".gz":
                compress(part)
        self.settle()

    def settle(self) -> None:
        """Remove the oldest parts until the limit holds."""
        parts = self._parts()
        sizes = {part: _size(part) for part in parts}
        total = sum(sizes.values()) + _size(self._path)
        for part in parts:
            if not self._is_above(total, part):
                break
            log.info("Removing %s (%.1f MB), which is above the limit (keep_samples)", part, sizes[part] / 1e6)
            part.unlink(missing_ok=True)
            total -= sizes[part]

    def _is_above(self, total: int, part: Path) -> bool:
        if self._keep.bytes is not None:
            return total > self._keep.bytes
        found = self._mine.fullmatch(part.name)
        last = int(found["last"] or 0) if found else 0
        return self._keep.steps is not None and last <= self._last - self._keep.steps

    def _parts(self) -> list[Path]:
        """Oldest first, without the current one."""
        found = []
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
                        found.append((written, entry.name))
        return [self._path.with_name(name) for _, name in sorted(found)]


def compress(part: Path) -> None:
    """`part` as `part.gz`, whole or not at all; on a full disk it stays as it is."""
    unfinished, target = part.with_name(f".{part.name}.gz.new"), part.with_name(f"{part.name}.gz")
    try:
        with part.open("rb") as rows, gzip.open(unfinished, "wb", compresslevel=LEVEL) as packed:
            shutil.copyfileobj(rows, packed, 1 << 20)
        shutil.copystat(part, unfinished)
        os.replace(unfinished, target)
        part.unlink()
    except OSError as error:
        log.warning("%s stays uncompressed: %s", part, error.strerror)
        unfinished.unlink(missing_ok=True)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
