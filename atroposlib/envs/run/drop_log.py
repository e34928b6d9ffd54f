"""What the log says of groups that are dropped: a line a minute, however many there are, and a warning when nothing
else has come for long.
"""

import math
import time
from collections import Counter
from collections.abc import Collection

from atroposlib.envs.authors.author_errors import ErrorLog, shown
from atroposlib.envs.errors import Unscored
from atroposlib.envs.payloads import Item, Rejection
from atroposlib.envs.run.outcomes import Outcomes
from atroposlib.logs import get_logger

log = get_logger(__name__)

WARNED_AFTER = 50  # groups in a row
TOLD_EVERY_S = 60.0
SCORERS_LIMITS = ("grader_timeout", "scorer_timeout")  # settings of environments that grade beside the event loop


class DropLog:
    """Tells of groups that were dropped since the last that was kept. `settings` are the names of the environment's."""

    def __init__(self, errors: ErrorLog, outcomes: Outcomes, settings: Collection[str]) -> None:
        self._errors = errors
        self._outcomes = outcomes
        self._scorers_limits = [f"--env.{name}" for name in SCORERS_LIMITS if name in settings]
        self._rejected_in_row = 0
        self._unscored_in_row = 0
        self._untold: Counter[str] = Counter()
        self._told_at = -math.inf

    def note_scored(self) -> None:
        """An item's answers have scores."""
        self._unscored_in_row = 0

    def note_kept(self) -> None:
        """A group is of use."""
        self._rejected_in_row = 0

    def unscored(self, error: Unscored) -> None:
        """Warn of a group whose answers could not be scored."""
        self._unscored_in_row += 1
        self._errors.note_reason("a missing score", f"Dropped a group: {error}")
        if self._unscored_in_row % WARNED_AFTER:
            return
        limits = ", ".join(self._scorers_limits)
        log.warning(
            "%d groups in a row could not be scored and nothing was sent, the last because %s. Nothing is trained until"
            " answers can be scored%s",
            self._unscored_in_row,
            error,
            f"; if they are reasonable, raise its time limit ({limits})" if limits else "",
        )

    def rejected(self, rejected: Rejection, item: Item) -> None:
        """Tell of a group from which nothing would be learned, unless a line of this minute has told of others."""
        self._rejected_in_row += 1
        self._untold[rejected.kind] += 1
        if self._rejected_in_row == WARNED_AFTER:
            log.warning(
                "%d groups in a row were dropped and nothing was sent, the last because %s%s",
                self._rejected_in_row,
                rejected.reason,
                f" ({self._errors.giver})" if self._errors.giver else "",
            )
        now = time.monotonic()
        if now - self._told_at < TOLD_EVERY_S:
            return
        self._told_at = now
        if self._untold.total() == 1:
            log.info("Dropped a group of the item %s: %s", shown(item), rejected.reason)
        else:
            log.info(
                "Dropped %d groups since the last such line (%s), %d of them in a row, with pauses of %.1f s between "
                "items; the last one, of the item %s: %s",
                self._untold.total(),
                ", ".join(f"{count} {kind}" for kind, count in self._untold.most_common()),
                self._rejected_in_row,
                self._outcomes.pause_s,
                shown(item),
                rejected.reason,
            )
        self._untold.clear()
