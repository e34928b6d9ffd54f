"""The file of a journal, and reading it without changing a byte. Its tables:

    changes      number, change (encoded), the ids and CRCs of its bodies, a hash over these and the hash of the
                 change before, a CRC over the whole row. A snapshot replaces all changes up to its number and keeps
                 the hash of the last of them
    bodies       id of a group, its bytes, their CRC      removed some time after the group has left
    dead_letters groups that cannot be trained on, with the reason
    identity     the journal's id, which its head names too

`JournalReader` sees the file as it is at one moment, also while an API writes it. It is opened read-only: SQLite then
recovers and checkpoints nothing, so a damaged journal is not changed.
"""

import contextlib
import os
import sqlite3
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from atroposlib.api.journal.journal_head import HeadRecord, Mark, chain_start, chained, head_path, sync_folder
from atroposlib.errors import AtroposError
from atroposlib.files import make_private
from atroposlib.wire.batching import GroupRequirements

APPLICATION_ID = 0x41545250  # "ATRP", in the file's header
FORMAT = 2
NO_FORMAT = 0  # of a database without a table
UNCHAINED_FORMAT = 1  # without hashes and head; it is brought to FORMAT when an API opens it
LOCK_TIMEOUT_S = 5.0  # an API that is just ending still holds the file
PAGE_BYTES = 16_384  # groups are large
CHECKPOINT_PAGES = 512  # 8 MiB of log between checkpoints: writes wait while one runs, so it must be short
BODY_CRC = struct.Struct("<QI")  # a body's id and CRC, in its change's row
OR_ACCEPT_LOSS = "; run-api --journal-accept-loss keeps copies and continues with what can be read"  # of the API's own

CHANGES = (
    "CREATE TABLE changes (number INTEGER PRIMARY KEY, snapshot INTEGER NOT NULL, crc INTEGER NOT NULL, "
    "hash BLOB NOT NULL,\n    bodies BLOB NOT NULL, change BLOB NOT NULL)"
)
BODIES = (
    "CREATE TABLE bodies (id INTEGER PRIMARY KEY, packed INTEGER NOT NULL, crc INTEGER NOT NULL, body BLOB NOT NULL)"
)
DEAD_LETTERS = (
    "CREATE TABLE dead_letters (id INTEGER PRIMARY KEY, at REAL NOT NULL, env_id INTEGER, "
    "environment TEXT NOT NULL,\n    reason TEXT NOT NULL, packed INTEGER NOT NULL, crc INTEGER NOT NULL, "
    "body BLOB NOT NULL)"
)
IDENTITY = "CREATE TABLE identity (id BLOB NOT NULL)"


class JournalError(AtroposError):
    """The journal cannot be opened, read or written; the message is one line with the remedy."""


class JournalDamaged(JournalError):
    """The journal does not hold all that was acknowledged, or other bytes than were written."""


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of one group, as MessagePack (`packed`) or JSON. `checked`, the needs that it meets, is not on disk."""

    id: int
    data: bytes
    packed: bool
    checked: GroupRequirements | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group that could not be trained on. `at` is in seconds since 1970, `body` has the letter's own id."""

    at: float
    env_id: int | None
    environment: str
    reason: str
    body: Body


def insert_change(db: sqlite3.Connection, mark: Mark, snapshot: bool, bodies: bytes, change: bytes) -> None:
    """Add a row to the table of changes."""
    db.execute(
        "INSERT INTO changes (number, snapshot, crc, hash, bodies, change) VALUES (?, ?, ?, ?, ?, ?)",
        (mark.number, int(snapshot), _row_crc(mark, int(snapshot), bodies, change), mark.hash, bodies, change),
    )


