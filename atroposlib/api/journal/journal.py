"""The journal: every change of the API's state, on disk before its reply. One SQLite file (WAL), written by one
thread.

    event loop ── write(change, bodies) ──▶ thread: one transaction for all that wait ──▶ head ──▶ done(error or None)
    start: open ── changes() in order, bodies() ──▶ the state as it was ── keep_only() ──▶ the file may be written

A write is complete or absent, whenever the process dies. A failed one (a full disk) leaves the file unchanged. Until
`keep_only` the file is only read, so a refused journal is not changed either. The lock on the head keeps out a second
API. This module does not interpret changes.
"""

import contextlib
import queue
import secrets
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atroposlib.api.journal import dead_letters, journal_file
from atroposlib.api.journal.journal_file import FORMAT, AsFound, Body, DeadLetter, JournalError, JournalReader
from atroposlib.api.journal.journal_head import ID_BYTES, Head, HeadInUse, HeadRecord, Mark, chain_start, chained
from atroposlib.files import make_private

MAX_TOGETHER = 256  # writes in one transaction
VACUUM_FROM_BYTES = 64 * 2**20  # free space in the file at start that is given back to the disk

Done = Callable[[JournalError | None], None]


@dataclass
class _Write:
    """One entry of the writer's queue. `replaces`: the change is a snapshot, so earlier changes are removed."""

    number: int
    change: bytes
    bodies: Sequence[Body]
    done: Done
    replaces: bool = False
    letters: Sequence[DeadLetter] = ()


