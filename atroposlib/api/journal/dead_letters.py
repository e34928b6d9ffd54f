"""Groups that cannot be trained on, set aside with the reason: a bounded table of the journal, the newest in memory.

A letter is written in the same transaction as the change that removes its group from the queue or from its batch.
Letters outlive their run and /reset_data. The table keeps the newest `MAX_LETTERS` and at most `MAX_BYTES` of bodies;
memory keeps fewer. Without a journal there is only memory.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from atroposlib.api.journal.journal_file import DeadLetter

MAX_LETTERS = 10_000
MAX_BYTES = 2**30
MAX_LETTERS_IN_MEMORY = 1_000
MAX_BYTES_IN_MEMORY = 64 * 2**20

_INSERT = (
    "INSERT INTO dead_letters (id, at, env_id, environment, reason, packed, crc, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_PRUNE = (
    "DELETE FROM dead_letters WHERE id IN (SELECT id FROM ("
    "SELECT id, row_number() OVER newest_first AS place, sum(length(body)) OVER newest_first AS bytes "
    "FROM dead_letters WINDOW newest_first AS (ORDER BY id DESC)) WHERE place > ? OR bytes > ?)"
)


def store(db: sqlite3.Connection, letters: Sequence[DeadLetter]) -> None:
    """Add letters, and remove the oldest above the table's bounds, in the transaction that is open."""
    if letters:
        db.executemany(
            _INSERT,
            [
                (
                    letter.body.id,
                    letter.at,
                    letter.env_id,
                    letter.environment,
                    letter.reason,
                    letter.body.packed,
                    zlib.crc32(letter.body.data),
                    letter.body.data,
                )
                for letter in letters
            ],
        )
        db.execute(_PRUNE, (MAX_LETTERS, MAX_BYTES))


@dataclass(slots=True)
class Kept:
    """A letter in memory; the body of an old one is empty, where it had `size` bytes."""

    letter: DeadLetter
    size: int


class DeadLetters:
    """The newest letters; the bodies of the oldest go first when they take too many bytes."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []  # oldest first
        self._bytes = 0
        self.next_id = 1

    def add(self, letters: Iterable[DeadLetter]) -> None:
        """Keep these, the newest last."""
        for letter in letters:
            self.next_id = letter.body.id + 1
            self._kept.append(Kept(letter, len(letter.body.data)))
            self._bytes += len(letter.body.data)
            if len(self._kept) > MAX_LETTERS_IN_MEMORY:
                self._bytes -= len(self._kept.pop(0).letter.body.data)
            for old in self._kept:
                if self._bytes <= MAX_BYTES_IN_MEMORY:
                    break
                self._bytes -= len(old.letter.body.data)
                old.letter = replace(old.letter, body=replace(old.letter.body, data=b""))

    def newest(self, count: int) -> list[Kept]:
        """At most so many, newest first."""
        return self._kept[: -count - 1 : -1]
