"""`NAME.head` names the newest change of a journal, outside SQLite, so that a truncated journal is noticed.

    commit to SQLite (fsync) ──▶ Head.write(newest) ──▶ the replies

A head is at most as new as its journal, and at least as new as every reply. It has two records of fixed size that are
written alternately, in place: an interrupted write leaves the other one intact, and a full disk does not matter. A
process that has a journal open for writing holds the lock on its head.
"""

import errno
import fcntl
import os
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

ID_BYTES = 16
HASH_BYTES = 32
RECORD = struct.Struct(f"<8s{ID_BYTES}sQ{HASH_BYTES}s")  # magic, id, number, hash; a CRC of these follows
CRC = struct.Struct("<I")
MAGIC = b"ATRPhead"
SLOT_BYTES = 512  # a sector, so that writing one slot cannot damage the other
LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Mark:
    """A change's number, and the hash over it and all changes before it."""

    number: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """The newest change of the journal with this id."""

    journal_id: bytes
    newest: Mark


class HeadInUse(Exception):
    """Another process has the journal open."""


def head_path(journal: Path) -> Path:
    """Return the path of a journal's head."""
    return Path(f"{journal}.head")


def chain_start(journal_id: bytes) -> Mark:
    """The mark that precedes the first change of a journal."""
    return Mark(0, blake2b(journal_id, digest_size=HASH_BYTES).digest())


def chained(before: Mark, number: int, change: bytes, bodies: bytes) -> Mark:
    """The mark of a change that follows `before`."""
    digest = blake2b(before.hash, digest_size=HASH_BYTES)
    digest.update(struct.pack("<QQQ", number, len(change), len(bodies)))
    digest.update(change)
    digest.update(bodies)
    return Mark(number, digest.digest())


def sync_folder(file: Path) -> None:
    """Put the names in a file's directory on disk."""
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(folder)
    os.close(folder)


def read_head(journal: Path) -> HeadRecord | None:
    """The newest whole record; None if there is none. Raises OSError for a head that cannot be read
    (FileNotFoundError: none there).
    """
    return _newest_record(head_path(journal).read_bytes())


class Head:
    """The head of a journal that this process owns until `close`. Raises HeadInUse, OSError."""

    def __init__(self, journal: Path, patience_s: float) -> None:
        self.path = head_path(journal)
        self._file = self._locked(patience_s)
        content = os.pread(self._file, 2 * SLOT_BYTES, 0)
        self.record = _newest_record(content)
        self._slot = 0 if self.record is None or _parsed(content[:SLOT_BYTES]) != self.record else 1

    def write(self, record: HeadRecord) -> None:
        """Put a record in place of the older one. It survives the death of this process at once, and a power failure
        once the kernel has written it back: a head that is behind its journal loses nothing, and a second wait for the
        disk would halve the speed.
        """
        if not os.fstat(self._file).st_nlink:  # the next start would take a journal without a head for a new one
            raise OSError(errno.ENOENT, "somebody removed it while the journal was in use")
        packed = RECORD.pack(MAGIC, record.journal_id, record.newest.number, record.newest.hash)
        packed = (packed + CRC.pack(zlib.crc32(packed))).ljust(SLOT_BYTES, b"\0")
        for slot in (0, 1) if self.record is None else (self._slot,):
            if os.pwrite(self._file, packed, slot * SLOT_BYTES) != SLOT_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.record, self._slot = record, 1 - self._slot

    def reset(self, record: HeadRecord) -> None:
        """Put a record in place of both, newer ones included."""
        self.record = None
        self.write(record)
        os.fsync(self._file)
        sync_folder(self.path)

    def close(self) -> None:
        """Release the lock, also where the disk fails: a head that is behind its journal loses nothing. Remove a head
        that this process created and never wrote.
        """
        with suppress(OSError):
            if self.created and self.record is None:
                self.path.unlink(missing_ok=True)
            os.fsync(self._file)
        os.close(self._file)

    def _locked(self, patience_s: float) -> int:
        end = time.monotonic() + patience_s
        while True:
            self.created = not os.path.lexists(self.path)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(file)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if time.monotonic() > end:
                    raise HeadInUse from None
                time.sleep(LOCK_POLL_S)
                continue
            if os.fstat(file).st_nlink:
                with suppress(PermissionError):  # another user's
                    os.fchmod(file, 0o600)
                return file
            os.close(file)  # its owner removed it just now


def _newest_record(content: bytes) -> HeadRecord | None:
    records = [_parsed(content[start : start + SLOT_BYTES]) for start in (0, SLOT_BYTES)]
    return max(
        (record for record in records if record is not None), key=lambda record: record.newest.number, default=None
    )


def _parsed(slot: bytes) -> HeadRecord | None:
    record, crc = slot[: RECORD.size], slot[RECORD.size : RECORD.size + CRC.size]
    if len(crc) < CRC.size or CRC.unpack(crc)[0] != zlib.crc32(record):
        return None
    magic, journal_id, number, digest = RECORD.unpack(record)
    return HeadRecord(journal_id, Mark(number, digest)) if magic == MAGIC else None
