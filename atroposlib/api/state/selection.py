"""Which queued groups make the next batch: pure functions over first-in first-out lanes of groups.

A group is a few rollouts of one prompt; it is never split. A batch holds exactly `batch_size` rollouts. Groups wait in
lanes, one per (environment, group size), each in order of arrival:

    (env 0, size 8)  ■■■■ ■■■■ ■■■■        every rule below takes groups from the heads of lanes only, so a choice
    (env 1, size 4)  ■■ ■■                 costs time in proportion to the batch and the number of lanes, and never
    (no env, size 8) ■■■■                  to the length of the queue

Three rules:

- packs: groups of equal size are gathered into packs of M rollouts, M being the largest group size in the queue;
  packs are taken in the order in which they became complete. This keeps a batch balanced between environments of
  different group sizes.
- packs with minimums: as above per environment; environments with a minimum share fill it first, in order of
  registration.
- exact: the oldest groups that can be part of any exact batch, whatever their sizes. It finds a batch whenever one
  exists.

`choose_batch` tries packs first. When the oldest group was overtaken by younger ones too often it tries the exact
rule first, so that no group which fits into some batch waits forever beside a flow of others.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

R = TypeVar("R")
EnvId = int | None
Lane = tuple[EnvId, int]  # environment, rollouts per group


class Group(NamedTuple, Generic[R]):
    """A queued group. `order` is unique and rises with arrival; `record` is the caller's and is never looked into."""

    order: int
    size: int  # in rollouts
    env_id: EnvId
    record: R

    @property
    def lane(self) -> Lane:
        """The lane in which the group waits."""
        return self.env_id, self.size


class Lanes(Generic[R]):
    """All queued groups, with running totals. A lane exists while it holds a group."""

    def __init__(self, groups: Iterable[Group[R]] = ()) -> None:
        self.groups = 0
        self.size = 0
        self.size_of: Counter[EnvId] = Counter()
        self._lanes: dict[Lane, deque[Group[R]]] = {}
        for group in groups:
            self.append(group)

    def append(self, group: Group[R]) -> None:
        """Queue a group that is younger than every group of its lane."""
        lane = group.lane
        self._lanes.setdefault(lane, deque()).append(group)
        self._count(lane, 1)

    def take(self, orders: Sequence[int]) -> list[Group[R]]:
        """Remove the groups of these orders, all at the heads of their lanes; they come back in the sequence given.
        Raises KeyError.
        """
        wanted = set(orders)
        taken: dict[int, Group[R]] = {}
        for groups in self._lanes.values():
            for group in groups:
                if group.order not in wanted:
                    break
                taken[group.order] = group
        chosen = [taken[order] for order in orders]
        for lane, count in Counter(group.lane for group in chosen).items():
            groups = self._lanes[lane]
            for _ in range(count):
                groups.popleft()
            if not groups:
                del self._lanes[lane]
            self._count(lane, -count)
        return chosen

    def take_back(self, groups: Iterable[Group[R]]) -> None:
        """Remove groups that are the last ones of their lanes."""
        for group in groups:
            lane = self._lanes[group.lane]
            lane.pop()
            if not lane:
                del self._lanes[group.lane]
            self._count(group.lane, -1)

    def drop(self, orders: Set[int]) -> list[Group[R]]:
        """Remove groups wherever they stand; those that are found come back. Costs time in the length of the queue."""
        dropped: list[Group[R]] = []
        for lane, groups in list(self._lanes.items()):
            gone = [group for group in groups if group.order in orders]
            if gone:
                self._refill(lane, [group for group in groups if group.order not in orders])
                dropped += gone
        return dropped

    def put_back(self, groups: Iterable[Group[R]]) -> None:
        """Queue groups again at the places that their orders give them."""
        returning: dict[Lane, list[Group[R]]] = {}
        for group in groups:
            returning.setdefault(group.lane, []).append(group)
        for lane, mine in returning.items():
            self._refill(lane, sorted([*self._lanes.get(lane, ()), *mine]))

    def _refill(self, lane: Lane, groups: list[Group[R]]) -> None:
        self._count(lane, len(groups) - len(self._lanes.pop(lane, ())))
        if groups:
            self._lanes[lane] = deque(groups)

    def _count(self, lane: Lane, groups: int) -> None:
        env_id, size = lane
        self.groups += groups
        self.size += groups * size
        self.size_of[env_id] += groups * size
        if not self.size_of[env_id]:
            del self.size_of[env_id]

    def __iter__(self) -> Iterator[Group[R]]:
        return (group for groups in self._lanes.values() for group in groups)

    def items(self, largest: int | None = None) -> Iterator[tuple[Lane, deque[Group[R]]]]:
        """Lanes of groups of at most `largest` rollouts."""
        return ((lane, groups) for lane, groups in self._lanes.items() if largest is None or lane[1] <= largest)

    def sizes(self) -> dict[int, int]:
        """Group size -> number of groups of that size, smallest size first."""
        counts: Counter[int] = Counter()
        for (_, size), groups in self._lanes.items():
            counts[size] += len(groups)
        return dict(sorted(counts.items()))

    def largest(self, at_most: int | None = None) -> int:
        """The largest group size in the queue (of those not above `at_most`); 0 without any."""
        return max((size for (_, size), _ in self.items(at_most)), default=0)

    def largest_of(self, env_id: EnvId) -> int:
        """The largest group size that an environment has in the queue; 0 without any."""
        return max((size for env, size in self._lanes if env == env_id), default=0)

    def oldest(self, at_most: int | None = None) -> Group[R] | None:
        """The group that waits longest (of those not above `at_most` rollouts)."""
        return min((groups[0] for _, groups in self.items(at_most)), default=None)


