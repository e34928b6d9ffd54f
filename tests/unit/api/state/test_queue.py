"""The state machine: registrations, buffering, delivery, status, evaluations. No server, no clock."""

import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import UNSET

from atroposlib.api.state.queue import (
    MAX_EVALUATION_METRICS,
    MAX_EVALUATIONS,
    MAX_OVERTAKEN,
    BatchQueue,
    Buffer,
    GroupTooLarge,
    NotRegistered,
    UnknownEnvironment,
)
from atroposlib.api.state.selection import Group, R, indices_summing_to
from atroposlib.wire.batching import EnvRegistration, Evaluation, Registration, TrainerStep
from tests.unit.hostile_answers.hostile import assert_linear


def run(batch_size: int = 8, **other: Any) -> Registration:
    fields: dict[str, Any] = {
        "wandb_group": "group",
        "wandb_project": "project",
        "max_token_len": 512,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 10,
    }
    return Registration(batch_size=batch_size, **{**fields, **other})


def env(group_size: int = 4, weight: float = 1.0, context: int = 512, **other: Any) -> EnvRegistration:
    return EnvRegistration(max_token_length=context, desired_name="math", weight=weight, group_size=group_size, **other)


def started(batch_size: int = 8, **other: Any) -> BatchQueue[str]:
    queue = BatchQueue[str]()
    queue.register(run(batch_size, **other))
    assert next_batch(queue) is None
    return queue


def post(queue: BatchQueue[str], *sizes: int, env_id: int | None = None) -> None:
    for size in sizes:
        queue.accept(size, env_id, f"{size}")


def next_batch(queue: BatchQueue[R]) -> list[R] | None:
    """Choose and take, as the API does."""
    chosen = queue.choose()
    return None if chosen is None else [group.record for group in queue.take([group.order for group in chosen])]


# --- what holds after every sequence of calls -----------------------------------------------------------------------


