"""Turns on disk before their replies leave: the batching API's journal file, with sessions as its changes.

    SessionWritten(record)   TurnWritten(session, body) + the turn as a body   SessionsEnded(ids), whose bodies go

After a restart `restored` gives each session that has not ended, with its turns in the order in which they began. The
file ends small: a session's turns leave it with the session, and a snapshot takes the place of old changes.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atroposlib.agents.model_call import JsonObject, ModelReply
from atroposlib.agents.tape import Tape
from atroposlib.api.journal.journal import Journal
from atroposlib.api.journal.journal_file import OR_ACCEPT_LOSS, Body, JournalDamaged, JournalError
from atroposlib.errors import reading

CHANGES_KEPT = 4096  # before a snapshot takes their place


class SessionRecord(msgspec.Struct):
    """What is known of a session besides its turns. `settings` are those of its request, `failed` says why it ended."""

    id: str
    key: str
    settings: JsonObject
    created_at: float
    parent: str | None = None
    reward: float | None = None
    failed: str | None = None


class Turn(msgspec.Struct):
    """One call of the model: what was asked, in the managed server's words, what was sampled, and what was replied, so
    many seconds after the rollout's start.
    """

    order: int
    key: str
    place: str
    asked: JsonObject
    said: list[JsonObject]
    tape: Tape
    reply: ModelReply
    nbytes: int = 0  # of the request
    after_s: float = 0.0


class SessionWritten(msgspec.Struct, tag="session"):
    """A session that is new, or has changed."""

    record: SessionRecord


class TurnWritten(msgspec.Struct, tag="turn"):
    """A turn, whose bytes are the body of this id."""

    session: str
    body: int


class SessionsEnded(msgspec.Struct, tag="ended"):
    """Sessions that are forgotten."""

    ids: list[str]


class Snapshot(msgspec.Struct, tag="snapshot"):
    """All that all changes so far have led to."""

    sessions: list[SessionRecord]
    turns: list[TurnWritten]


Change = SessionWritten | TurnWritten | SessionsEnded | Snapshot


@dataclass
class _Kept:
    record: SessionRecord
    bodies: list[int] = field(default_factory=list)


class TurnJournal:
    """An open journal at `path`. Raises JournalError, also for one that another endpoint holds."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._kept: dict[str, _Kept] = {}
        self._turns: dict[str, list[Turn]] = {}
        self._number = self._written = 0
        try:
            self._open(path)
        except JournalDamaged as damage:
            raise JournalError(str(damage).removesuffix(OR_ACCEPT_LOSS)) from None  # run-api does not read it

    def _open(self, path: Path) -> None:
        self._journal = Journal(path)
        try:
            remedy = "another program wrote it, such as run-api; give another path"
            with reading(f"cannot read --journal {path}", JournalError, remedy=remedy, also=(msgspec.MsgspecError,)):
                needed = self._read()
        except JournalError:
            self._journal.close()  # as it was found
            raise
        self._journal.keep_only(needed)

    def _read(self) -> set[int]:
        """Take up what the file holds, and return the bodies that are still needed."""
        for number, encoded in self._journal.reader.changes():
            self._number = number
            self._apply(msgspec.msgpack.decode(encoded, type=Change))
        needed = {body: session for session, kept in self._kept.items() for body in kept.bodies}
        self._turns = {session: [] for session in self._kept}
        for body in self._journal.reader.bodies():
            if body.id in needed:
                self._turns[needed[body.id]].append(msgspec.msgpack.decode(body.data, type=Turn))
        if lost := len(needed) - sum(map(len, self._turns.values())):
            raise self._journal.reader.damaged(f"{lost} turns have no body")
        return set(needed)

    def restored(self) -> list[tuple[SessionRecord, list[Turn]]]:
        """The sessions that have not ended, each with its turns."""
        turns, self._turns = self._turns, {}
        return [
            (kept.record, sorted(turns.get(session, []), key=lambda turn: turn.order))
            for session, kept in self._kept.items()
        ]

    async def write_session(self, record: SessionRecord) -> None:
        """Return once the session is on disk. Raises JournalError."""
        await self._write(SessionWritten(record))

    async def write_turn(self, session: str, turn: Turn) -> None:
        """Return once the turn is on disk. Raises JournalError."""
        body = Body(self._number + 1, msgspec.msgpack.encode(turn), packed=True)
        await self._write(TurnWritten(session, body.id), [body])

    async def end(self, sessions: Iterable[str]) -> None:
        """Forget sessions and their turns. Raises JournalError, and keeps them."""
        await self._write(SessionsEnded([*sessions]))

    def close(self) -> None:
        """Finish all writes and close the file."""
        self._journal.close()

    def _write(self, change: Change, bodies: Sequence[Body] = ()) -> "asyncio.Future[None]":
        """Queue a change, which counts once it is on disk: no snapshot names what may still fail."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._number += 1
        number = self._number

        def settle(error: JournalError | None) -> None:
            if error is None:
                self._journal.forget(self._apply(change))
                self._written += 1
                if self._written >= CHANGES_KEPT:
                    self._compact(number)
            if written.done():
                return
            if error is not None:
                written.set_exception(error)
            else:
                written.set_result(None)

        def done(error: JournalError | None) -> None:  # in the writer's thread
            loop.call_soon_threadsafe(settle, error)

        self._journal.write(number, msgspec.msgpack.encode(change), bodies, done)
        return written

    def _compact(self, number: int) -> None:
        """Have a snapshot take the place of all changes up to this one; if it cannot be written, the next one does."""
        self._written = 0
        self._journal.write(number, msgspec.msgpack.encode(self._snapshot()), (), lambda error: None, replaces=True)

    def _apply(self, change: Change) -> list[int]:
        """Take a change over, and return the bodies that nobody needs any more."""
        match change:
            case SessionWritten(record):
                self._kept.setdefault(record.id, _Kept(record)).record = record
            case TurnWritten(session, body) if session in self._kept:
                self._kept[session].bodies.append(body)
            case TurnWritten(_, body):
                return [body]
            case SessionsEnded(ids):
                return [body for each in ids if each in self._kept for body in self._kept.pop(each).bodies]
            case Snapshot(sessions, turns):
                self._kept = {record.id: _Kept(record) for record in sessions}
                for turn in turns:
                    self._apply(turn)
        return []

    def _snapshot(self) -> Snapshot:
        turns = [TurnWritten(session, body) for session, kept in self._kept.items() for body in kept.bodies]
        return Snapshot([kept.record for kept in self._kept.values()], turns)
