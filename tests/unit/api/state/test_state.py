"""The state as changes: what holds after any sequence of them, and that a replay or a snapshot leads to the same
state.
"""

import contextlib
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atroposlib.api.state import changes
from atroposlib.api.state.changes import Change, PostedGroup, StoredGroup, decode_change, encode_change
from atroposlib.api.state.leases import Lease, LeaseBook
from atroposlib.api.state.queue import GroupTooLarge
from atroposlib.api.state.selection import Group, R
from atroposlib.api.state.staleness import SPARE, WaitingVersions
from atroposlib.api.state.state import MAX_ANSWERED, REFUSALS, RolloutState
from tests.unit.api.state.test_queue import env, run


def founded(*more: Change) -> RolloutState:
    state = RolloutState()
    for change in (changes.Founded("here"), *more):
        state.apply(change)
    return state


def registered(trainer: int = 1, batch_size: int = 8, **other: Any) -> changes.TrainerRegistered:
    return changes.TrainerRegistered(run(batch_size, **other), trainer)


def posted(first: int, *sizes: int, key: str | None = None, version: int | None = None) -> changes.GroupsPosted:
    return changes.GroupsPosted(first, [PostedGroup(size, None, version) for size in sizes], key)


def lend(state: RolloutState, trainer: int = 1) -> list[int] | None:
    """The ids of the next batch, on a lease."""
    delivery = state.next_delivery(trainer, max(state.leases, default=0) + 1)
    if delivery is None:
        return None
    state.apply(delivery[0])
    return [group.record.id for group in delivery[1]]


