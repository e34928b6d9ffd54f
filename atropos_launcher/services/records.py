"""Records of the processes of a run, in files that outlive its launcher: runs/NAME/pids/.

    pids/.lock          locked by the process that may change the rest: the launcher, or `atropos stop`
    pids/launcher       the launcher itself
    pids/SERVICE        one for each service
    pids/.shared        their files in /dev/shm (shared_memory.py)

A record is used only if it identifies the same process: same pid, same start, same boot (processes.py). A run's
directory may come from somebody else, so records that no launcher of this user wrote are refused: they could name our
processes.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from atropos_launcher.service import LAUNCHER, NAME
from atroposlib.errors import AtroposError
from atroposlib.files import open_regular
from atroposlib.logs import escape
from atroposlib.processes.groups import Group
from atroposlib.processes.identity import boot_id, first_ticks, is_alive, is_stopped
from atroposlib.processes.lock_files import Held, take_lock

FOLDER = "pids"
LOCK = ".lock"
MAX_BYTES = 1 << 20
HIDDEN = re.compile(r"\.[A-Za-z0-9_.-]{1,70}")  # the lock, the notes on shared memory, a record that is being written


class ForeignRecord(AtroposError):
    """A file that no launcher of this user writes."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{escape(str(path))} was not written by a launcher ({why}); remove it by hand")


class RunInUse(AtroposError):
    """Another launcher runs this run, or another `atropos stop` ends it."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process that leads a group and a session of its own; the launcher's shares those of its shell."""

    name: Annotated[str, Meta(pattern=f"^{NAME.pattern}$")]
    pid: Annotated[int, Meta(gt=1, lt=1 << 31)]
    start: Annotated[int, Meta(ge=0, lt=1 << 62)]  # clock ticks after boot
    boot: Annotated[str, Meta(pattern="^[0-9a-f-]{36}$")]
    url: Annotated[str, Meta(pattern=r"^(http://[A-Za-z0-9.:_-]+(/[A-Za-z0-9._/-]*)?)?$")] = ""  # of its health

    @classmethod
    def of(cls, name: str, pid: int, url: str = "") -> Self:
        """Record a process that is ours, or our child: it cannot be gone."""
        start = first_ticks(pid)
        if start is None:
            raise ProcessLookupError(errno.ESRCH, f"no process {pid}")
        return cls(name=name, pid=pid, start=start, boot=boot_id(), url=url)

    @property
    def is_alive(self) -> bool:
        return self.boot == boot_id() and is_alive(self.pid, self.start)

    @property
    def group(self) -> Group:
        return Group(self.pid, self.start, self.boot)

    @property
    def is_stopped(self) -> bool:
        """Return whether a process of the service's group is stopped (SIGSTOP)."""
        return self.is_alive and any(map(is_stopped, self.group.members()))


class Records:
    """The records of one run. Reading needs no lock."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / FOLDER
        self._lock: int | None = None

    def exist(self) -> bool:
        return os.path.lexists(self.folder)

    def read(self) -> dict[str, Record]:
        """All records by name, in the order of their start. Raises ForeignRecord."""
        self._check_folder()
        records = (self._read(path) for path in self._files() if not path.name.startswith("."))
        return {record.name: record for record in sorted((one for one in records if one), key=lambda one: one.start)}

    def services(self) -> list[Record]:
        return [record for name, record in self.read().items() if name != LAUNCHER]

    def launcher(self) -> Record | None:
        """The launcher, if it runs."""
        record = self.read().get(LAUNCHER)
        return record if record and record.is_alive else None

    def claim(self) -> None:
        """Only we start services and change records until `release`. Raises RunInUse, and ForeignRecord."""
        while self._lock is None:
            with suppress(FileExistsError):
                self.folder.mkdir(parents=True)
            self._check_folder()
            with suppress(FileNotFoundError):  # who had the lock has just removed the directory
                self._lock = self._locked()

    def _locked(self) -> int:
        """The descriptor of the lock."""
        try:
            descriptor = take_lock(self.folder / LOCK)
        except Held:
            raise RunInUse(self._in_use()) from None
        # what is left to go by where the file system has no locks
        if (other := self.launcher()) and other.pid != os.getpid():
            os.close(descriptor)
            raise RunInUse(self._in_use())
        return descriptor

    def _in_use(self) -> str:
        launcher = self.launcher()
        who = f"by its launcher (pid {launcher.pid})" if launcher else "by another command"
        shown = escape(str(self.run_dir))
        return f"{shown} is in use {who}; `atropos stop {shown}` ends what runs there"

    def write(self, record: Record) -> None:
        self.write_file(record.name, msgspec.json.encode(record))

    def write_file(self, name: str, content: bytes) -> None:
        """A file of the directory, old or new but never half of it."""
        unfinished = self.folder / f".{name.removeprefix('.')}.new"
        with open_regular(unfinished, "wb") as file:
            file.write(content)
        os.replace(unfinished, self.folder / name)

    def read_file(self, name: str) -> bytes | None:
        """None if there is none. Raises ForeignRecord."""
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ForeignRecord(path, "it is a link") from None
        with open(descriptor, "rb") as file:
            self._check(path, os.fstat(descriptor))
            return file.read(MAX_BYTES)

    def remove(self, name: str) -> None:
        """Remove the record of a service that has ended."""
        (self.folder / name).unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the directory and give it up: nothing of the run is left."""
        if self.exist():
            self._check_folder()
            for path in sorted(self._files(), key=lambda path: path.name == LOCK):  # the lock last
                path.unlink(missing_ok=True)
            with suppress(OSError):  # the next launcher is in it already
                self.folder.rmdir()
        self.release()

    def release(self) -> None:
        """Give the directory up as it is."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _files(self) -> Iterator[Path]:
        names: list[str] = []
        with suppress(FileNotFoundError):  # the run has just ended
            names = os.listdir(self.folder)
        for name in names:
            path = self.folder / name
            if not (NAME.fullmatch(name) or HIDDEN.fullmatch(name)):
                raise ForeignRecord(path, "its name")
            with suppress(FileNotFoundError):  # a record that was being written
                self._check(path, path.lstat())
                yield path

    def _read(self, path: Path) -> Record | None:
        content = self.read_file(path.name)
        if content is None:
            return None
        try:
            record = msgspec.json.decode(content, type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ForeignRecord(path, escape(str(error))) from None
        if record.name != path.name:
            raise ForeignRecord(path, f"it is the record of {record.name}")
        return record

    def _check_folder(self) -> None:
        with suppress(FileNotFoundError):
            status = self.folder.lstat()
            if not stat.S_ISDIR(status.st_mode):
                raise ForeignRecord(self.folder, "it is a link" if stat.S_ISLNK(status.st_mode) else "no directory")
            if status.st_uid != os.geteuid():
                raise ForeignRecord(self.folder, "it belongs to another user")

    @staticmethod
    def _check(path: Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ForeignRecord(path, "it is a link" if stat.S_ISLNK(status.st_mode) else "it is not a regular file")
        if status.st_uid != os.geteuid():
            raise ForeignRecord(path, "it belongs to another user")
