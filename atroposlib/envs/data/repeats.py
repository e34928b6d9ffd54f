"""Which questions to ask again: those whose last answers were partly right, because the others teach nothing now."""

from collections.abc import Sequence
from statistics import pvariance
from typing import Any

from atroposlib.groups import scores_differ

REMEMBERED = 1024  # questions


class Repeats:
    """Remembers, in bounded memory, the questions whose last answers had unequal scores, and gives a `share` (0 to 1)
    of the questions to ask from them: the one with the largest variance first, of equal ones the one asked longest ago.

    A question has a key, which is the same in every epoch, and the number to ask it by.
    """

    def __init__(self, share: float, remembered: int = REMEMBERED) -> None:
        self.share = share
        self.remembered = remembered
        self._asked: dict[str, int] = {}  # the numbers of questions whose answers are awaited
        self._variances: dict[str, tuple[int, float]] = {}  # number and variance, the last answered one at the end
        self._credit = 0.0  # questions that may be asked again now

    def next_number(self) -> int | None:
        """Return the number of a question to ask again, or None where a new one is due or none is remembered."""
        self._credit += self.share
        if not self._variances:  # no debt arises
            self._credit = min(1.0 - self.share, self._credit)
            return None
        if self._credit < 1.0:
            return None
        self._credit -= 1.0
        key = max(self._variances, key=lambda key: self._variances[key][1])  # the first of equal ones
        return self._variances[key][0]

    def note_asked(self, key: str, number: int) -> None:
        """Expect answers to a question, and forget what its last ones were."""
        self._variances.pop(key, None)
        self._asked[key] = number
        _forget_oldest(self._asked, self.remembered)  # of questions whose answers failed

    def note_scores(self, key: str, scores: Sequence[float]) -> None:
        """Remember an asked question if its answers have unequal scores."""
        number = self._asked.pop(key, None)
        if number is not None and scores and scores_differ(scores):
            self._variances[key] = number, pvariance(scores)
            _forget_oldest(self._variances, self.remembered)

    @property
    def state(self) -> list[tuple[str, int, float]]:
        """What is remembered, for a checkpoint."""
        return [(key, *found) for key, found in self._variances.items()]

    @state.setter
    def state(self, state: Sequence[tuple[str, int, float]]) -> None:
        self._variances = {key: (number, variance) for key, number, variance in state}


def _forget_oldest(found: dict[str, Any], kept: int) -> None:
    while len(found) > kept:
        del found[next(iter(found))]
