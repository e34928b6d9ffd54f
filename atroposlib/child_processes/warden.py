"""Guards a sandboxed program from outside: lets it run only while a request is open, and ends it beyond its bounds.

    ChildPool ──request──▶ warden ──▶ program (a fork of the warden, confined by `confined.py`): continued
              ◀───reply───        ◀──        └─ late, too many files, too long a reply: killed ──▶ exit code `Ended`
                                      stopped until the next request

The kernel bounds memory and the size of one file. What it does not let an unprivileged process bound is the number of
files, and the time of one request of many: a hard limit is never raised again, and a soft one is the program's own. So
the warden looks, every `LOOK_S` while a request is open and once more before the reply is passed on. It parses nothing
that the program writes, and its exit code is the one thing that `ChildPool` takes from it.
"""

import itertools
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from pathlib import Path

from atroposlib.processes.exec_child import die_with

LOOK_S = 0.02
GRACE_S = 0.5  # beyond the time limit, at which the program's own alarm ends it
LAST_WORDS_S = 0.5
PIECE_BYTES = 1 << 16
BLOCK_BYTES = 512  # the unit of `st_blocks`


class Ended(IntEnum):
    """Exit codes of the warden: why the program ended."""

    BY_ITSELF = 1
    LATE = 101
    FILES = 102
    BYTES = 103
    UNCOUNTABLE = 104
    LONG_REPLY = 105
    KILLED = 106


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds what a program may do with each request. Files, directories among them, and their bytes are counted in
    `folder`, whatever request they are left from.
    """

    time_limit_s: float
    files: int
    folder_bytes: int
    reply_bytes: int

    def explained(self, code: int | None) -> str | None:
        """Return the reason why a program ended whose warden ended with `code`; None where the warden cannot say."""
        reasons: dict[int | None, str] = {
            Ended.LATE: f"no reply within {self.time_limit_s:g} s",
            Ended.FILES: f"it had more than {self.files:,} files and directories in its directory",
            Ended.BYTES: f"it had more than {self.folder_bytes:,} bytes in the files of its directory",
            Ended.UNCOUNTABLE: "it made directories that cannot be listed, so that its files cannot be counted",
            Ended.LONG_REPLY: f"its reply had more than {self.reply_bytes:,} bytes",
            Ended.KILLED: "it was killed from outside, as when the machine has no memory left",
        }
        return reasons.get(code)


def guarded(folder: Path, bounds: Bounds) -> None:
    """Fork. The child returns, with pipes of its own as stdin and stdout; this process guards it and then exits."""
    end_with_parent()
    requests, replies = os.pipe(), os.pipe()
    program = os.fork()
    if program:
        os.close(requests[0])
        os.close(replies[1])
        code = Ended.BY_ITSELF
        with suppress(BrokenPipeError):  # the program's pipe, or the pool's
            code = Warden(program, requests[1], replies[0], folder, bounds).watch()
        if code is Ended.BY_ITSELF and _was_killed(program):
            code = Ended.KILLED
        os.kill(program, signal.SIGKILL)  # not reaped yet, so the number is still its own
        _, status = os.waitpid(program, 0)
        os._exit(Ended.LATE if os.waitstatus_to_exitcode(status) == -signal.SIGALRM else code)
    os.dup2(requests[0], 0)
    os.dup2(replies[1], 1)
    for end in (*requests, *replies):
        os.close(end)


def _was_killed(program: int) -> bool:
    """Return whether another process has ended it, which cannot send a signal itself where seccomp is in force. One
    that only closed its pipes has LAST_WORDS_S to say why on stderr.
    """
    until = time.monotonic() + LAST_WORDS_S
    while (ended := os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
        if time.monotonic() > until:
            break
        time.sleep(LOOK_S)
    return ended is not None and (ended.si_code, ended.si_status) == (os.CLD_KILLED, signal.SIGKILL)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    die_with(os.getppid(), signal.SIGKILL)


class Warden:
    """Passes lines from stdin to the program and from the program to stdout."""

    def __init__(self, program: int, requests: int, replies: int, folder: Path, bounds: Bounds) -> None:
        self._program = program
        self._requests = requests
        self._replies = replies
        self._folder = folder
        self._bounds = bounds
        self._to_program = bytearray()
        self._line = bytearray()  # of the program, not complete yet
        self._to_pool = bytearray()
        self._deadline = inf  # of the open request
        for end in (requests, 1):
            os.set_blocking(end, False)

    def watch(self) -> Ended:
        """Until one of the three is gone or a bound is broken. Raises BrokenPipeError as it writes to one that is."""
        while True:
            readable, writable, _ = select.select(
                [*([] if self._to_program else [0]), *([] if self._to_pool else [self._replies])],
                [*([self._requests] if self._to_program else []), *([1] if self._to_pool else [])],
                [],
                LOOK_S if self._deadline < inf else None,
            )
            if 0 in readable and not self._take_request():
                return Ended.BY_ITSELF
            if self._requests in writable:
                del self._to_program[: os.write(self._requests, self._to_program)]
            is_complete = False
            if self._replies in readable:
                if not (piece := os.read(self._replies, PIECE_BYTES)):
                    return Ended.BY_ITSELF
                self._line += piece
                is_complete = piece.endswith(b"\n")
            if self._deadline < inf and (broken := self._broken()) is not None:
                return broken
            if is_complete:
                self._pass_on()
            if 1 in writable:
                del self._to_pool[: os.write(1, self._to_pool)]

    def _take_request(self) -> bool:
        if not (piece := os.read(0, PIECE_BYTES)):
            return False
        if self._deadline == inf:
            self._deadline = time.monotonic() + self._bounds.time_limit_s + GRACE_S
            os.kill(self._program, signal.SIGCONT)
        self._to_program += piece
        return True

    def _pass_on(self) -> None:
        self._to_pool, self._line = self._line, bytearray()
        if self._deadline < inf:
            os.kill(self._program, signal.SIGSTOP)
            self._deadline = inf

    def _broken(self) -> Ended | None:
        if time.monotonic() > self._deadline:
            return Ended.LATE
        if len(self._line) > self._bounds.reply_bytes:
            return Ended.LONG_REPLY
        try:
            files, nbytes = self._usage()
        except OSError:
            return Ended.UNCOUNTABLE
        if files > self._bounds.files:
            return Ended.FILES
        return Ended.BYTES if nbytes > self._bounds.folder_bytes else None

    def _usage(self) -> tuple[int, int]:
        """Files and bytes in the directory; counting ends beyond a bound. Raises OSError."""
        if os.path.ismount(self._folder):  # the sandbox's own tmpfs, which bounds bytes by itself
            size = os.statvfs(self._folder)
            if size.f_files:
                return size.f_files - size.f_ffree - 1, 0
        os.kill(self._program, signal.SIGSTOP)  # nothing moves while it is counted
        os.waitid(os.P_PID, self._program, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            return usage_of(self._folder, self._bounds.files)
        finally:
            os.kill(self._program, signal.SIGCONT)


def usage_of(folder: Path, most: int) -> tuple[int, int]:
    """Files and directories beneath `folder`, and their bytes; counting ends beyond `most`. Raises OSError."""
    files = nbytes = 0
    pending = [str(folder)]
    while pending and files <= most:
        with os.scandir(pending.pop()) as entries:
            for entry in itertools.islice(entries, most + 1 - files):
                files += 1
                nbytes += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return files, nbytes