def create(path: Path, journal_id: bytes) -> None:
    """Make an empty journal, under another name first: one whose making was cut off is not a journal. Raises
    sqlite3.Error, OSError.
    """
    unfinished = Path(f"{path}.new")
    for name in (unfinished, wal_path(unfinished), shm_path(unfinished), Path(f"{unfinished}-journal")):
        name.unlink(missing_ok=True)
    make_private(unfinished)  # SQLite gives its log and index the mode of the database
    with contextlib.closing(sqlite3.connect(unfinished)) as db:
        prepare(db)
        make_tables(db, chain_start(journal_id), journal_id)
    os.replace(unfinished, path)
    sync_folder(path)


def prepare(db: sqlite3.Connection) -> None:
    """Set up a connection that writes."""
    db.execute(f"PRAGMA page_size={PAGE_BYTES}")
    db.execute("PRAGMA auto_vacuum=INCREMENTAL")
    db.execute("PRAGMA journal_mode=WAL").fetchall()
    db.execute("PRAGMA synchronous=FULL")
    db.execute("PRAGMA secure_delete=OFF").fetchall()
    db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}").fetchall()
    db.execute(f"PRAGMA journal_size_limit={CHECKPOINT_PAGES * PAGE_BYTES}").fetchall()


def make_tables(db: sqlite3.Connection, newest: Mark, journal_id: bytes) -> Mark:
    """The tables of FORMAT, in place of an older format's, whose changes are chained to `newest`; the newest of
    these.
    """
    db.execute("BEGIN EXCLUSIVE")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == UNCHAINED_FORMAT:
        db.execute("ALTER TABLE changes RENAME TO unchained")
    for statement in (CHANGES, DEAD_LETTERS, IDENTITY, *([BODIES] if version == NO_FORMAT else [])):
        db.execute(statement)
    db.execute("INSERT INTO identity (id) VALUES (?)", (journal_id,))
    if version == UNCHAINED_FORMAT:
        for number, change in db.execute("SELECT number, change FROM unchained ORDER BY number").fetchall():
            first, newest = not newest.number, chained(newest, number, change, b"")
            insert_change(db, newest, first, b"", change)
        db.execute("DROP TABLE unchained")
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
    db.execute(f"PRAGMA user_version={FORMAT}")
    db.commit()
    return newest


def expect_regular_files(path: Path) -> None:
    """Raise JournalError unless every file of the journal is a regular file or absent: links, devices and pipes are
    left alone.
    """
    if not path.parent.is_dir():
        raise JournalError(
            f"--journal {path}: the directory {path.parent} does not exist; create it, or give another path"
        )
    for name in (path, wal_path(path), shm_path(path), Path(f"{path}-journal"), head_path(path)):
        try:
            mode = os.lstat(name).st_mode
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise JournalError(f"--journal {path} cannot be used ({error}); give another path") from None
        if not stat.S_ISREG(mode):
            # by the first letter that `ls -l` shows
            kind = {"l": "link", "d": "directory", "p": "pipe", "s": "socket"}.get(stat.filemode(mode)[0], "device")
            raise JournalError(
                f"--journal {path} cannot be used: {name} is a {kind}, not a regular file; give another path"
            )


def wal_path(path: Path) -> Path:
    """SQLite's write-ahead log."""
    return Path(f"{path}-wal")


def shm_path(path: Path) -> Path:
    """SQLite's index of the log, which it makes again from it."""
    return Path(f"{path}-shm")


def damaged(path: Path, what: str) -> JournalDamaged:
    """An error that says what is wrong, and what to do."""
    return JournalDamaged(
        f"--journal {path} is damaged: {what}; nothing was changed: restore {path}, its -wal and its .head from a"
        f" backup, or give another path{OR_ACCEPT_LOSS}"
    )


