"""Opens files of a run directory, which may come from somebody else: regular files only, and nothing is written."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atroposlib.logs import escape
from atroposlib.row_files.packed_rows import SUFFIX, Packed

CHUNK_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotReadable(OSError):
    """The path is a link, a device or anything else that is not a regular file."""


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of a regular file. Raises FileNotFoundError, NotReadable, OSError."""
    if path.is_symlink():
        raise NotReadable(f"{path.name} is a link; only regular files are read")
    descriptor = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotReadable(f"{path.name} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


Text = int | Packed  # an open file: as it is, or the text that it holds


@contextmanager
def opened_text(path: Path) -> Iterator[Text]:
    """Open a file as `opened` does; of a compressed file, open its text. Raises Damaged, too."""
    with opened(path) as descriptor:
        yield Packed(descriptor) if path.suffix == SUFFIX else descriptor


def text_size(text: Text) -> int:
    """Bytes of the text."""
    return text.size if isinstance(text, Packed) else os.fstat(text).st_size


def identity(text: Text) -> tuple[int, ...]:
    """Return what identifies the file, as long as it is the same one; a compressed one is never added to."""
    if isinstance(text, Packed):
        return text.key
    found = os.fstat(text)
    return found.st_dev, found.st_ino


def read_at(text: Text, start: int, count: int) -> bytes:
    """Up to `count` bytes from `start`, fewer only at the end of the file."""
    if isinstance(text, Packed):
        return text.read(start, count)
    parts: list[bytes] = []
    while count > 0 and (part := os.pread(text, count, start)):
        parts.append(part)
        start += len(part)
        count -= len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]


def after_newline(text: Text, start: int, end: int) -> int:
    """Return where the next line begins that does before `end`, or there; `start` if none does."""
    at = start
    while at < end:
        data = read_at(text, at, min(CHUNK_BYTES, end - at))
        newline = data.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        at += max(1, len(data))
    return start


def read_small(path: Path, limit: int) -> bytes:
    """The first `limit` bytes. Raises as `opened`."""
    with opened(path) as descriptor:
        return read_at(descriptor, 0, limit)


def read_tail(path: Path, limit: int) -> bytes:
    """The last `limit` bytes; nothing if there is no such file. Raises NotReadable, OSError."""
    with suppress(FileNotFoundError, NotADirectoryError), opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        return read_at(descriptor, max(0, size - limit), min(size, limit))
    return b""


def note(problems: list[str] | None, line: str) -> None:
    """Add a sentence to the problems of a run, if somebody collects them."""
    if problems is not None:
        problems.append(line)


def reason_of(error: Exception) -> str:
    """Say in one line why a file cannot be read."""
    reason = error.strerror if isinstance(error, OSError) and not isinstance(error, NotReadable) else str(error)
    return " ".join(escape(str(reason)).split())[:300]
