"""Lock files: one process at a time, until it releases the lock or ends, however it ends.

    DIRECTORY/NAME          what one process may write
    DIRECTORY/.NAME.lock    while it does: locked, with the process's name

A lock is one of the kernel's (flock), so a file that a killed process left behind holds nobody up.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atroposlib.errors import MakeError, reading
from atroposlib.logs import escape

HOLDER_BYTES = 200  # of the text that says who holds a lock
POLL_S = 0.1


class Held(Exception):
    """Another process holds a lock; the message names it."""


@contextmanager
def alone_in(
    path: Path,
    raises: MakeError,
    taken: Callable[[str], str],
    *,
    remedy: str = "",
    patience_s: float = 0.0,
    waiting: Callable[[str], None] = lambda holder: None,
) -> Iterator[None]:
    """While this lasts, no other process that asks so writes `path`, a file or a directory, whose directory is made if
    need be. Who waits for another, for up to `patience_s`, is told its name once, by `waiting`. Raises an error that
    `raises` makes: of the line that `taken` makes of the other's name, or of why there is no lock, with the remedy.
    """
    lock = path.parent / f".{path.name}.lock"  # also for `.`, which has no name
    try:
        with reading(f"cannot lock {path}", raises, remedy=remedy):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _awaited(lock, patience_s, waiting)
    except Held as holder:
        raise raises(taken(str(holder))) from None
    try:
        with reading(f"cannot write {lock}", raises, remedy=remedy):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _awaited(lock: Path, patience_s: float, waiting: Callable[[str], None]) -> int:
    end, told = time.monotonic() + patience_s, False
    while True:
        try:
            return take_lock(lock)
        except Held as held:
            if time.monotonic() >= end:
                raise
            if not told:
                waiting(str(held))
            told = True
            time.sleep(POLL_S)


def take_lock(path: Path) -> int:
    """Return a descriptor of the file `path`, made if need be, that holds its lock until it is closed. A file system
    without locks keeps nobody out. Raises Held; OSError for a file that cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = os.pread(descriptor, HOLDER_BYTES, 0).decode(errors="replace")
                os.close(descriptor)
                raise Held(escape(holder) or "another process") from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        os.close(descriptor)  # who had the lock has just removed the file
