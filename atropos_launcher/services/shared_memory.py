"""Removes what a killed service leaves in /dev/shm. While services run, the launcher records which files they have
mapped since this boot, but for those that were there before the run. Once they are gone, it removes those that no
process has mapped.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from atropos_launcher.services.records import ForeignRecord, Records
from atroposlib.processes.groups import Group
from atroposlib.processes.identity import boot_id
from atroposlib.processes.shared_memory import mapped_files, present_inodes, remove_unused

NOTES = ".shared"  # in the directory of records
Name = Annotated[str, Meta(pattern=r"^[^/]+$")]


class Notes(msgspec.Struct, forbid_unknown_fields=True):
    """Files in /dev/shm by name, with their inodes, and the inodes that were there before the run."""

    boot: str
    files: dict[Name, int]
    before: set[int] = set()


class SharedMemory:
    """The files of one run. Notes are kept on the disk for `atropos stop`, in case the launcher is killed."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._files: dict[str, int] = {}
        self._before: set[int] = set()

    def begin(self) -> None:
        """Before a service starts: what is there is not theirs, though they may map it, as a user's own data."""
        self._before = present_inodes()
        self._write()

    def read(self) -> None:
        """Read what a launcher has noted. Raises ForeignRecord."""
        content = self._records.read_file(NOTES)
        if content is None:
            return
        try:
            notes = msgspec.json.decode(content, type=Notes)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ForeignRecord(self._records.folder / NOTES, "it lists no files of /dev/shm") from None
        if notes.boot == boot_id():
            self._files |= notes.files
            self._before = notes.before

    def note(self, services: Iterable[Group]) -> None:
        """Add what the services have mapped now."""
        files = mapped_files((pid for service in services for pid in service.members()), self._before)
        if not files.items() <= self._files.items():
            self._files |= files
            self._write()

    def remove(self) -> None:
        """Remove what was noted and is mapped by no process."""
        remove_unused(self._files)

    def _write(self) -> None:
        self._records.write_file(NOTES, msgspec.json.encode(Notes(boot_id(), self._files, self._before)))
