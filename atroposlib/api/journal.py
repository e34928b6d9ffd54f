"""The journal: every change of the API's state, on disk before its reply. One SQLite file (WAL), written by one thread.

    event loop ── write(change, bodies) ──▶ thread: as many writes as wait, one transaction, one fsync ──▶ done(None or JournalError)
    start:  open ── changes() in order, bodies() ──▶ the state as it was

    changes   number, change (encoded), its CRC        a snapshot replaces all changes up to its number
    bodies    id of a group, its bytes, their CRC      removed some time after the group has left; `keep_only` removes the rest

A write is whole or absent, whenever the process dies; what fails (a full disk) leaves the file as it was. SQLite's exclusive lock keeps
a second API out. What a change means is not known here.
"""

import contextlib
import queue
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

APPLICATION_ID = 0x41545250  # "ATRP", in the file's header
FORMAT = 1
PAGE_BYTES = 16_384  # groups are large
CHECKPOINT_PAGES = 512  # 8 MiB of log between checkpoints: writes wait while one runs, so it must be short
LOCK_TIMEOUT_S = 5.0  # an API that is just ending still holds the file
MAX_TOGETHER = 256  # writes in one transaction
VACUUM_FROM_BYTES = 64 * 2**20  # free space in the file at start that is given back to the disk

SCHEMA = """
CREATE TABLE IF NOT EXISTS changes (number INTEGER PRIMARY KEY, crc INTEGER NOT NULL, change BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS bodies (id INTEGER PRIMARY KEY, packed INTEGER NOT NULL, crc INTEGER NOT NULL, body BLOB NOT NULL);
"""


class JournalError(Exception):
    """The journal cannot be opened, read or written; the message is one line with the remedy."""


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of one group, as MessagePack (`packed`) or JSON."""

    id: int
    data: bytes
    packed: bool


Done = Callable[[JournalError | None], None]


@dataclass
class _Write:
    """One entry of the writer's queue. `replaces`: the change is a snapshot, and earlier ones go."""

    number: int
    change: bytes
    bodies: Sequence[Body]
    done: Done
    replaces: bool = False