class AnyHistory(RuleBasedStateMachine):
    """Trainers and environments come, go and fall silent while groups are posted, lent, acknowledged, popped and
    dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: list[bytes] = []
        self.state = RolloutState()
        self.accepted: set[int] = set()
        self.done: list[int] = []  # acknowledged, popped, dropped, forgotten
        self.living: dict[int, list[int]] = {}  # lease -> ids, as the present trainer knows them
        self.trainer = 0
        self.next_id = 1
        self.leases_given = 0
        self.happen(changes.Founded("here"))

    def happen(self, change: Change) -> Any:
        self.history.append(encode_change(change))
        try:
            return self.state.apply(change)
        except REFUSALS as refusal:
            return refusal
        finally:
            self.gone = self.state.drain_released()

    @rule(batch_size=st.integers(4, 12), name=st.sampled_from(["a", "a", "b"]), data=st.data())
    def register(self, batch_size: int, name: str, data: st.DataObject) -> None:
        self.trainer += 1
        trained = data.draw(st.lists(st.sampled_from(sorted(self.living)), unique=True)) if self.living else []
        self.living = {}
        self.happen(changes.TrainerRegistered(run(batch_size, run=name, trained_leases=[*trained, 99]), self.trainer))
        self.done += self.gone

    @rule(size=st.integers(2, 6), minimum=st.sampled_from([None, 0.25]))
    def join(self, size: int, minimum: float | None) -> None:
        if self.state.queue.started:
            self.happen(changes.EnvironmentJoined(env(size, min_batch_allocation=minimum)))

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        known = list(self.state.queue.environments)
        chosen = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        self.happen(changes.EnvironmentsForgotten([*chosen, 99]))
        left = self.state.queue.environments
        assert list(left) == sorted({*known} - {*chosen})
        assert len({environment.name for environment in left.values()}) == len(known) - len(chosen)

    @rule(
        sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3), owner=st.none() | st.integers(0, 2), data=st.data()
    )
    def post(self, sizes: list[int], owner: int | None, data: st.DataObject) -> None:
        key = data.draw(st.none() | st.sampled_from(["k1", "k2", "k3"]))
        groups = [PostedGroup(size, owner, data.draw(st.none() | st.integers(0, 5))) for size in sizes]
        ids = range(self.next_id, self.next_id + len(sizes))
        self.next_id += len(sizes)
        known = key is not None and self.state.answered.get(key)
        answer = self.happen(changes.GroupsPosted(ids[0], groups, key))
        if known:
            assert answer == known
            assert self.gone == list(ids)
        elif isinstance(answer, GroupTooLarge):
            assert self.gone == list(ids)
        else:
            self.accepted |= set(ids)

    @rule(leased=st.booleans())
    def deliver(self, leased: bool) -> None:
        registration = self.state.queue.registration
        if registration is None:
            return
        self.happen(changes.TrainerPolled())
        self.leases_given += 1
        delivery = self.state.next_delivery(*((self.trainer, self.leases_given) if leased else ()))
        if delivery is None:
            return
        change, groups = delivery
        ids = [group.record.id for group in groups]
        assert sum(group.size for group in groups) == registration.batch_size
        assert not set(ids) & {identity for held in self.living.values() for identity in held}, (
            "delivered twice to a living trainer"
        )
        lease = self.happen(change)
        if leased:
            self.living[lease.lease_id] = ids
        else:
            assert sorted(self.gone) == sorted(ids)
            self.done += ids

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.living)))
        assert self.state.leases.known_to(self.trainer, [lease]) == [lease]
        self.happen(changes.LeasesAcknowledged([lease]))
        assert self.gone == self.living.pop(lease)
        self.done += self.gone

    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        """Of groups that a living trainer has, and of waiting ones."""
        dump = self.state.queue.dump()
        groups = [
            *dump.waiting,
            *dump.buffered,
            *(group for lease in self.state.leases.values() for group in lease.groups),
        ]
        if not groups:
            return
        chosen = data.draw(st.lists(st.sampled_from(groups), min_size=1, max_size=3, unique=True))
        ids = {group.record.id for group in chosen}
        rejected = self.happen(changes.GroupsRejected([group.order for group in chosen]))
        assert {group.record.id for group in rejected} == ids == set(self.gone)
        kept = {lease: [identity for identity in held if identity not in ids] for lease, held in self.living.items()}
        self.living = {lease: held for lease, held in kept.items() if held}
        self.done += self.gone

    @rule()
    def trainer_dies(self) -> None:
        self.happen(changes.LeasesReturned([lease.lease_id for lease in self.state.leases.held()]))
        self.living = {}

    @rule(version=st.integers(0, 6), limit=st.integers(0, 3))
    def grow_old(self, version: int, limit: int) -> None:
        self.happen(changes.TrainerReported(version, version))
        stale = self.state.stale(limit)
        if stale:
            dropped = self.happen(changes.GroupsDropped(stale))
            assert all(group.record.version < version - limit for group in dropped)
            assert len(dropped) == len(stale)
            self.done += self.gone
        assert self.state.stale(limit) == []

    @invariant()
    def every_accepted_group_is_in_one_place(self) -> None:
        kept = [group.record.id for _, group in self.state.groups()]
        assert sorted(kept + self.done) == sorted(self.accepted)

    @invariant()
    def a_replay_and_a_snapshot_lead_to_the_same_state(self) -> None:
        replayed, restored = RolloutState(), RolloutState()
        for change in self.history:
            with contextlib.suppress(*REFUSALS):
                replayed.apply(decode_change(change))
        restored.apply(decode_change(encode_change(self.state.snapshot())))
        expected = encode_change(self.state.snapshot())
        assert encode_change(replayed.snapshot()) == expected == encode_change(restored.snapshot())
        for other in (replayed, restored):
            assert [other.stale(limit) for limit in range(4)] == [self.state.stale(limit) for limit in range(4)]


TestAnyHistory = AnyHistory.TestCase


# --- leases ---------------------------------------------------------------------------------------------------------


def book_of(*leases: Lease[R]) -> LeaseBook[R]:
    return LeaseBook({lease.lease_id: lease for lease in leases})


def test_a_lease_is_known_to_the_trainer_that_holds_it_or_held_it_last() -> None:
    book: LeaseBook[None] = book_of(Lease(1, 5, []), Lease(2, 6, []), Lease(3, 5, [], returned=True))
    assert book.known_to(5, [3, 2, 1, 9, 1]) == [3, 1]
    assert book.known_to(6, [3, 2, 1]) == [2]
    assert book.known_to(7, [1, 2, 3]) == []
    assert [[lease.lease_id for lease in book.held(trainer)] for trainer in (5, 6, None)] == [[1], [2], [1, 2]]
    assert (book.reclaimable(5), book.reclaimable(6)) == ([3], [])


def test_what_was_lost_in_transit_is_the_oldest_that_its_own_trainer_does_not_name() -> None:
    book: LeaseBook[None] = book_of(Lease(1, 6, []), Lease(2, 5, [], returned=True), Lease(3, 5, []), Lease(4, 5, []))
    lost = [book.lost_in_transit(5, holding) for holding in ([], [3], [4], [3, 4])]
    assert [lease and lease.lease_id for lease in lost] == [3, 4, 3, None]


def test_the_batch_that_waits_is_the_oldest_returned_one_of_the_size_asked_for() -> None:
    def batch(lease_id: int, *sizes: int, returned: bool) -> Lease[None]:
        return Lease(lease_id, 5, [Group(order, size, None, None) for order, size in enumerate(sizes)], returned)

    book = book_of(batch(1, 4, returned=False), batch(2, 3, returned=True), batch(3, 2, 2, returned=True))
    found = [book.waiting(size) for size in (3, 4, 5)]
    assert [lease and lease.lease_id for lease in found] == [2, 3, None]


def test_a_batch_that_is_handed_over_is_its_new_trainer_s_alone() -> None:
    book: LeaseBook[None] = book_of(Lease(1, 5, []))
    assert [lease.lease_id for lease in book.give_back([1, 9])] == [1]
    assert book.give_back([1]) == []
    assert (book.known_to(5, [1]), book.held()) == ([1], [])
    book[1] = Lease(1, 6, [])
    assert (book.known_to(5, [1]), book.known_to(6, [1]), book.reclaimable(5)) == ([], [1], [])
    group = Group(0, 4, None, None)
    book[2] = Lease(2, 6, [group])
    assert book.close([1, 2, 9]) == [group]
    assert list(book) == []


def test_a_replaced_trainers_batches_are_lent_again_whole_and_in_order() -> None:
    state = founded(registered(1), posted(1, 3, 5, 4, 4, 2))
    first, second = lend(state), lend(state)
    assert (first, second, lend(state)) == ([1, 2], [3, 4], None)
    assert state.queue.current_step == 2
    state.apply(registered(2, starting_step=1))
    state.apply(posted(6, 8))
    assert [lend(state, 2) for _ in range(4)] == [first, second, [6], None]
    assert state.queue.current_step == 4


def test_a_trainer_that_resumes_gets_only_what_its_checkpoint_does_not_contain() -> None:
    state = founded(registered(1), posted(1, 8, 8))
    lend(state), lend(state)
    state.apply(registered(2, starting_step=1, trained_leases=[1]))
    assert state.drain_released() == [1]
    assert [lend(state, 2), lend(state, 2)] == [[2], None]


def test_a_batch_of_another_size_comes_apart_for_a_trainer_that_wants_other_batches() -> None:
    state = founded(registered(1), posted(1, 4, 4, 4, 4))
    assert lend(state) == [1, 2]
    state.apply(registered(2, batch_size=12))
    assert lend(state, 2) == [1, 2, 3]


def test_a_batch_whose_reply_was_lost_is_given_again_and_no_other_is() -> None:
    state = founded(registered(1), posted(1, 8, 8))
    lend(state), lend(state)
    first, second = state.leases.values()
    assert state.leases.lost_in_transit(1, []) is first
    assert state.leases.lost_in_transit(1, [first.lease_id]) is second
    assert state.leases.lost_in_transit(1, [first.lease_id, second.lease_id]) is None


def test_steps_count_what_the_present_trainer_was_given() -> None:
    state = founded(registered(1, starting_step=5), posted(1, 8, 8))
    lend(state), lend(state)
    assert state.queue.current_step == 7
    state.apply(changes.LeasesReturned([1, 2]))
    assert state.queue.current_step == 5
    state.apply(changes.LeasesTaken([1], 1))
    assert state.queue.current_step == 6
    assert state.leases.reclaimable(1) == [2]


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ({}, {}, True),
        ({}, {"starting_step": 3, "batch_size": 4}, True),
        ({}, {"wandb_group": "another"}, False),
        ({}, {"checkpoint_dir": "another"}, False),
        ({"run": "a"}, {"run": "a", "wandb_group": "another"}, True),
        ({"run": "a"}, {"run": "b"}, False),
        ({"run": "a"}, {}, False),
    ],
)
def test_groups_and_leases_of_another_run_are_forgotten(
    before: dict[str, Any], after: dict[str, Any], kept: bool
) -> None:
    state = founded(registered(1, **before), posted(1, 4, 4, 4))
    lend(state)
    forgotten = state.apply(registered(2, **after))
    assert forgotten == (0 if kept else 3)
    assert state.drain_released() == ([] if kept else [3, 1, 2])
    assert (lend(state, 2) is not None) == kept


def test_groups_that_came_before_the_first_trainer_are_kept() -> None:
    state = founded(posted(1, 8))
    assert state.apply(registered(1, run="a")) == 0
    assert lend(state) == [1]


# --- staleness and repeated posts -----------------------------------------------------------------------------------


def test_a_returned_batch_with_a_stale_group_comes_apart_and_loses_it() -> None:
    state = founded(registered(1), posted(1, 4, version=0), posted(2, 4, version=3), posted(3, 4, version=3))
    assert lend(state) == [1, 2]
    state.apply(changes.LeasesReturned([1]))
    state.apply(changes.TrainerReported(3, 3))
    state.apply(changes.GroupsDropped(state.stale(2)))
    assert state.drain_released() == [1]
    assert lend(state) == [2, 3]


def test_a_returned_batch_that_the_next_trainer_has_trained_on_is_never_stale() -> None:
    state = founded(registered(1), posted(1, 8, version=0))
    lend(state)
    state.apply(registered(2))
    state.apply(registered(3, trained_leases=[1]))
    state.apply(changes.TrainerReported(3, 3))
    assert state.drain_released() == [1]
    assert state.stale(0) == []  # it would be dropped again with every delivery


def test_versions_are_kept_of_waiting_groups_only() -> None:
    versions = WaitingVersions()
    groups = [Group(order, 1, None, StoredGroup(order, order)) for order in range(1000)]
    for group in groups:
        versions.add([group])
        if group.order >= 10:
            versions.discard([groups[group.order - 10]])
        assert len(versions._oldest_first) <= 2 * 10 + SPARE
    assert versions.before(995) == [990, 991, 992, 993, 994]


def test_a_repeated_post_gets_the_first_answer_and_is_stored_once() -> None:
    state = founded(registered(1), posted(1, 4, 4, key="k"))
    assert state.apply(posted(3, 4, 4, key="k")) == [None, None]
    assert lend(state) == [1, 2]
    assert lend(state) is None


def test_the_keys_that_are_remembered_are_bounded_and_the_latest() -> None:
    state = founded()
    for number in range(MAX_ANSWERED + 2):
        state.apply(posted(number + 1, 1, key=str(number)))
    assert state.answered.get("0") is state.answered.get("1") is None
    assert state.answered.get("2") == [None]
