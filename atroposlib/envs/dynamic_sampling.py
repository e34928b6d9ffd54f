"""Sampling goes on until every group of a batch has a signal, within limits.

    group with a signal ──────────────────────────────▶ sent
    group of equal scores ──▶ held ─┬─ batch is full ──▶ thrown away
                                    └─ max_items sampled for it ──▶ sent, oldest first, until the batch is full

DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2) with a bound: a policy that always succeeds, or
never, would otherwise be sampled for ever. An environment counts the groups of a batch by itself, since it shares each
batch with others only by its share.
"""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from atroposlib.logs import get_logger

log = get_logger(__name__)

G = TypeVar("G")


class Chosen(NamedTuple, Generic[G]):
    """What becomes of the groups so far: these are sent now, those never will be."""

    sent: list[G]
    thrown_away: list[G]


class BatchFilling(Generic[G]):
    """The groups for one batch after the other. For each at most `max_items` are sampled before equal scores pass."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._sampled = 0  # for this batch
        self._sent = 0
        self._held: deque[G] = deque()  # without a signal, oldest first; never more than a batch could take
        self.filled_in = 0  # groups without a signal that were sent, of all batches

    def offer(self, group: G, has_signal: bool, groups_per_batch: int) -> Chosen[G]:
        """What to do now that `group` has been sampled; an environment fills `groups_per_batch` of each batch."""
        self._sampled += 1
        chosen: Chosen[G] = Chosen([], [])
        if has_signal:
            chosen.sent.append(group)
        elif len(self._held) < groups_per_batch:
            self._held.append(group)
        else:
            chosen.thrown_away.append(group)
        self._sent += len(chosen.sent)
        missing = min(groups_per_batch - self._sent, len(self._held))
        if self._sampled >= self._max_items and missing > 0:
            self._fill_in(chosen, missing, groups_per_batch)
        if self._sent >= groups_per_batch:
            chosen.thrown_away.extend(self._held)
            self._held.clear()
            self._sampled = self._sent = 0
        return chosen

    def _fill_in(self, chosen: Chosen[G], missing: int, groups_per_batch: int) -> None:
        if self._sampled == self._max_items:
            log.info(
                "%d groups were sampled for a batch and %d of the %d it takes have a signal: it goes on with others, "
                "oldest first (--env.max_items_per_batch)",
                self._sampled,
                self._sent,
                groups_per_batch,
            )
        chosen.sent.extend(self._held.popleft() for _ in range(missing))
        self._sent += missing
        self.filled_in += missing