def choose_batch(
    lanes: Lanes[R], batch_size: int, minimums: Mapping[int, float] | None = None, *, overtaken: bool = False
) -> list[Group[R]] | None:
    """Groups of exactly `batch_size` rollouts in all, or None when there is no such choice.

    `minimums` maps an environment to the share (0 to 1) of each batch that is its own. `overtaken`: the oldest group
    has been passed over by enough batches, and goes first if it can be part of any.
    """
    if lanes.size < batch_size:
        return None
    if overtaken:
        return exact_batch(lanes, batch_size, minimums) or packed_batch(lanes, batch_size, minimums)
    return packed_batch(lanes, batch_size, minimums) or exact_batch(lanes, batch_size, minimums)


# --- packs ----------------------------------------------------------------------------------------------------------


def packed_batch(
    lanes: Lanes[R], batch_size: int, minimums: Mapping[int, float] | None = None
) -> list[Group[R]] | None:
    """A batch by the pack rules; None when there is none by them."""
    pack = lanes.largest(batch_size)
    if not pack:
        return None
    chosen = _shared_packs(lanes, batch_size, pack, minimums) if minimums else _common_packs(lanes, batch_size, pack)
    return chosen if chosen is not None and _total(chosen) == batch_size else None


def _common_packs(lanes: Lanes[R], batch_size: int, pack: int) -> list[Group[R]]:
    """Packs of equal-sized groups from anywhere, in the order of their completion."""
    by_size: dict[int, list[Iterable[Group[R]]]] = {}
    for (_, size), groups in lanes.items(batch_size):
        by_size.setdefault(size, []).append(groups)
    return _fill((_in_packs(heapq.merge(*same), size, pack) for size, same in by_size.items()), room=batch_size)


