"""The groups that the batching API has set aside, out of its journal (rollouts.db), which stays as it is.

SQLite reads a journal in write-ahead mode only with an index file beside it, and would make one. So a journal without
one is opened as immutable, which is right when no API has it open.
"""

import math
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from atroposlib.view.run_data.files import opened
from atroposlib.view.run_data.rows import Sample, read_sample

JOURNAL = "rollouts.db"
LOCK_TIMEOUT_S = 0.5
READ_S = 2.0  # of one request
REASON = 1000  # characters
MAX_GROUP_BYTES = 32 << 20
COLUMNS = f"id, at, environment, reason, packed, CASE WHEN length(body) <= {MAX_GROUP_BYTES} THEN body END"


@dataclass(frozen=True)
class Letter:
    """A group that was set aside; `group` is None if its bytes are damaged."""

    id: int
    at: float
    environment: str
    reason: str
    group: Sample | None


class CannotRead(Exception):
    """The journal cannot be read now; the message says why."""


def letters(
    run: Path, q: str, environment: str | None, offset: int, limit: int, oldest: bool
) -> tuple[int, list[Letter]]:
    """Return how many letters match, and some of them without their groups. `q` is looked for in reasons and groups.
    Raises CannotRead.
    """
    where: list[str] = ["1"]
    values: list[object] = []
    if q:
        where.append("(instr(lower(reason), ?) OR instr(CAST(body AS BLOB), CAST(? AS BLOB)))")
        values += [q.lower(), q]
    if environment is not None:
        where.append("environment = ?")
        values.append(environment)
    condition = f"FROM dead_letters WHERE {' AND '.join(where)}"
    order = f"ORDER BY id {'ASC' if oldest else 'DESC'} LIMIT ? OFFSET ?"
    with _reading(run) as db:
        if db is None:
            return 0, []
        (total,) = db.execute(f"SELECT count(*) {condition}", values).fetchone()
        found = db.execute(f"SELECT {COLUMNS} {condition} {order}", [*values, limit, offset])
        return int(total), [_letter(*row) for row in found]


def letter(run: Path, number: int) -> Letter | None:
    """One letter with its group. Raises CannotRead."""
    with _reading(run) as db:
        query = f"SELECT {COLUMNS} FROM dead_letters WHERE id = ?"
        row = None if db is None else db.execute(query, (number,)).fetchone()
        return None if row is None else _letter(*row)


def _letter(number: object, at: object, environment: object, reason: object, packed: object, body: object) -> Letter:
    identity = number if isinstance(number, int) else 0  # of a table that somebody else has made
    seconds = float(at) if isinstance(at, int | float) and math.isfinite(at) else 0.0
    return Letter(identity, seconds, _text(environment), _text(reason)[:REASON], _group(bool(packed), body))


def _group(packed: bool, body: object) -> Sample | None:
    if not isinstance(body, bytes):
        return None
    try:
        data = msgspec.json.encode(msgspec.msgpack.decode(body)) if packed else body
        return read_sample(data)
    except (ValueError, RecursionError, TypeError):
        return None


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


@contextmanager
def _reading(run: Path) -> Iterator[sqlite3.Connection | None]:
    """The journal; None if there is none yet."""
    path = run / JOURNAL
    try:
        with opened(path):
            pass
        for beside in ("-wal", "-shm"):
            if (other := path.with_name(JOURNAL + beside)).is_symlink():
                raise CannotRead(f"{other.name} is a link; only regular files are read")
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    except OSError as error:
        raise CannotRead(f"{JOURNAL} cannot be read: {error.strerror or error}") from None
    mode = "mode=ro" if path.with_name(f"{JOURNAL}-shm").exists() else "immutable=1"
    try:
        address = f"file:{quote(str(path.absolute()))}?{mode}"
        with closing(sqlite3.connect(address, uri=True, timeout=LOCK_TIMEOUT_S)) as db:
            db.text_factory = bytes
            db.execute("PRAGMA trusted_schema=OFF")  # the file may be somebody else's
            until = time.monotonic() + READ_S
            db.set_progress_handler(lambda: time.monotonic() > until, 10_000)
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'dead_letters' AND type = 'table'").fetchone():
                yield None
                return
            yield db
    except sqlite3.Error as error:
        raise CannotRead(f"{JOURNAL} cannot be read: {error}") from None
