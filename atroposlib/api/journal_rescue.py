"""`--journal-accept-loss`: make a damaged journal one that an API opens, with as much of it as is whole.

    copies of all files (NAME.damaged-TIME...) ──▶ the file with its log, else alone, else nothing ──▶ a head that fits

What is kept is the state after one of the journal's changes, with all its groups: never a mixture of two moments.
"""

import contextlib
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from atroposlib.api.journal import own
from atroposlib.api.journal_file import JournalDamaged, JournalReader, no_use, wal_path
from atroposlib.api.journal_head import HeadRecord, head_path
from atroposlib.api.replay import bodies_of, replay


def accept_loss(path: Path) -> str:
    """Set copies of the damaged files aside, and keep what is whole. Returns what was lost, in one line.

    Raises JournalError.
    """
    with contextlib.closing(own(path)) as head:
        found = head.record
        try:
            copy = _set_aside(path)
            kept = _keep_what_is_whole(path)
            if kept is None or kept.head is None:
                head.path.unlink()
            else:
                head.reset(kept.head)
        except OSError as error:
            raise no_use(path, error) from None
    return f"Journal {path}: {_loss(found, kept)}. The files as they were found: {copy}*"


def _set_aside(path: Path) -> Path:
    """Copy every file of the journal beside it, so that the copies are a journal of that name."""
    copy = Path(f"{path}.damaged-{datetime.now():%Y%m%d-%H%M%S.%f}")
    for file, target in ((path, copy), (wal_path(path), wal_path(copy)), (head_path(path), head_path(copy))):
        if file.exists():
            shutil.copy2(file, target)
    return copy


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is left. `head` is the one that fits it; a journal of the first format has none."""

    head: HeadRecord | None
    newest: int
    groups: int


def _keep_what_is_whole(path: Path) -> _Kept | None:
    """Remove what stands in the way of reading the rest."""
    while path.exists():
        try:
            with contextlib.closing(JournalReader(path)) as reader:
                replayed = replay(reader)
                groups = sum(1 for _ in bodies_of(reader, replayed.state))
            return _Kept(None if reader.id is None else HeadRecord(reader.id, reader.newest), replayed.number, groups)
        except JournalDamaged:
            (wal_path(path) if wal_path(path).exists() else path).unlink()
    wal_path(path).unlink(missing_ok=True)
    return None


def _loss(found: HeadRecord | None, kept: _Kept | None) -> str:
    """`found` is the head as it was."""
    newest = 0 if kept is None else kept.newest
    left = "nothing is left" if kept is None else f"{kept.groups} groups are left"
    if found is None or (kept is not None and kept.head is not None and kept.head.journal_id != found.journal_id):
        return f"how many changes are lost cannot be told without its head; it ends with change {newest}, {left}"
    acknowledged = found.newest.number
    return f"{max(0, acknowledged - newest)} of {acknowledged} acknowledged changes are lost, {left}"