def _shared_packs(lanes: Lanes[R], batch_size: int, pack: int, minimums: Mapping[int, float]) -> list[Group[R]] | None:
    """Packs within each environment and size: the minimums first, then all others in order of arrival."""
    packable = {
        lane: len(groups) * lane[1] // pack * pack // lane[1]
        for lane, groups in lanes.items(batch_size)
        if pack % lane[1] == 0
    }
    packable = {lane: count for lane, count in packable.items() if count}
    required = required_rollouts(batch_size, minimums, packable)
    if required is None:
        return None
    contents = dict(lanes.items(batch_size))
    chosen: list[Group[R]] = []
    for env_id, count in required.items():
        own = (_in_packs(contents[lane], lane[1], pack) for lane in packable if lane[0] == env_id)
        chosen += _fill(own, room=batch_size - _total(chosen), enough=count)
    taken = Counter(group.lane for group in chosen)
    rest = (_by_arrival(islice(contents[lane], taken[lane], count)) for lane, count in packable.items())
    return chosen + _fill(rest, room=batch_size - _total(chosen))


def required_rollouts(
    batch_size: int, minimums: Mapping[int, float], available: Iterable[Lane]
) -> dict[int, int] | None:
    """Environment -> rollouts of the next batch that must be its own.

    None when an environment with a minimum has nothing `available`. Shares above the whole batch are scaled down,
    but not below the environment's smallest group.
    """
    required = {env_id: int(batch_size * share) for env_id, share in minimums.items() if int(batch_size * share) > 0}
    smallest: dict[EnvId, int] = {}
    for env, size in available:
        smallest[env] = min(size, smallest.get(env, size))
    if not required.keys() <= smallest.keys():
        return None
    total = sum(required.values())
    if total > batch_size:
        required = {
            env_id: max(smallest[env_id], int(needed * (batch_size / total))) for env_id, needed in required.items()
        }
    return required


