"""A token in a file that only trusted users can write, read again when the file changes.

`run-api` reads it before it listens, and refuses what it cannot trust. While it serves, `TokenFile.current` looks at
the file at most once a second, so that a token can be changed without a restart. A file that has become unusable
leaves the token as it was, with one line in the log. No message repeats what is in the file.
"""

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from atroposlib.errors import reading
from atroposlib.logs import get_logger

LOOK_EVERY_S = 1.0
MIN_CHARACTERS = 8
MAX_BYTES = 4096

log = get_logger(__name__)


def is_usable(token: str) -> bool:
    """Return whether a token fits into a header and is not trivial to guess."""
    return len(token) >= MIN_CHARACTERS and token.isascii() and token.isprintable() and " " not in token


def read_token(path: Path, flag: str) -> str:
    """The token in a file that only its owner can write. Raises ValueError, which names the flag and what to do."""
    what = f"{flag} {path}"
    with reading(what, ValueError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status_of = {path: os.fstat(file.fileno())}  # of a FIFO, too: it does not keep us waiting
        status_of |= {folder: folder.stat() for folder in (path.absolute().parent, path.resolve().parent)}
        content = file.read(MAX_BYTES + 1) or b""
    for place, status in status_of.items():
        _expect_trusted(place, status, what)
    token = content.decode("ascii", "replace").strip()
    if len(content) > MAX_BYTES or not is_usable(token):
        raise ValueError(f"{what} must hold one token of {MIN_CHARACTERS} or more printable characters")
    return token


def _expect_trusted(path: Path, status: os.stat_result, what: str) -> None:
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder and not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{what}: {path} is not a regular file; put the token into one")
    if status.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"{what}: {path} belongs to another user, who could change the token: `chown {os.geteuid()} {path}`"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (is_folder and status.st_mode & stat.S_ISVTX):
        raise ValueError(f"{what}: others can write {path} and so change the token: `chmod go-w {path}`")


class TokenFile:
    """A token file that is read again when it changes. Raises ValueError if it is unusable at the start."""

    def __init__(self, path: Path, flag: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._flag = flag
        self._clock = clock
        self._seen = self._signature()
        self._token = read_token(path, flag)
        self._looked_at = clock()

    def current(self) -> str:
        """The token as the file last held it."""
        now = self._clock()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look()
        return self._token

    def _look(self) -> None:
        before, self._seen = self._seen, self._signature()
        if self._seen == before:
            return
        try:
            token = read_token(self._path, self._flag)
        except ValueError as error:
            log.error("The token is unchanged: %s", error)
            return
        if token != self._token:
            self._token = token
            log.info("%s has a new token: the previous one is no longer accepted", self._path)

    def _signature(self) -> tuple[int, ...] | None:
        with suppress(OSError):
            status = self._path.stat()
            return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return None