class Journal:
    """An open journal. Raises JournalError from the constructor on; methods but `write` and `close` are for the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._forgotten: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._db = self._open()

    # --- start ------------------------------------------------------------------------------------------------------------

    def changes(self) -> Iterator[tuple[int, bytes]]:
        """(number, change) of all changes, in order."""
        for number, crc, change in self._rows("SELECT number, crc, change FROM changes ORDER BY number"):
            yield number, self._checked(change, crc, f"change {number}")

    def bodies(self) -> Iterator[Body]:
        """All bodies that are there."""
        for identity, packed, crc, body in self._rows("SELECT id, packed, crc, body FROM bodies"):
            yield Body(identity, self._checked(body, crc, f"the body of group {identity}"), bool(packed))

    def keep_only(self, ids: set[int]) -> None:
        """Remove all other bodies, and give the space of many back to the disk."""
        with self._reading():
            others = [(identity,) for (identity,) in self._db.execute("SELECT id FROM bodies") if identity not in ids]
            with self._db:
                self._db.executemany("DELETE FROM bodies WHERE id = ?", others)
            if self._db.execute("PRAGMA freelist_count").fetchone()[0] * PAGE_BYTES > VACUUM_FROM_BYTES:
                self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def _open(self) -> sqlite3.Connection:
        if not self.path.parent.is_dir():
            raise JournalError(f"--journal {self.path}: the folder {self.path.parent} does not exist; create it, or give another path")
        try:
            db = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, check_same_thread=False)
        except sqlite3.Error as error:
            raise JournalError(f"--journal {self.path} cannot be opened ({error}); give another path, or --in-memory") from None
        try:
            self._prepare(db)
        except sqlite3.Error as error:
            db.close()
            raise self._unusable(error) from None
        except JournalError:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA page_size={PAGE_BYTES}")
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL").fetchall()
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA secure_delete=OFF").fetchall()
        db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}").fetchall()
        db.execute(f"PRAGMA journal_size_limit={CHECKPOINT_PAGES * PAGE_BYTES}").fetchall()
        db.execute("BEGIN EXCLUSIVE")
        application, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and (application, version) != (APPLICATION_ID, FORMAT):
            db.rollback()
            raise JournalError(
                f"--journal {self.path} is a database of another kind (application {application:#x}, format {version}; "
                f"expected {APPLICATION_ID:#x}, {FORMAT}); give another path"
            )
        for statement in SCHEMA.strip().splitlines():
            db.execute(statement)
        db.execute(f"PRAGMA application_id={APPLICATION_ID}")
        db.execute(f"PRAGMA user_version={FORMAT}")
        db.commit()

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        with self._reading():
            yield from self._db.execute(query)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _checked(self, content: bytes, crc: int, what: str) -> bytes:
        if zlib.crc32(content) != crc:
            raise JournalError(f"--journal {self.path} is damaged: {what} has other bytes than were written; {self.remedy}")
        return content

    @property
    def remedy(self) -> str:
        """What to do about a damaged file."""
        return f"restore the file, or begin without its groups: `mv {self.path} {self.path}.damaged` (its -wal file too), then start again"

    def _unusable(self, error: sqlite3.Error) -> JournalError:
        if "locked" in str(error):
            return JournalError(
                f"--journal {self.path} is in use by another batching API; end it, or give this one a path of its own with --journal"
            )
        if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
            return JournalError(f"--journal {self.path} cannot be used ({error}); make its folder writable, free space, or use --in-memory")
        return JournalError(f"--journal {self.path} is damaged ({error}); {self.remedy}")

    # --- service ----------------------------------------------------------------------------------------------------------

    def write(self, number: int, change: bytes, bodies: Sequence[Body], done: Done, *, replaces: bool = False) -> None:
        """Queue a write; `done` is called from the writer's thread once it is on disk, in the order of the writes, or has failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
            self._thread.start()
        self._writes.put(_Write(number, change, bodies, done, replaces))

    def forget(self, ids: Iterable[int]) -> None:
        """The bodies of these groups may go, with some later write."""
        for identity in ids:
            self._forgotten.put(identity)

    def close(self) -> None:
        """Finish all writes and close the file."""
        if self._thread is not None:
            self._writes.put(None)
            self._thread.join()
        self._db.close()

    def _work(self) -> None:
        while (first := self._writes.get()) is not None:
            together, last = [first], False
            while len(together) < MAX_TOGETHER and not self._writes.empty():
                write = self._writes.get()
                if write is None:
                    last = True
                    break
                together.append(write)
            self._commit(together)
            if last:
                return

    def _commit(self, together: list[_Write]) -> None:
        """One transaction for all; if that fails one for each, so that what still fits is taken."""
        forgotten = [(self._forgotten.get(),) for _ in range(self._forgotten.qsize())]
        error = self._transaction(together, forgotten)
        if error is not None:
            self.forget(identity for (identity,) in forgotten)
        if error is None or len(together) == 1:
            for write in together:
                write.done(error)
            return
        for write in together:
            write.done(self._transaction([write], []))

    def _transaction(self, writes: list[_Write], forgotten: list[tuple[int]]) -> JournalError | None:
        try:
            with self._db:
                self._db.executemany("DELETE FROM bodies WHERE id = ?", forgotten)
                for write in writes:
                    self._db.executemany(
                        "INSERT INTO bodies (id, packed, crc, body) VALUES (?, ?, ?, ?)",
                        [(body.id, body.packed, zlib.crc32(body.data), body.data) for body in write.bodies],
                    )
                    if write.replaces:
                        self._db.execute("DELETE FROM changes WHERE number <= ?", (write.number,))
                    self._db.execute(
                        "INSERT INTO changes (number, crc, change) VALUES (?, ?, ?)", (write.number, zlib.crc32(write.change), write.change)
                    )
        except sqlite3.Error as error:
            return JournalError(f"the journal {self.path} cannot be written ({error}); free space on its disk, then post again")
        return None
