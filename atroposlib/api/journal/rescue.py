"""`--journal-accept-loss`: repair a damaged journal so that an API opens it, with everything in it that is intact.

    copies of all files (NAME.damaged-TIME...) ──▶ the file with its log, else alone, else nothing ──▶ a head that fits

The result is the state after one of the journal's changes, without the groups whose bytes are damaged. It never mixes
two moments.
"""

import contextlib
import shutil
import sqlite3
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from atroposlib.api.journal.journal import own
from atroposlib.api.journal.journal_file import (
    JournalDamaged,
    JournalReader,
    insert_change,
    reading,
    wal_path,
)
from atroposlib.api.journal.journal_head import HeadRecord, chained, head_path
from atroposlib.api.journal.replay import replay
from atroposlib.api.state.changes import GroupsRejected, encode_change


def accept_loss(path: Path) -> str:
    """Set copies of the damaged files aside, and keep what is whole. Returns what was lost, in one line.

    Raises JournalError.
    """
    with contextlib.closing(own(path)) as head, reading(path):
        record = head.record
        copy = _set_aside(path)
        kept = _keep_what_is_whole(path)
        if kept is None or kept.head is None:
            head.path.unlink()
        else:
            head.reset(kept.head)
    return f"Journal {path}: {_loss(record, kept)}. The files as they were found: {copy}*"


def _set_aside(path: Path) -> Path:
    """Copy every file of the journal that has content beside it, so that the copies are a journal of that name."""
    copy = Path(f"{path}.damaged-{datetime.now():%Y%m%d-%H%M%S.%f}")
    for file, target in ((path, copy), (wal_path(path), wal_path(copy)), (head_path(path), head_path(copy))):
        if file.exists() and file.stat().st_size:
            shutil.copy2(file, target)
    return copy


@dataclass(frozen=True, slots=True)
class _Kept:
    """The rescued part. `head` is the matching one; a journal of the first format has none."""

    head: HeadRecord | None
    newest: int
    groups: int
    damaged_groups: int = 0
    letters_lost: bool = False


def _keep_what_is_whole(path: Path) -> _Kept | None:
    while path.exists():
        try:
            return _without_damaged_bodies(path)
        except JournalDamaged:
            (wal_path(path) if wal_path(path).exists() else path).unlink()
    wal_path(path).unlink(missing_ok=True)
    return None


def _without_damaged_bodies(path: Path) -> _Kept:
    """Every change is whole, or JournalDamaged is raised; groups whose bytes are not are taken out by one more
    change.
    """
    with contextlib.closing(JournalReader(path)) as reader:
        replayed = replay(reader)
        whole = {body.id for body in reader.bodies(skip_damaged=True)}
        letters_lost = not _are_whole(reader)
    groups = [group for _, group in replayed.state.groups()]
    orders = [group.order for group in groups if group.record.id not in whole]
    if reader.id is None:
        if orders:
            raise reader.damaged(f"{len(orders)} groups have no body")
        return _Kept(None, replayed.number, len(groups))
    newest = reader.newest
    with reading(path), contextlib.closing(sqlite3.connect(path)) as db, db:
        db.executemany(
            "DELETE FROM bodies WHERE id = ?",
            [(identity,) for (identity,) in db.execute("SELECT id FROM bodies") if identity not in whole],
        )
        if letters_lost:
            db.execute("DELETE FROM dead_letters")
        if orders:
            change = encode_change(GroupsRejected(orders))
            newest = chained(newest, newest.number + 1, change, b"")
            insert_change(db, newest, False, b"", change)
    return _Kept(HeadRecord(reader.id, newest), replayed.number, len(groups) - len(orders), len(orders), letters_lost)


def _are_whole(reader: JournalReader) -> bool:
    with contextlib.suppress(JournalDamaged):
        return all(True for _ in reader.dead_letters())
    return False


def _loss(head_before: HeadRecord | None, kept: _Kept | None) -> str:
    newest, left = 0, "nothing is left"
    if kept is not None:
        newest, left = kept.newest, f"{kept.groups} groups are left"
        left += f", {kept.damaged_groups} more had damaged bytes" if kept.damaged_groups else ""
        left += ", its dead letters are lost" if kept.letters_lost else ""
    if head_before is None or (
        kept is not None and kept.head is not None and kept.head.journal_id != head_before.journal_id
    ):
        return f"without its head, the number of lost changes is unknown; it ends with change {newest}, {left}"
    acknowledged = head_before.newest.number
    return f"{max(0, acknowledged - newest)} of {acknowledged} acknowledged changes are lost, {left}"
