"""Opens files of a run directory, which may come from somebody else: regular files only, and nothing is written."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


def read_at(descriptor: int, start: int, count: int) -> bytes:
    """Up to `count` bytes from `start`, fewer only at the end of the file."""
    parts: list[bytes] = []
    while count > 0 and (part := os.pread(descriptor, count, start)):
        parts.append(part)
        start += len(part)
        count -= len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]


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
