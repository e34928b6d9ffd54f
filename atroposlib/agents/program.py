"""One run of a program that we did not write, in a directory of its own, with limits.

    bubblewrap: own processes, all files read-only but for its directory, the network shared (the endpoint is there)
    kernel:     address space and size of a file of each process
    here, every 0.5 s: seconds, processes and bytes of all of it; beyond a limit the whole group is killed

Without bubblewrap the program runs as the user who started the environment.
"""

import asyncio
import os
import resource
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from atroposlib.child_processes.lines import MARK
from atroposlib.child_processes.sandbox import bubblewrap, flatten
from atroposlib.processes import exec_child
from atroposlib.processes.async_child import start_group
from atroposlib.processes.exit_words import exit_words
from atroposlib.processes.groups import KILL_S, Group, Marked, end_groups, left_after
from atroposlib.processes.identity import descendants

LOOKED_EVERY_S = 0.5
GRACE_S = 1.0
ENTRY_BYTES = 4096  # what the smallest file and a directory count, as they take that much of a disk
OUTPUT_BYTES = 1 << 20  # of what it printed, the last that is read
NAMESPACES = ("--unshare-user-try", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--die-with-parent")
INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")


@dataclass(frozen=True)
class ProgramLimits:
    """What one run may use."""

    seconds: float
    memory_bytes: int  # address space of each process
    folder_bytes: int
    processes: int


@dataclass(frozen=True)
class Ran:
    """How a run ended. `broken` is the limit that it broke, None if it broke none."""

    status: int
    output: str
    errors: str
    broken: str | None

    def why(self) -> str | None:
        """Why it failed, in a line; None if it did not."""
        last = self.errors.strip().rpartition("\n")[2][-300:]
        if self.broken is not None:
            return self.broken
        return f"{exit_words(self.status)}{f': {last}' if last else ''}" if self.status else None


@asynccontextmanager
async def area_of_programs() -> AsyncIterator[Path]:
    """A directory for those of programs. At its end it is removed, whatever they have made there."""
    area = tempfile.TemporaryDirectory(prefix="atropos-agent-", ignore_cleanup_errors=True)
    try:
        yield Path(area.name)
    finally:
        await asyncio.to_thread(_remove, area)


def _remove(area: "tempfile.TemporaryDirectory[str]") -> None:
    flatten(Path(area.name))
    area.cleanup()


def search_path() -> str:
    """Where a program is looked for: this Python's directory, then the PATH."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


async def run_program(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    limits: ProgramLimits,
    *,
    around: Sequence[str],
) -> Ran:
    """Run `command` in `folder`, and end all that it has started. Its output goes into files beside `folder`. `around`
    are the words that confine it. Raises OSError where it cannot start.
    """
    words = [*around, *command]
    shown = {name: os.environ[name] for name in INHERITED if name in os.environ}
    mark = secrets.token_hex(16)
    whole = {**shown, "PATH": search_path(), "HOME": str(folder), "TMPDIR": str(folder), **environment, MARK: mark}
    out, err = (folder.with_name(f"{folder.name}.{name}") for name in ("out", "err"))
    with out.open("w+b") as output, err.open("w+b") as errors:
        process, group = await start_group(
            *exec_child.words(signal.SIGKILL, words),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=whole,
            cwd=folder,
        )
        started = Started(process.pid, group, Marked(MARK, mark))
        try:
            resource.prlimit(process.pid, resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limits.folder_bytes, limits.folder_bytes))
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            _release(process)
            broken = await _watched(process, started, folder, limits)
        finally:
            await asyncio.to_thread(started.end)
            status = await process.wait()
        return Ran(status, _tail(output), _tail(errors), broken)


@dataclass(frozen=True)
class Started:
    """A program and all that it has started, also in sessions of its own making."""

    pid: int
    group: Group
    marked: Marked

    def count(self) -> int:
        """The processes, and those that have ended but still take a number."""
        return len({*self.group.members(), *self.marked.members(), *descendants(self.pid)})

    def end(self) -> None:
        """End all of it; where it is in bubblewrap, the kernel does so with the first process."""
        end_groups([self.group], GRACE_S)
        left_after([self.marked], KILL_S, signal.SIGKILL)


def _release(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()


async def _watched(
    process: asyncio.subprocess.Process, started: Started, folder: Path, limits: ProgramLimits
) -> str | None:
    """Wait for the end of the program. Returns the limit that it breaks before."""
    deadline = time.monotonic() + limits.seconds
    waiting = asyncio.create_task(process.wait())
    try:
        while not (await asyncio.wait([waiting], timeout=LOOKED_EVERY_S))[0]:
            if time.monotonic() > deadline:
                return f"it took longer than {limits.seconds:g} s"
            if (count := await asyncio.to_thread(started.count)) > limits.processes:
                return f"it had {count} processes, and may have {limits.processes}"
            try:
                size = await asyncio.to_thread(_size, folder, limits.folder_bytes)
            except OSError as error:
                return f"it made a directory whose files cannot be counted: {error.strerror}"
            if size > limits.folder_bytes:
                return f"it filled its directory with more than {limits.folder_bytes / 1e6:g} MB"
        return None
    finally:
        waiting.cancel()


def confinement(folder: Path) -> list[str]:
    """The words before a command that may write in `folder` alone; none where the machine grants no bubblewrap."""
    program = bubblewrap()
    if program is None:
        return []
    shown = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")
    return [program, *NAMESPACES, *shown, "--bind", str(folder), str(folder), "--chdir", str(folder), "--"]


def _size(folder: Path, enough: int) -> int:
    """Bytes in `folder`, however deep, or some number above `enough`. Raises OSError for a directory that hides what is
    in it.
    """
    total, pending = 0, [str(folder)]
    while pending and total <= enough:
        with suppress(FileNotFoundError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    total += max(entry.stat(follow_symlinks=False).st_size, ENTRY_BYTES)
                if total > enough:
                    break
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return total


def _tail(file: IO[bytes]) -> str:
    """The last of what it printed. `file` is as it was opened: another may be at its path by now."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - OUTPUT_BYTES))
    return file.read(OUTPUT_BYTES).decode(errors="replace")