def _in_packs(groups: Iterable[Group[R]], size: int, pack: int) -> Iterator[tuple[int, Group[R]]]:
    """Groups of one size that belong to a complete pack, each with the order at which its pack became complete."""
    if pack % size:
        return
    remaining = iter(groups)
    while len(members := list(islice(remaining, pack // size))) == pack // size:
        for group in members:
            yield members[-1].order, group


def _by_arrival(groups: Iterable[Group[R]]) -> Iterator[tuple[int, Group[R]]]:
    return ((group.order, group) for group in groups)


def _fill(streams: Iterable[Iterator[tuple[int, Group[R]]]], *, room: int, enough: int | None = None) -> list[Group[R]]:
    """Groups by rising key from streams of one group size each, until `enough` (default: `room`) rollouts are taken.

    A stream whose next group does not fit into `room` is left: no later group of it would.
    """
    goal = room if enough is None else enough
    heads = [(*head, stream) for stream in streams if (head := next(stream, None))]
    heap = [(key, group, index) for index, (key, group, _) in enumerate(heads)]
    heapq.heapify(heap)
    chosen: list[Group[R]] = []
    taken = 0
    while heap and taken < goal:
        _, group, index = heapq.heappop(heap)
        if taken + group.size > room:
            continue
        chosen.append(group)
        taken += group.size
        if head := next(heads[index][2], None):
            heapq.heappush(heap, (*head, index))
    return chosen


def oldest_that_fit(lanes: Lanes[R], room: int) -> list[Group[R]]:
    """Groups in order of arrival, each that still fits into `room` rollouts."""
    return _fill((_by_arrival(iter(groups)) for _, groups in lanes.items()), room=room)


def _total(groups: Iterable[Group[R]]) -> int:
    return sum(group.size for group in groups)


# --- exact ----------------------------------------------------------------------------------------------------------


def exact_batch(lanes: Lanes[R], batch_size: int, minimums: Mapping[int, float] | None = None) -> list[Group[R]] | None:
    """Minimums first (oldest groups of each environment), then the oldest groups that complete an exact batch.

    Without minimums this finds a batch whenever one exists, and no exact batch holds an older first group, then an
    older second one ...
    """
    contents = dict(lanes.items(batch_size))
    required = required_rollouts(batch_size, minimums or {}, contents)
    if required is None:
        return None
    chosen: list[Group[R]] = []
    for env_id, count in required.items():
        own = (_by_arrival(iter(groups)) for lane, groups in contents.items() if lane[0] == env_id)
        chosen += _fill(own, room=batch_size - _total(chosen), enough=count)
    taken = Counter(group.lane for group in chosen)
    rest = {lane: (groups, taken[lane]) for lane, groups in contents.items() if len(groups) > taken[lane]}
    completion = _oldest_exact(rest, batch_size - _total(chosen))
    return None if completion is None else chosen + completion


def _oldest_exact(contents: Mapping[Lane, tuple[deque[Group[R]], int]], target: int) -> list[Group[R]] | None:
    """The oldest groups that sum to `target` rollouts. Each lane comes with the number of groups already taken from
    it.

    Groups in order of arrival, each that still fits, if these are exact; else each without which the older ones that
    were taken are part of no solution. Of each size, no other than the oldest target // size can be in one.
    """
    counts: Counter[int] = Counter()
    lanes: dict[int, list[Iterable[Group[R]]]] = {}
    for (_, size), (groups, taken) in contents.items():
        counts[size] += len(groups) - taken
        lanes.setdefault(size, []).append(islice(groups, taken, None))
    if not can_sum(counts, target):
        return None
    oldest = [list(islice(heapq.merge(*same), target // size)) for size, same in lanes.items()]
    fitting = _fill(map(_by_arrival, oldest), room=target)
    if _total(fitting) == target:
        return fitting
    latest_first = sorted(chain(*oldest), reverse=True)
    chosen = latest_summing_to([group.size for group in latest_first], target)
    return [latest_first[index] for index in reversed(chosen)]


def can_sum(counts: Mapping[int, int], target: int) -> bool:
    """Return whether some of the groups (size -> how many) sum to exactly `target` rollouts."""
    return bool(sums(counts, target) >> target & 1)


def sums(counts: Mapping[int, int], target: int) -> int:
    """All that some of the groups sum to, up to `target`: bit s is set when s rollouts can be reached."""
    reached = 1
    for size, count in counts.items():
        for copies in _binary_parts(min(count, target // size)):
            reached = with_one_more(reached, copies * size, target)
    return reached


def _binary_parts(count: int) -> Iterator[int]:
    """1, 2, 4, ... and a rest: parts whose partial sums are exactly 0..count."""
    part = 1
    while count > 0:
        yield min(part, count)
        count -= part
        part *= 2


def indices_summing_to(sizes: Sequence[int], target: int) -> list[int]:
    """Rising indices whose `sizes` sum to exactly `target`; empty when none do.

    The greedy choice in order of arrival if it is exact; else the latest ones.
    """
    greedy: list[int] = []
    left = target
    for index, size in enumerate(sizes):
        if size <= left:
            greedy.append(index)
            left -= size
        if greedy and left == 0:
            return greedy
    return latest_summing_to(sizes, target)


def latest_summing_to(sizes: Sequence[int], target: int) -> list[int]:
    """As `indices_summing_to`, but the latest ones first. Of each size, no other than the last target // size can be
    chosen.
    """
    reached, takes = 1, {0: 0}  # how many of the first sizes each sum takes
    for count, size in enumerate(sizes, 1):
        more = with_one_more(reached, size, target)
        takes |= dict.fromkeys(_bits(more ^ reached), count)
        reached = more
    if target <= 0 or target not in takes:
        return []
    chosen: list[int] = []
    for index in reversed(range(len(sizes))):
        if takes.get(target - sizes[index], len(sizes)) <= index:
            chosen.append(index)
            target -= sizes[index]
    return chosen[::-1]


def with_one_more(reached: int, size: int, target: int) -> int:
    """The sums up to `target`, as bits, that the groups which reach those of `reached` and one more group do."""
    sums = reached | reached << size
    return sums if sums.bit_length() <= target + 1 else sums & (1 << target + 1) - 1


def _bits(number: int) -> Iterator[int]:
    """The places of the bits that are set."""
    while number:
        place = number.bit_length() - 1
        yield place
        number ^= 1 << place