class Journal:
    """An open journal, which `reader` reads until `keep_only`. Raises JournalError from the constructor on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._forgotten: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()  # `close` may run in another thread than `write`
        self._is_closed = False
        self._broken: JournalError | None = None
        self._db: sqlite3.Connection | None = None
        with contextlib.ExitStack() as undo:
            self._head = own(path)
            undo.callback(self._head.close)
            undo.callback(AsFound(path).restore)
            self._make_if_new()
            self.reader = undo.enter_context(contextlib.closing(JournalReader(path)))  # until `keep_only`
            self.reader.expect(self._head.record)
            self._leave_as_found = undo.pop_all()

    # --- start -------------------------------------------------------------------------------------------------------

    def keep_only(self, ids: set[int]) -> None:
        """End reading: from here on the file is written. Remove all other bodies, and give the space of many back to
        the disk.
        """
        self.reader.close()
        with journal_file.reading(self.path):
            for file in (self.path, journal_file.wal_path(self.path), journal_file.shm_path(self.path)):
                if file.exists():  # of a version that let others read prompts and answers
                    make_private(file)
            db = self._db = sqlite3.connect(self.path, timeout=journal_file.LOCK_TIMEOUT_S, check_same_thread=False)
            journal_file.prepare(db)
            self._newest = (
                self.reader.newest if self.reader.format == FORMAT else journal_file.make_tables(db, *self._beginning())
            )
            others = [(identity,) for (identity,) in db.execute("SELECT id FROM bodies") if identity not in ids]
            with db:
                db.executemany("DELETE FROM bodies WHERE id = ?", others)
            if db.execute("PRAGMA freelist_count").fetchone()[0] * journal_file.PAGE_BYTES > VACUUM_FROM_BYTES:
                db.execute("PRAGMA incremental_vacuum").fetchall()
        if error := self._note_newest():
            raise error

    def _make_if_new(self) -> None:
        if self.path.exists():
            return
        record = self._head.record
        if record is not None and record.newest.number:
            raise journal_file.damaged(
                self.path,
                f"the file is missing, and {self._head.path} names {record.newest.number} acknowledged changes",
            )
        if journal_file.wal_path(self.path).exists():
            raise journal_file.damaged(self.path, "the file is missing beside its -wal")
        with journal_file.reading(self.path):
            journal_file.create(self.path, self._beginning()[1])

    def _beginning(self) -> tuple[Mark, bytes]:
        """Return the mark that the first change follows, and the journal's id; from here on the head names both."""
        if self._head.record is None:
            journal_id = secrets.token_bytes(ID_BYTES)
            self._head.reset(HeadRecord(journal_id, chain_start(journal_id)))
        assert self._head.record is not None
        return self._head.record.newest, self._head.record.journal_id

    # --- service -----------------------------------------------------------------------------------------------------

    def write(
        self,
        number: int,
        change: bytes,
        bodies: Sequence[Body],
        done: Done,
        *,
        replaces: bool = False,
        letters: Sequence[DeadLetter] = (),
    ) -> None:
        """Queue a write; `done` is called from the writer's thread once it is on disk, in the order of the writes, or
        has failed. After `close` it has failed at once.
        """
        with self._closing:
            if not self._is_closed:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
                    self._thread.start()
                self._writes.put(_Write(number, change, bodies, done, replaces, letters))
                return
        done(JournalError(f"the journal {self.path} is closed: this process ends; send it again to the next one"))

    def forget(self, ids: Iterable[int]) -> None:
        """Let the bodies of these groups be removed, together with some later write."""
        for identity in ids:
            self._forgotten.put(identity)

    def close(self) -> None:
        """Finish all writes and close the file. One that was only read stays as it was found."""
        with self._closing:
            self._is_closed = True
        if self._thread is not None:
            self._writes.put(None)
            self._thread.join()
        if self._db is None:
            self._leave_as_found.close()
        else:
            self._db.close()
            self._head.close()

    def _work(self) -> None:
        is_open = True
        while is_open:
            together = [self._writes.get()]
            while len(together) < MAX_TOGETHER and not self._writes.empty():
                together.append(self._writes.get())
            is_open = None not in together
            if writes := [write for write in together if write is not None]:
                self._commit(writes)

    def _commit(self, together: list[_Write]) -> None:
        """One transaction for all; if that fails, one for each, so that what still fits is written."""
        forgotten = [(self._forgotten.get(),) for _ in range(self._forgotten.qsize())]
        error = self._transaction(together, forgotten)
        if error is not None:
            self.forget(identity for (identity,) in forgotten)
        one_by_one = error is not None and len(together) > 1
        for write in together:
            write.done(self._transaction([write], []) if one_by_one else error)

    def _transaction(self, writes: list[_Write], forgotten: list[tuple[int]]) -> JournalError | None:
        if self._broken is not None:
            return self._broken
        assert self._db is not None
        newest = self._newest
        try:
            with self._db:
                self._db.executemany("DELETE FROM bodies WHERE id = ?", forgotten)
                for write in writes:
                    newest = self._insert(self._db, write, newest)
        except sqlite3.Error as error:
            return JournalError(
                f"the journal {self.path} cannot be written ({error}); free space on its disk, then post again"
            )
        self._newest = newest
        self._broken = self._note_newest()
        return self._broken

    @staticmethod
    def _insert(db: sqlite3.Connection, write: _Write, newest: Mark) -> Mark:
        crcs = [zlib.crc32(body.data) for body in write.bodies]
        db.executemany(
            "INSERT INTO bodies (id, packed, crc, body) VALUES (?, ?, ?, ?)",
            [(body.id, body.packed, crc, body.data) for body, crc in zip(write.bodies, crcs, strict=True)],
        )
        named = b"".join(journal_file.BODY_CRC.pack(body.id, crc) for body, crc in zip(write.bodies, crcs, strict=True))
        dead_letters.store(db, write.letters)
        mark = chained(newest, write.number, write.change, named)
        if write.replaces and newest.number:
            query = "SELECT hash FROM changes WHERE number <= ? ORDER BY number DESC LIMIT 1"
            mark = Mark(write.number, db.execute(query, (write.number,)).fetchone()[0])
            db.execute("DELETE FROM changes WHERE number <= ?", (write.number,))
        journal_file.insert_change(db, mark, write.replaces or not newest.number, named, write.change)
        return max(newest, mark, key=lambda one: one.number)

    def _note_newest(self) -> JournalError | None:
        record = self._head.record
        assert record is not None
        if record.newest == self._newest:
            return None
        try:
            self._head.write(HeadRecord(record.journal_id, self._newest))
        except OSError as error:
            return JournalError(
                f"{self._head.path} cannot be written ({error.strerror}); repair its disk, then start the API again"
            )
        return None


def own(path: Path) -> Head:
    """The head of a journal, with its lock. Raises JournalError."""
    journal_file.expect_regular_files(path)
    try:
        return Head(path, journal_file.LOCK_TIMEOUT_S)
    except HeadInUse:
        raise journal_file.in_use(path) from None
    except OSError as error:
        raise journal_file.no_use(path, error) from None
