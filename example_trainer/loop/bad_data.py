"""How much bad data a run tolerates: groups that cannot be trained on, and batches whose gradient cannot be used.

Both are set aside and the run continues: one bad group must not end a run and every resume after it. If there are many,
the cause is not in the data, and the run ends with an error that names it.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from atroposlib.logs import get_logger
from example_trainer.errors import BadBatch, TrainerError

WINDOW = 100

log = get_logger(__name__)


@dataclass(frozen=True)
class Rejection:
    """A group that was set aside: `environment` is its name, as far as known."""

    environment: str
    reason: str


class RejectionBudget:
    """Allows `allowed` of the last 100 groups to be set aside."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._recent: deque[str | None] = deque(maxlen=WINDOW)  # the environment of a rejected group, None for another
        self.total = 0

    def note(self, rejections: Sequence[Rejection], trainable: int = 0) -> None:
        """Count groups that were set aside, after `trainable` that were not. Raises TrainerError when there are too
        many.
        """
        self._recent.extend([None] * min(trainable, WINDOW))
        for rejection in rejections:
            self.total += 1
            self._recent.append(rejection.environment)
            log.warning("Set aside a group of %s: %s", rejection.environment, rejection.reason)
        of = Counter(environment for environment in self._recent if environment is not None)
        if of.total() > self._allowed:
            (worst, count), *_ = of.most_common()
            raise TrainerError(
                f"{of.total()} of the last {len(self._recent)} groups cannot be trained on (limit {self._allowed}, "
                f"--max-rejected-groups); {count} of them come from {worst}. The last one, from "
                f"{rejections[-1].environment}: {rejections[-1].reason}. Correct that environment or its inference "
                "server, or raise the limit"
            )


class BadBatches:
    """Batches that make no update: gradient or loss is not finite, or the log-probabilities are another model's.

    "stop" ends the run at the first. "skip" bears `allowed` in a row: bad data passes, a run gone wrong does not.
    """

    def __init__(self, action: Literal["skip", "stop"], allowed: int) -> None:
        self._action = action
        self._allowed = allowed
        self._in_row = 0
        self.total = 0

    def note_update(self) -> None:
        """A batch made an update."""
        self._in_row = 0

    def note(self, error: BadBatch, what: str) -> None:
        """A batch, `what` in the log, made none. Raises an error of the same kind when that ends the run."""
        self.total += 1
        self._in_row += 1
        if self._action == "stop":
            raise type(error)(f"{error} (--on-bad-batch stop; use skip to skip such a batch)") from error
        if self._in_row > self._allowed:
            raise type(error)(
                f"{error} ({self._in_row} batches in a row; --max-bad-batches {self._allowed})"
            ) from error
        log.warning("%s makes no update, bad batch %d of at most %d: %s", what, self._in_row, self._allowed, error)
