"""The state, with the bytes of its groups, as it is on disk: `RolloutService` extends it with what it decides.

    change, bytes ──_submit──▶ Journal (thread) ──on disk──▶ RolloutState.apply ──▶ the future's result

A change is applied when it is on disk, in the order of the journal; without a journal at once. If a write fails,
nothing has changed.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from atroposlib.api.journal.dead_letters import MAX_LETTERS_IN_MEMORY, DeadLetters
from atroposlib.api.journal.journal import Journal
from atroposlib.api.journal.journal_file import Body, DeadLetter, JournalError
from atroposlib.api.journal.replay import bodies_of, replay
from atroposlib.api.state import changes
from atroposlib.api.state.changes import Change, encode_change
from atroposlib.api.state.long_poll import LongPoll
from atroposlib.api.state.state import RolloutState
from atroposlib.logs import get_logger

COMPACT_FROM = 20_000  # changes since the last snapshot

log = get_logger(__name__)


class JournalledState:
    """See the module's head. Raises JournalError when the journal cannot be replayed."""

    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal
        self.state = RolloutState()
        self.latest: Body | None = None
        self.held_bytes = 0
        self.journal_error: str | None = None
        self.dead_letters = DeadLetters()
        self.long_poll = LongPoll()
        self._bodies: dict[int, Body] = {}
        self._unwritten_groups = 0
        self._number = self._applied = self._since_snapshot = 0
        if journal is None:
            self.state.apply(changes.Founded(secrets.token_hex(8)))
        else:
            self._replay(journal)

    async def close(self) -> None:
        """Compact and close the journal."""
        if self.journal is not None:
            if self._since_snapshot:
                self._compact(self.journal)
            await asyncio.to_thread(self.journal.close)

    def _submit(
        self, change: Change, bodies: Sequence[Body] = (), letters: Sequence[DeadLetter] = ()
    ) -> asyncio.Future[Any]:
        """Journal and apply a change; returns what `apply` returns. Raises JournalError or one of REFUSALS."""
        loop = asyncio.get_running_loop()
        applied: asyncio.Future[object] = loop.create_future()
        self._number += 1
        number = self._number
        self._unwritten_groups += len(bodies)

        def done(error: JournalError | None) -> None:
            loop.call_soon_threadsafe(self._written, number, change, bodies, applied, error)

        if self.journal is None:
            self._written(number, change, bodies, applied, None)
        else:
            self.journal.write(number, encode_change(change), bodies, done, letters=letters)
        return applied

    def _written(
        self,
        number: int,
        change: Change,
        bodies: Sequence[Body],
        applied: asyncio.Future[object],
        error: JournalError | None,
    ) -> None:
        """A change is on disk, or cannot be: runs on the event loop, in the order of the journal."""
        self._unwritten_groups -= len(bodies)
        if error is not None and self.journal_error is None:
            log.error("Refusing every request that changes the state: %s", error)
        elif error is None and self.journal_error is not None:
            log.info("The journal can be written again")
        self.journal_error = None if error is None else str(error)
        try:
            if error is not None:
                raise error
            result = self._apply(change, bodies)
        except Exception as failure:  # raised where it is awaited
            if not applied.cancelled():
                applied.set_exception(failure)
        else:
            if not applied.cancelled():
                applied.set_result(result)
        self._applied = number
        self.long_poll.wake()
        self._since_snapshot += 1
        if self.journal is not None and self._since_snapshot > max(COMPACT_FROM, 4 * len(self._bodies)):
            self._compact(self.journal)

    def _apply(self, change: Change, bodies: Sequence[Body]) -> object:
        self._keep(bodies)
        try:
            return self.state.apply(change)
        finally:
            gone = self.state.drain_released()
            for identity in gone:
                self.held_bytes -= len(self._bodies.pop(identity).data)
            if self.journal is not None:
                self.journal.forget(gone)
            if bodies and bodies[-1].id in self._bodies:
                self.latest = bodies[-1]

    def _keep(self, bodies: Sequence[Body]) -> None:
        for body in bodies:
            self._bodies[body.id] = body
            self.held_bytes += len(body.data)

    def _replay(self, journal: Journal) -> None:
        start = time.monotonic()
        try:
            replayed = replay(journal.reader)
            self._keep(list(bodies_of(journal.reader, replayed.state)))
            self.dead_letters.add(journal.reader.dead_letters(MAX_LETTERS_IN_MEMORY))
            journal.keep_only(set(self._bodies))
        except JournalError:
            journal.close()
            raise
        self.state = replayed.state
        self._number = self._applied = replayed.number
        self._since_snapshot = replayed.changes
        if not self._number:
            self._number = self._applied = 1
            founded = changes.Founded(secrets.token_hex(8))
            self.state.apply(founded)
            journal.write(1, encode_change(founded), (), self._log_failure)  # its thread has the database from here on
        self.latest = max(self._bodies.values(), key=lambda body: body.id, default=None)
        log.info(
            "Journal %s: %d groups, %d environments, step %d, replayed in %.2f s",
            journal.path,
            len(self._bodies),
            len(self.state.queue.environments),
            self.state.queue.current_step,
            time.monotonic() - start,
        )

    def _compact(self, journal: Journal) -> None:
        self._since_snapshot = 0
        journal.write(self._applied, encode_change(self.state.snapshot()), (), self._log_failure, replaces=True)

    def _log_failure(self, error: JournalError | None) -> None:
        if error is not None:
            log.warning("%s", error)
