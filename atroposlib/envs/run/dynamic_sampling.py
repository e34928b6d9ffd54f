"""Sampling continues until every group of a batch has a signal, within limits.

    item ──begin──▶ sampled ──add──▶ groups ──end──▶ ┬─ with a signal ─────────────▶ sent
                                                     └─ of equal scores ──▶ held ─┬─ batch is full ──▶ thrown away
                                                                                  └─ max_items sampled for it ──▶ sent,
                                                                                     oldest first, until it is full

DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2) with a bound: a policy that always succeeds, or
never, would otherwise be sampled forever. Each environment counts only its own share of a batch.

On-policy, groups that were begun for one batch cannot be used for the next. Groups are then chosen in the order in
which they were begun, and all others that were begun before the batch is full are discarded. If the first to end were
chosen, long answers would be discarded more often than short ones.
"""

from collections import deque
from itertools import takewhile
from typing import Generic, NamedTuple, TypeVar

from atroposlib.logs import get_logger

log = get_logger(__name__)

G = TypeVar("G")
REMEMBERED = 64  # groups, for the share that has a signal


class Chosen(NamedTuple, Generic[G]):
    """Sorts the groups so far: the ones to send now, and the ones that never will be sent."""

    sent: list[G]
    thrown_away: list[G]


class BatchFilling(Generic[G]):
    """The groups for one batch after the other. For each at most `max_items` are sampled before equal scores pass."""

    def __init__(self, max_items: int, on_policy: bool) -> None:
        self._max_items = max_items
        self._on_policy = on_policy
        self._open: dict[int, list[tuple[G, bool]]] = {}  # items that are undecided, in the order of their begin
        self._ended: set[int] = set()  # of these
        self._next = 0  # item
        self._void_before = 0  # items that can no longer be used
        self._begun = self._sampled = 0  # items for this batch
        self._sent = 0  # groups for this batch
        self._held: deque[G] = deque()  # without a signal, oldest first; never more than a batch could take
        self._recent: deque[bool] = deque(maxlen=REMEMBERED)  # whether groups had a signal
        self.batches = 0  # that are full
        self.filled_in = 0  # groups without a signal that were sent, of all batches

    def begin(self) -> int:
        """The number of an item that is going to be sampled."""
        item, self._next = self._next, self._next + 1
        self._open[item] = []
        self._begun += 1
        return item

    def add(self, item: int, group: G, has_signal: bool) -> None:
        """Note a group that the item gave."""
        self._open[item].append((group, has_signal))

    def end(self, item: int, groups_per_batch: int) -> Chosen[G]:
        """Decide what to do after the item's last group; the environment fills `groups_per_batch` of each batch."""
        self._ended.add(item)
        chosen: Chosen[G] = Chosen([], [])
        for each in self._decidable(item):
            self._decide(each, chosen, groups_per_batch)
        return chosen

    def _decidable(self, ended: int) -> list[int]:
        """Items to decide on now that one of them has ended: on-policy those that no older one may come before."""
        if not self._on_policy or ended < self._void_before:
            return [ended]
        items = (item for item in self._open if item >= self._void_before)
        return list(takewhile(self._ended.__contains__, items))

    def start_over(self) -> list[G]:
        """Begin a batch with the next item, and return the groups that were sampled for the one before and not
        sent.
        """
        gone = [*self._held, *(group for groups in self._open.values() for group, _ in groups)]
        self._held.clear()
        for groups in self._open.values():
            groups.clear()
        self._void_before = self._next
        self._begun = self._sampled = self._sent = 0
        return gone

    def missing(self, groups_per_batch: int) -> int:
        """Count the groups that this batch still needs."""
        return max(0, groups_per_batch - self._sent)

    @property
    def sampled(self) -> int:
        """Return how many items of this batch are decided."""
        return self._sampled

    def undecided(self) -> list[G]:
        """Groups that are neither sent nor thrown away, oldest first."""
        return [*self._held, *(group for groups in self._open.values() for group, _ in groups)]

    def may_begin(self) -> int | None:
        """Return how many more items this batch can be given; None is any number."""
        if not self._on_policy or self._sampled >= self._max_items:
            return None
        return max(0, self._max_items - self._begun)

    def oversampling(self, groups_per_batch: int) -> float:
        """Estimate how many groups to sample for each that is missing, going by the share that had a signal lately."""
        share = (1 + sum(self._recent)) / (1 + len(self._recent))
        return max(1.0, min(1 / share, self._max_items / groups_per_batch))

    def _decide(self, item: int, chosen: Chosen[G], groups_per_batch: int) -> None:
        groups = self._open.pop(item)
        self._ended.discard(item)
        self._recent.extend(has_signal for _, has_signal in groups)
        if item < self._void_before:
            chosen.thrown_away.extend(group for group, _ in groups)
            return
        self._sampled += 1
        for group, has_signal in groups:
            if has_signal:
                chosen.sent.append(group)
                self._sent += 1
            elif len(self._held) < groups_per_batch:
                self._held.append(group)
            else:
                chosen.thrown_away.append(group)
        missing = min(groups_per_batch - self._sent, len(self._held))
        if self._sampled >= self._max_items and missing > 0:
            self._fill_in(chosen, missing, groups_per_batch)
        if self._sent >= groups_per_batch:
            self._next_batch(chosen)

    def _fill_in(self, chosen: Chosen[G], missing: int, groups_per_batch: int) -> None:
        if self._sampled == self._max_items:
            log.info(
                "Sampled %d groups for a batch, and %d of the %d that it needs have a signal: filling it with "
                "others, oldest first (--env.max_items_per_batch)",
                self._sampled,
                self._sent,
                groups_per_batch,
            )
        chosen.sent.extend(self._held.popleft() for _ in range(missing))
        self._sent += missing
        self.filled_in += missing

    def _next_batch(self, chosen: Chosen[G]) -> None:
        chosen.thrown_away.extend(self._held)
        self._held.clear()
        self.batches += 1
        self._sampled = self._sent = 0
        self._begun = len(self._open)
        if self._on_policy:
            self._void_before = self._next
            self._begun = 0
