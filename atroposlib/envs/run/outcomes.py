"""What happened to an environment's groups, by reason, since the last one that was posted; and what is reported of
it."""

import math
from collections import Counter
from collections.abc import Callable

from atroposlib.clients.activity import CODE_FAILED, SERVER_FAILED
from atroposlib.envs.authors.author_errors import MalformedGroup, origin
from atroposlib.envs.server_handling.errors import ServerError

# An environment that finds nothing to train on samples on, more and more slowly: a policy that succeeds once in a
# hundred groups is not held up, one that never will costs little.
FREE_DROPS = 200
DROPS_PER_DOUBLING = 100
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0


class Outcomes:
    """Counts of groups: `dropped` by reason since the last one that was posted, of which `last_drop` is the last; since
    the start, those that were `posted` and those whose samples were `thrown_away`, and the rollouts that `failed`, by
    cause. `origin` says what an error was, and where.
    """

    def __init__(self, origin: Callable[[BaseException], str] = origin) -> None:
        self._origin = origin
        self.posted = 0
        self.thrown_away = 0
        self.failed: Counter[str] = Counter()  # rollouts
        self.dropped: Counter[str] = Counter()
        self.last_drop = ""

    def note_posted(self, groups: int) -> None:
        """The API has taken so many."""
        self.posted += groups
        self.dropped.clear()
        self.last_drop = ""

    def note_dropped(self, reason: str, found: str) -> None:
        """One group was dropped; `found` is the reason in full."""
        self.dropped[reason] += 1
        self.last_drop = found

    def note_failed(self, error: Exception) -> None:
        """One was lost to an error."""
        if isinstance(error, MalformedGroup):
            self.note_dropped("that cannot be trained on", str(error))
        else:
            self.note_dropped(SERVER_FAILED if isinstance(error, ServerError) else CODE_FAILED, self._origin(error))

    @property
    def pause_s(self) -> float:
        """Seconds to leave between two items, while nothing that is sampled is of use."""
        return pause_s(self.dropped.total())


def pause_s(dropped: int) -> float:
    """After so many groups in a row that were dropped."""
    over = dropped - FREE_DROPS
    if over < 0:
        return 0.0
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * math.exp2(min(over / DROPS_PER_DOUBLING, 20.0)))
