"""The batching rules, against a plain list-based reading of what they promise."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.api.state import selection
from atroposlib.api.state.selection import (
    Group,
    Lanes,
    can_sum,
    choose_batch,
    exact_batch,
    indices_summing_to,
    packed_batch,
)

SIZES = st.lists(st.integers(1, 9), max_size=14)
POWERS = st.lists(st.sampled_from([1, 2, 4, 8]), max_size=24)
MINIMUMS = st.dictionaries(st.integers(0, 2), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=3)


def queue_of(sizes: list[int], envs: list[int | None] | None = None) -> list[Group[str]]:
    owners = envs or [None]
    return [Group(order, size, owners[order % len(owners)], f"group {order}") for order, size in enumerate(sizes)]


def packs_by_the_book(sizes: list[int], batch_size: int) -> list[int] | None:
    """Indices by the documented rule: equal sizes gathered to the largest size, packs in order of completion, exact
    total.
    """
    open_packs: dict[int, list[int]] = {}
    completed: list[int] = []
    for index, size in enumerate(sizes):
        open_packs.setdefault(size, []).append(index)
        if len(open_packs[size]) * size == max(sizes):
            completed += open_packs.pop(size)
    totals = list(itertools.accumulate(sizes[index] for index in completed))
    return completed[: totals.index(batch_size) + 1] if batch_size in totals else None


def oldest_by_the_book(sizes: list[int], batch_size: int) -> list[int] | None:
    """Of all index sets with the exact sum, the one that takes the oldest group, then the next oldest, ..."""
    exact = [
        chosen
        for count in range(1, len(sizes) + 1)
        for chosen in itertools.combinations(range(len(sizes)), count)
        if sum(sizes[index] for index in chosen) == batch_size
    ]
    return list(min(exact)) if exact else None


@given(POWERS, st.sampled_from([8, 16, 24, 32]))
def test_packs_are_taken_in_the_order_of_their_completion(sizes: list[int], batch_size: int) -> None:
    expected = packs_by_the_book(sizes, batch_size) if sizes else None
    chosen = packed_batch(Lanes(queue_of(sizes, [None, 0, 1])), batch_size)
    assert (None if chosen is None else [group.order for group in chosen]) == expected


@given(st.lists(st.integers(1, 6), max_size=9), st.integers(1, 20))
def test_the_exact_rule_finds_the_oldest_exact_batch_whenever_one_exists(sizes: list[int], batch_size: int) -> None:
    chosen = exact_batch(Lanes(queue_of(sizes, [None, 0])), batch_size)
    expected = oldest_by_the_book(sizes, batch_size)
    assert (None if chosen is None else [group.order for group in chosen]) == expected


def test_the_exact_rule_sums_each_group_a_few_times_however_many_fit_into_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even sizes beside one group that fills an odd batch alone: each was tried for itself against all others."""
    sums, with_one_more = itertools.count(), selection.with_one_more

    def counting(*given: int) -> int:
        next(sums)
        return with_one_more(*given)

    monkeypatch.setattr(selection, "with_one_more", counting)
    groups = queue_of([*range(2, 512, 2), 513])
    assert exact_batch(Lanes(groups), 513) == groups[-1:]
    assert next(sums) <= 4 * len(groups)


@given(SIZES, st.integers(1, 40), MINIMUMS, st.booleans())
def test_a_batch_is_exact_and_takes_whole_groups_from_the_heads_of_lanes(
    sizes: list[int], batch_size: int, minimums: dict[int, float], overtaken: bool
) -> None:
    groups = queue_of(sizes, [0, 1, 2, None])
    lanes = Lanes(groups)
    chosen = choose_batch(lanes, batch_size, minimums, overtaken=overtaken)
    if chosen is None:
        return
    assert sum(group.size for group in chosen) == batch_size
    assert len(set(chosen)) == len(chosen)
    assert lanes.take([group.order for group in chosen]) == chosen  # refuses what is not at the head
    assert lanes.groups == len(groups) - len(chosen)
    assert lanes.size == sum(sizes) - batch_size
    left = [group for _, lane in lanes.items() for group in lane]
    assert sorted(left + chosen) == groups


@given(st.lists(st.sampled_from([4]), min_size=4, max_size=20), st.sampled_from([0.25, 0.5, 0.75]))
def test_minimums_are_met_exactly_with_groups_of_one_size(sizes: list[int], share: float) -> None:
    chosen = choose_batch(Lanes(queue_of(sizes, [0, 1, 1, 1])), 16, {0: share})
    own = len(sizes[::4]) * 4
    if own >= 16 * share:
        assert chosen is not None
        assert sum(group.size for group in chosen if group.env_id == 0) >= 16 * share