class JournalReader:
    """See the module's head. Methods raise JournalError; the first read to the last see the same moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        expect_regular_files(path)
        try:
            if path.stat().st_size == 0:  # SQLite would take it for a new one, and delete its log
                raise damaged(path, "the file is empty")
            self._db = sqlite3.connect(
                f"file:{quote(os.fsencode(path.absolute()))}?mode=ro", uri=True, timeout=LOCK_TIMEOUT_S
            )
        except (OSError, sqlite3.Error) as error:
            raise JournalError(f"--journal {path} cannot be opened ({error}); give another path") from None
        self._db.text_factory = bytes  # a damaged text must not fail to decode
        self._head: HeadRecord | None = None
        self._crcs: dict[int, int] = {}  # of bodies, as the changes say
        self.newest = Mark(0, b"")  # once `changes` has come to its end
        with contextlib.ExitStack() as undo:
            undo.callback(self._db.close)
            with reading(path):
                self._db.execute("BEGIN")
                application, self.format = (
                    self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
                )
                tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and (application != APPLICATION_ID or self.format not in (FORMAT, UNCHAINED_FORMAT)):
                raise JournalError(
                    f"--journal {path} is a database of another kind (application {application:#x}, format"
                    f" {self.format}; expected {APPLICATION_ID:#x}, {FORMAT}); give another path"
                )
            # a log that is cut off in the middle of what was checkpointed leaves pages of two moments, whose rows may
            # all look right
            ((found,),) = self._rows("PRAGMA quick_check(1)")
            if found != b"ok":
                raise self.damaged(" ".join(found.decode(errors="replace").split()))
            self.id = self._identity() if self.format == FORMAT else None
            undo.pop_all()

    def close(self) -> None:
        """Let the moment go."""
        self._db.close()

    def expect(self, head: HeadRecord | None) -> None:
        """Have `changes` raise JournalDamaged unless the newest change that was acknowledged is there."""
        if head is None and self.id is not None:
            raise self.damaged(f"{head_path(self.path)}, which names its newest change, is missing or damaged")
        if head is not None and head.newest.number and head.journal_id != self.id:
            raise self.damaged(f"{head_path(self.path)} belongs to another journal")
        self._head = head

    def changes(self) -> Iterator[tuple[int, bytes]]:
        """(number, change) of all changes, in order."""
        if self.format == UNCHAINED_FORMAT:
            for number, crc, change in self._rows("SELECT number, crc, change FROM changes ORDER BY number"):
                yield number, self._checked(change, crc, f"change {number}")
        if self.id is None:
            return
        newest, seen, first = chain_start(self.id), False, None
        for number, snapshot, crc, digest, bodies, change in self._rows(
            "SELECT number, snapshot, crc, hash, bodies, change FROM changes ORDER BY number"
        ):
            if not all(isinstance(value, bytes) for value in (digest, bodies, change)):
                raise self.damaged(f"change {number} has other bytes than were written")
            mark = Mark(number, digest)
            if crc != _row_crc(mark, snapshot, bodies, change) or len(bodies) % BODY_CRC.size:
                raise self.damaged(f"change {number} has other bytes than were written")
            if bool(snapshot) != (first is None) or (not snapshot and chained(newest, number, change, bodies) != mark):
                raise self.damaged(f"change {number} does not follow the one before it ({newest.number})")
            first = number if first is None else first
            newest, seen = mark, seen or (self._head is not None and self._head.newest.hash == digest)
            self._crcs.update(BODY_CRC.iter_unpack(bodies))
            yield number, change
        self.newest = newest
        if self._head is not None and not seen:
            self._expect_among(self._head.newest.number, newest, first)

    def bodies(self, *, skip_damaged: bool = False) -> Iterator[Body]:
        """All bodies that are there. To be called after `changes`."""
        if self.format == NO_FORMAT:
            return
        for identity, packed, crc, body in self._rows("SELECT id, packed, crc, body FROM bodies"):
            whole = isinstance(body, bytes) and zlib.crc32(body) == crc == self._crcs.get(identity, crc)
            if whole:
                yield Body(identity, body, bool(packed))
            elif not skip_damaged:
                raise self.damaged(f"the body of group {identity} has other bytes than were written")

    def dead_letters(self, newest: int | None = None) -> Iterator[DeadLetter]:
        """The groups that were set aside, or so many of the newest; oldest first."""
        if self.id is None:
            return
        limit = "" if newest is None else f" ORDER BY id DESC LIMIT {newest:d}"
        columns = "id, at, env_id, environment, reason, packed, crc, body"
        for identity, at, env_id, environment, reason, packed, crc, content in self._rows(
            f"SELECT {columns} FROM (SELECT {columns} FROM dead_letters{limit}) ORDER BY id"
        ):
            body = Body(identity, self._checked(content, crc, f"dead letter {identity}"), bool(packed))
            fields = ((at, float), (env_id, int | None), (environment, bytes), (reason, bytes))
            if not all(isinstance(value, kind) for value, kind in fields):
                raise self.damaged(f"dead letter {identity} has other bytes than were written")
            yield DeadLetter(at, env_id, environment.decode(errors="replace"), reason.decode(errors="replace"), body)

    def copy_to(self, path: Path) -> None:
        """Write the file as it is at this moment to another path."""
        make_private(path)
        with contextlib.closing(sqlite3.connect(path)) as copy, reading(self.path):
            self._db.backup(copy)

    def damaged(self, what: str) -> JournalDamaged:
        """An error that says what is wrong, and what to do."""
        return damaged(self.path, what)

    def _identity(self) -> bytes:
        rows = list(self._rows("SELECT id FROM identity"))
        if len(rows) != 1 or not isinstance(rows[0][0], bytes):
            raise self.damaged("it has no id")
        return bytes(rows[0][0])

    def _expect_among(self, acknowledged: int, newest: Mark, first: int | None) -> None:
        """The head names no change of the file: right before the first, and if a snapshot has replaced it since."""
        if acknowledged > newest.number:
            lost = acknowledged - newest.number
            raise self.damaged(
                f"it ends with change {newest.number}, and {head_path(self.path)} names {acknowledged} "
                f"as acknowledged: {lost} change{'s are' if lost > 1 else ' is'} lost"
            )
        if first is not None and acknowledged >= first:
            raise self.damaged(
                f"its change {acknowledged} is not the one that was acknowledged ({head_path(self.path)})"
            )

    def _checked(self, content: object, crc: object, what: str) -> bytes:
        if not isinstance(content, bytes) or zlib.crc32(content) != crc:
            raise self.damaged(f"{what} has other bytes than were written")
        return content

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        with reading(self.path):
            yield from self._db.execute(query)


class AsFound:
    """Restores what SQLite leaves beside a journal that was only read. For the owner of the journal's lock."""

    def __init__(self, path: Path) -> None:
        self._wal, self._shm = wal_path(path), shm_path(path)
        self._had_wal = self._wal.exists()
        self._index = self._shm.read_bytes() if self._shm.exists() else None

    def restore(self) -> None:
        """Put it back; another reader keeps what it has mapped."""
        if not self._had_wal and self._wal.exists() and not self._wal.stat().st_size:
            self._wal.unlink()
        if self._index is None:
            self._shm.unlink(missing_ok=True)
        elif self._shm.read_bytes() != self._index:
            other = Path(f"{self._shm}.new")
            other.write_bytes(self._index)
            other.replace(self._shm)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what SQLite and the system say into a JournalError."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise in_use(path) from None
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_PERM")) or (
            name.startswith("SQLITE_IOERR") and name != "SQLITE_IOERR_SHORT_READ"
        ):
            raise no_use(path, error) from None
        raise damaged(path, str(error)) from None
    except OSError as error:
        raise no_use(path, error) from None


def no_use(path: Path, error: Exception) -> JournalError:
    """The system refuses."""
    return JournalError(
        f"--journal {path} cannot be used ({error}); make its directory writable, free space, or give another path"
    )


def in_use(path: Path) -> JournalError:
    """Another process has the journal open."""
    return JournalError(
        f"--journal {path} is in use by another process; end it, or give this one a path of its own with --journal"
    )


def _row_crc(mark: Mark, snapshot: int, bodies: bytes, change: bytes) -> int:
    return zlib.crc32(change, zlib.crc32(bodies, zlib.crc32(b"%d %r %s" % (mark.number, snapshot, mark.hash))))