class AnySequenceOfCalls(RuleBasedStateMachine):
    """Posts, polls, joins, leaves and re-registrations in any order; the records are numbers in order of posting."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = BatchQueue[int]()
        self.size_of: dict[int, int] = {}
        self.delivered: list[int] = []
        self.env_of: dict[int, int | None] = {}

    @rule(batch_size=st.integers(4, 20), step=st.integers(0, 3))
    def register(self, batch_size: int, step: int) -> None:
        self.queue.register(run(batch_size, starting_step=step))

    @rule(size=st.integers(1, 8), minimum=st.sampled_from([None, None, 0.0, 0.25, 0.6]))
    def join(self, size: int, minimum: float | None) -> None:
        self.queue.register_env(env(size, min_batch_allocation=minimum))

    @precondition(lambda self: self.queue.environments)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.queue.disconnect_env(data.draw(st.integers(0, len(self.queue.environments) - 1)))

    @rule(size=st.integers(1, 9), env_id=st.none() | st.integers(-2, 4))
    def accept(self, size: int, env_id: int | None) -> None:
        number = len(self.size_of)
        try:
            self.queue.accept(size, env_id, number)
        except GroupTooLarge:
            assert self.queue.registration is not None
            assert size > self.queue.registration.batch_size
            return
        self.size_of[number] = size
        self.env_of[number] = env_id

    @rule()
    def poll(self) -> None:
        step = self.queue.current_step
        if self.queue.registration is None:
            with pytest.raises(NotRegistered):
                next_batch(self.queue)
            return
        batch = next_batch(self.queue)
        assert self.queue.current_step == step + (batch is not None)
        if batch is not None:
            assert sum(self.size_of[number] for number in batch) == self.queue.registration.batch_size
            self.delivered += batch

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        waiting = [group.record for _, lane in self.queue.lanes.items() for group in lane]
        buffered = [group.record for buffer in self.queue._buffers.values() for group in buffer]
        assert sorted(waiting + buffered + self.delivered) == sorted(self.size_of)

    @invariant()
    def counters_agree_with_a_count(self) -> None:
        lanes = self.queue.lanes
        groups = [group for _, lane in lanes.items() for group in lane]
        assert lanes.groups == self.queue.status().queue_size == len(groups)
        assert lanes.size == sum(group.size for group in groups)
        of_env: Counter[int | None] = Counter()
        for group in groups:
            of_env[group.env_id] += group.size
        assert lanes.size_of == of_env

    @invariant()
    def every_status_can_be_told(self) -> None:
        for environment in self.queue.environments.values():
            status = self.queue.env_status(environment.env_id)
            assert status.env_weight >= 0.01
            assert 0.0 <= status.unallocated_fraction <= 1.0
            assert 0 <= status.self_queue_size <= status.queue_size
        self.queue.obstacle()


TestAnySequenceOfCalls = AnySequenceOfCalls.TestCase


@given(st.lists(st.sampled_from([0, 1, None]), max_size=40), st.integers(1, 6))
def test_groups_of_one_size_are_delivered_in_the_order_of_arrival(
    owners: list[int | None], groups_per_batch: int
) -> None:
    queue = BatchQueue[int]()
    queue.register(run(4 * groups_per_batch))
    next_batch(queue)
    for _ in range(2):
        queue.register_env(env(4))
    delivered: list[int] = []
    for number, owner in enumerate(owners):
        queue.accept(4, owner, number)
        delivered += next_batch(queue) or []
    assert delivered == list(range(len(owners) // groups_per_batch * groups_per_batch))


def test_a_group_that_fits_is_overtaken_only_so_often() -> None:
    queue = started(batch_size=8)
    post(queue, 3, 5)
    batches = []
    for _ in range(MAX_OVERTAKEN + 2):
        post(queue, 8)
        batches.append(next_batch(queue))
    assert batches == [["8"]] * MAX_OVERTAKEN + [["3", "5"], ["8"]]


# --- registration ---------------------------------------------------------------------------------------------------


def test_groups_posted_before_the_trainer_registers_are_kept() -> None:
    queue = BatchQueue[str]()
    post(queue, 8)
    assert queue.register_env(env()) is None
    queue.register(run(8))
    assert queue.register_env(env()) is None
    assert next_batch(queue) == ["8"]
    assert queue.register_env(env()) is not None


def test_registering_again_takes_effect_and_keeps_the_groups() -> None:
    queue = started(batch_size=8)
    post(queue, 4)
    queue.register(run(4, starting_step=7))
    assert queue.current_step == 7
    assert next_batch(queue) == ["4"]
    assert queue.current_step == 8


def test_names_count_earlier_environments_of_the_same_name() -> None:
    queue = started()
    joined = [queue.register_env(env()) for _ in range(2)]
    assert [environment.name for environment in joined if environment] == ["math_0", "math_1"]


@pytest.mark.parametrize("env_id", [-1, 1, 2**60])
def test_ids_that_were_never_given_out_are_unknown(env_id: int) -> None:
    queue = started()
    queue.register_env(env())
    for call in (queue.disconnect_env, queue.env_status):
        with pytest.raises(UnknownEnvironment, match=f"{env_id}: 1 are registered"):
            call(env_id)


# --- buffering ------------------------------------------------------------------------------------------------------


def test_parts_of_a_group_leave_together_once_they_fill_the_group_size() -> None:
    queue = started(batch_size=8)
    queue.register_env(env(group_size=8))
    assert queue.accept(3, 0, "first")[0] == 3
    assert queue.accept(2, 0, "second")[0] == 5
    assert queue.status().queue_size == 0
    assert queue.accept(5, 0, "third")[0] == 2
    assert next_batch(queue) == ["first", "third"]
    assert queue.accept(8, 0, "whole")[0] is None


def test_a_huge_group_size_costs_nothing_before_as_many_rollouts_wait() -> None:
    queue = started(batch_size=8)
    queue.register_env(env(group_size=2**31 - 1))
    tracemalloc.start()
    try:
        assert [queue.accept(size, 0, "x")[0] for size in (3, 2, 5)] == [3, 5, 10]
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_groups_that_fill_no_size_take_linear_time() -> None:
    def post(sizes: str) -> None:
        queue = started(batch_size=1024)
        queue.register_env(env(group_size=65_535))
        for number in range(len(sizes)):
            queue.accept(2 + 2 * (number % 512), 0, "even")

    assert_linear(post, "x" * 4096)


@pytest.mark.parametrize("first", [4, 3])  # which fits, and which keeps the oldest from being exact
def test_groups_that_are_filled_beside_many_others_take_linear_time(first: int) -> None:
    def post(sizes: str) -> None:
        queue = started(batch_size=8)
        queue.register_env(env(group_size=6))
        for size in (first, *[4] * len(sizes), *[2] * len(sizes)):
            queue.accept(size, 0, "x")
        assert queue.status().queue_size == 2 * len(sizes)

    assert_linear(post, "x" * 6000)


@given(st.integers(1, 30), st.lists(st.integers(1, 31), max_size=30))
def test_parts_are_chosen_as_journals_were_written(target: int, sizes: list[int]) -> None:
    buffer: Buffer[None] = Buffer(target)
    left: list[Group[None]] = []
    for order, size in enumerate(sizes):
        left.append(Group(order, size, 0, None))
        buffer.append(left[-1])
        chosen = [left[index] for index in indices_summing_to([group.size for group in left], target)]
        assert buffer.take_exactly() == chosen
        left = [group for group in left if group not in chosen]
        assert (sorted(buffer), buffer.size) == (left, sum(group.size for group in left))


def test_a_choice_among_many_parts_takes_little_memory() -> None:
    queue = started(batch_size=1024)
    queue.register_env(env(group_size=65_536))
    tracemalloc.start()
    try:
        assert queue.accept(3, 0, "too much")[0] == 3
        left = [queue.accept(4, 0, "part")[0] for _ in range(16_384)][-1]
        assert (left, queue.status().queue_size) == (3, 16_384)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_a_group_above_its_environments_size_is_queued_rather_than_kept_for_ever() -> None:
    queue = started(batch_size=8)
    queue.register_env(env(group_size=4))
    assert queue.accept(8, 0, "large")[0] is None
    assert next_batch(queue) == ["large"]


def test_a_group_that_no_batch_can_hold_is_refused_with_both_sizes() -> None:
    queue = started(batch_size=8)
    with pytest.raises(GroupTooLarge, match="9 rollouts does not fit into a batch of 8"):
        queue.accept(9, None, "")


# --- status ---------------------------------------------------------------------------------------------------------


def test_env_status_counts_own_groups_and_what_others_leave_over() -> None:
    queue = started(batch_size=16)
    queue.register_env(env(group_size=4, min_batch_allocation=0.25))
    queue.register_env(env(group_size=8, min_batch_allocation=0.5))
    post(queue, 4, 4, env_id=0)
    post(queue, 8, 8, env_id=1)
    post(queue, 4)
    status = queue.env_status(0)
    assert (status.self_queue_size, status.max_group_size, status.unallocated_fraction) == (2, 8, 0.25)
    # own, the other beyond its minimum, the ownerless rounded up to a pack
    assert status.queue_size == (8 + (16 - 8) + 8) // 4


def test_weights_share_by_context_length_among_the_connected() -> None:
    queue = started()
    for context, weight in ((1000, 1.0), (3000, 1.0), (1000, 0.0)):
        queue.register_env(env(context=context, weight=weight))
    assert [queue.env_status(env_id).env_weight for env_id in range(3)] == [0.25, 0.75, 0.01]
    queue.disconnect_env(1)
    assert queue.env_status(0).env_weight == 1.0


@pytest.mark.parametrize(("weight", "expected"), [(-1.0, 1.0), (0.0, 0.01)])
def test_no_weight_divides_by_zero(weight: float, expected: float) -> None:
    queue = started()
    queue.register_env(env(weight=weight))
    assert queue.env_status(0).env_weight == expected
    queue.disconnect_env(0)
    assert queue.env_status(0).env_weight == expected


def test_an_obstacle_is_told_once_enough_rollouts_wait() -> None:
    queue = started(batch_size=10)
    post(queue, 8)
    assert next_batch(queue) is None
    assert queue.obstacle() is None
    post(queue, 8)
    assert next_batch(queue) is None
    assert "batch_size=10" in (queue.obstacle() or "")
    queue.register_env(env(min_batch_allocation=0.5))
    assert next_batch(queue) is None
    assert "math_0 must fill 50% of each batch but has no group waiting" in (queue.obstacle() or "")


# --- training progress and evaluations ------------------------------------------------------------------------------


def test_progress_is_absent_until_reported_and_again_after_a_new_registration() -> None:
    queue = started()
    queue.register_env(env())
    assert queue.status().policy_version is UNSET
    queue.report = TrainerStep(3, 4)
    assert (queue.status().trained_steps, queue.env_status(0).policy_version) == (3, 4)
    queue.register(run())
    assert queue.status().trained_steps is UNSET


def test_pending_names_connected_environments_that_announced_the_version() -> None:
    queue = started(num_steps=7)
    queue.register_env(env(steps_per_eval=5, eval_at_start=True))
    queue.register_env(env(steps_per_eval=2))
    queue.register_env(env())
    queue.register_env(env(steps_per_eval=-1))
    pending = {version: queue.evaluations(version).pending for version in range(8)}
    assert pending == {
        0: ["math_0"],
        1: [],
        2: ["math_1"],
        3: [],
        4: ["math_1"],
        5: ["math_0"],
        6: ["math_1"],
        7: ["math_0", "math_1"],
    }
    queue.disconnect_env(1)
    queue.add_evaluation(Evaluation(0, 7, 0.5, {"loss": 1.0}))
    found = queue.evaluations(7)
    assert found.pending == []
    assert [(result.env_name, result.accuracy, result.metrics) for result in found.results] == [
        ("math_0", 0.5, {"loss": 1.0})
    ]


def test_what_is_served_after_the_last_step_is_evaluated_and_a_run_may_end_early() -> None:
    queue = started(num_steps=7, says_done=True)
    queue.register_env(env(steps_per_eval=5))
    queue.register_env(env())
    assert queue.env_status(0).more_versions is True
    queue.report = TrainerStep(7, 8, weights_of=5)
    assert queue.evaluations(8).pending == ["math_0"]
    assert queue.env_status(0).weights_of == 5
    queue.report = TrainerStep(7, 8, done=True)
    assert queue.env_status(0).more_versions is False
    queue.report = TrainerStep(2, 2, num_steps=2)
    assert (queue.env_status(0).num_steps, queue.evaluations(2).pending) == (2, ["math_0"])
    after = BatchQueue[str](queue.instance)
    after.load(queue.dump())
    assert after.env_status(0) == queue.env_status(0)
    queue.register(run())  # another trainer, which says nothing of all this
    assert queue.env_status(0).more_versions is UNSET


def test_evaluations_with_many_metrics_are_bounded_together() -> None:
    queue = started()
    queue.register_env(env())
    metrics = {f"{number:0128}": 0.5 for number in range(256)}
    for version in range(1000):
        queue.add_evaluation(Evaluation(0, version, 0.5, metrics))
    kept = queue.dump().evaluations
    assert sum(len(one.metrics) for one in kept) == MAX_EVALUATION_METRICS
    assert kept[-1].policy_version == 999


def test_only_the_newest_evaluations_are_kept() -> None:
    queue = started()
    queue.register_env(env())
    for version in range(MAX_EVALUATIONS + 10):
        queue.add_evaluation(Evaluation(0, version, 0.5))
    assert len(queue.dump().evaluations) == MAX_EVALUATIONS
    assert not queue.evaluations(9).results
    assert queue.evaluations(10).results


def test_a_second_evaluation_replaces_the_first() -> None:
    queue = started()
    queue.register_env(env())
    queue.add_evaluation(Evaluation(0, 5, 0.5))
    queue.add_evaluation(Evaluation(0, 5, 0.75))
    assert [result.accuracy for result in queue.evaluations(5).results] == [0.75]


def test_a_resumed_run_keeps_the_evaluations_of_its_past_and_another_run_keeps_none() -> None:
    queue = started()
    queue.register_env(env())
    for version in (5, 6):
        queue.add_evaluation(Evaluation(0, version, 0.5))
    queue.register(run(starting_step=5))
    assert len(queue.evaluations(5).results) == 1
    assert not queue.evaluations(6).results
    queue.register(run(starting_step=5, wandb_group="another"))
    assert not queue.evaluations(5).results