@given(st.integers(1, 4), st.integers(1, 14), st.integers(1, 8), MINIMUMS)
def test_groups_of_one_size_meet_every_minimum_as_far_as_its_environment_has_groups(
    size: int, groups: int, batch_groups: int, minimums: dict[int, float]
) -> None:
    queue = queue_of([size] * groups, [0, 1, 2])
    batch_size = size * batch_groups
    required = {env_id: int(batch_size * share) for env_id, share in minimums.items()}
    chosen = choose_batch(Lanes(queue), batch_size, minimums)
    if chosen is None or sum(-(-sequences // size) * size for sequences in required.values()) > batch_size:
        return
    for env_id, sequences in required.items():
        queued = sum(group.size for group in queue if group.env_id == env_id)
        assert sum(group.size for group in chosen if group.env_id == env_id) >= min(sequences, queued)


def test_no_batch_without_a_group_of_an_environment_that_has_a_minimum() -> None:
    lanes = Lanes(queue_of([4, 4, 4, 4], [1]))
    assert choose_batch(lanes, 8, {0: 0.5}) is None
    assert choose_batch(lanes, 8, {0: 0.0}) is not None


def test_groups_without_an_environment_fill_a_batch_beside_a_minimum() -> None:
    chosen = choose_batch(Lanes(queue_of([4, 4, 4, 4], [None, None, None, 0])), 16, {0: 0.25})
    assert chosen is not None
    assert [group.order for group in chosen] == [3, 0, 1, 2]


def test_minimums_above_the_whole_batch_are_scaled_but_keep_a_group_each() -> None:
    chosen = choose_batch(Lanes(queue_of([2] * 12, [0, 1])), 8, {0: 0.9, 1: 0.6})
    assert chosen is not None
    assert [group.env_id for group in chosen] == [0, 0, 0, 1]  # 7 and 4 of 8 become 5 and 2, in whole groups


def test_odd_sizes_that_fill_no_pack_still_leave_together() -> None:
    chosen = choose_batch(Lanes(queue_of([3, 5, 8])), 16)
    assert chosen is not None
    assert [group.order for group in chosen] == [0, 1, 2]


def test_a_group_larger_than_the_batch_does_not_block_the_others() -> None:
    chosen = choose_batch(Lanes(queue_of([16, 4, 4])), 8)
    assert chosen is not None
    assert [group.order for group in chosen] == [1, 2]


def test_choosing_costs_no_walk_over_a_long_queue() -> None:
    class Counted(Group[str]):
        visited = 0

        @property
        def size(self) -> int:
            Counted.visited += 1
            return self[1]

    lanes = Lanes(Counted(order, 8, None, "") for order in range(20_000))
    Counted.visited = 0
    assert choose_batch(lanes, 64) is not None
    assert Counted.visited < 100


@given(st.dictionaries(st.integers(1, 7), st.integers(0, 4), max_size=4), st.integers(0, 30))
def test_can_sum_agrees_with_trying_every_count(counts: dict[int, int], target: int) -> None:
    every = itertools.product(*(range(count + 1) for count in counts.values()))
    assert can_sum(counts, target) == any(
        sum(n * size for n, size in zip(ns, counts, strict=True)) == target for ns in every
    )


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 25))
def test_indices_sum_to_the_target_whenever_some_subset_does(sizes: list[int], target: int) -> None:
    indices = indices_summing_to(sizes, target)
    possible = any(
        sum(subset) == target for count in range(1, len(sizes) + 1) for subset in itertools.combinations(sizes, count)
    )
    assert indices == sorted(set(indices))
    assert (sum(sizes[index] for index in indices) == target) if possible else not indices


def test_the_greedy_choice_comes_first_and_else_the_table_is_traced_from_the_end() -> None:
    assert indices_summing_to([1, 2, 1], 4) == [0, 1, 2]
    assert indices_summing_to([3, 1, 4], 5) == [1, 2]
    assert indices_summing_to([2, 4], 3) == []
    assert indices_summing_to([], 3) == []


def test_packs_leave_the_rest_and_a_minimum_takes_its_environments_groups_first() -> None:
    def chosen(groups: list[Group[str]], batch_size: int, minimums: dict[int, float]) -> list[int] | None:
        batch = packed_batch(Lanes(groups), batch_size, minimums)
        return None if batch is None else [group.order for group in batch]

    assert chosen(queue_of([8, 4, 8, 4]), 16, {}) == [0, 2]
    assert chosen(queue_of([4, 4]), 16, {}) is None
    of_two = queue_of([4] * 4, [0, 1])
    assert chosen(of_two, 8, {1: 1.0}) == [1, 3]
    assert chosen(of_two, 8, {}) == [0, 1]
