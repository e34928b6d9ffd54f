"""Writes files that a flag names, and only where there is a regular file or nothing yet; reads what programs that we
did not write have left, and only regular files.

Otherwise root, for example in a container, would rename /dev/null for `--metrics-path /dev/null`, and a link in a
directory that others can write to would choose the file. A pipe or /dev/zero in the place of a file of a program would
keep its reader for ever. Directories on the way may be links.
"""

import errno
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

_KINDS = {
    stat.S_IFLNK: "link",
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}

P = TypeVar("P", str, Path)


class NotRegularFile(OSError, ValueError):
    """The path to write, or to read, is something other than a regular file."""

    def __init__(self, path: str | Path, mode: int, what_for: str = "written") -> None:
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        super().__init__(errno.EINVAL, f"it is a {kind}, not a regular file", str(path))
        self._what_for = what_for

    def __str__(self) -> str:
        return f"{self.filename} cannot be {self._what_for}: {self.strerror}; choose another file"


def expect_regular(path: P) -> P:
    """`path`, if a regular file is there or nothing. Raises NotRegularFile."""
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise NotRegularFile(path, mode)
    return path


def expect_readable(path: P) -> P:
    """`path`, if a regular file or a directory is there, or a link to one, or nothing that can be seen: the reader of
    anything else may wait for ever, or never come to its end. Raises NotRegularFile.
    """
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise NotRegularFile(path, mode, "read")
    return path


def open_regular(path: Path, mode: str, **options: Any) -> IO[Any]:
    """`open` for writing, which follows no link. Raises NotRegularFile."""
    return open(
        expect_regular(path), mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666), **options
    )


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a file whose place another program may write to: it follows no link and waits for no pipe. Raises
    OSError, also for a longer file.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if len(content := file.read(most_bytes + 1)) > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def make_private(path: Path) -> None:
    """Let this user alone read `path`, which is made if nothing is there: before anything is in it, whatever the umask.
    Raises OSError. A file of another user stays as it is.
    """
    file = os.open(expect_regular(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with suppress(PermissionError):
            os.fchmod(file, 0o600)
    finally:
        os.close(file)


def make_private_directory(path: Path) -> None:
    """Make a directory that this user alone may enter; one that is there stays as it is. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def dated(path: Path) -> Path:
    """Return a name beside `path` that nothing has yet, with the time at which it was written."""
    written = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
    name, number = path.with_name(f"{path.stem}.{written}{path.suffix}"), 1
    while os.path.lexists(name):
        number += 1
        name = path.with_name(f"{path.stem}.{written}-{number}{path.suffix}")
    return name


def is_open(path: Path) -> bool:
    """Return whether this user may list and enter a directory, such as somebody else's run."""
    return os.access(path, os.R_OK | os.X_OK, effective_ids=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write `path` so that it is either the old file or the new one, on the disk, whatever happens meanwhile. Raises
    OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = expect_regular(path).with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with open_regular(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
