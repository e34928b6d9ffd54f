from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.base import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.run.pacing import SURPLUS_PATIENCE_S, EvaluationSchedule, batch_share, plan
from atroposlib.wire.batching import EnvStatus


def groups(status: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **situation: Any) -> int:
    """Groups to start with groups of 8 in batches of 64, i.e. 8 a batch."""
    figures: dict[str, Any] = {"current_step": 0, "queue_size": 0} | (status or {})
    settings = {"group_size": 8, "max_batches_offpolicy": 1} | (config or {})
    defaults: dict[str, Any] = dict(
        batch_size=64, total_steps=10, in_flight=0, max_workers=100, evaluating=False, idle_s=0.0
    )
    return plan(BaseEnvConfig(**settings), EnvStatus(**figures), **defaults | situation).start


@pytest.mark.parametrize(
    ("limit", "queued", "in_flight", "expected"),
    [
        (1, 0, 0, 8),
        (1, 3, 2, 3),
        (1, 8, 0, 0),
        (1, 4, 4, 0),
        (1, 20, 0, 0),
        (3, 0, 0, 24),
        (3, 8, 8, 8),
        (0, 0, 0, 8),
        (0, 5, 2, 1),
    ],
)
def test_queued_and_in_flight_fill_the_limit(limit: int, queued: int, in_flight: int, expected: int) -> None:
    assert groups({"queue_size": queued}, {"max_batches_offpolicy": limit}, in_flight=in_flight) == expected


@given(st.integers(0, 5), st.integers(0, 60), st.integers(0, 60), st.integers(1, 60))
def test_limits_are_never_exceeded(limit: int, queued: int, in_flight: int, workers: int) -> None:
    started = groups({"queue_size": queued}, {"max_batches_offpolicy": limit}, in_flight=in_flight, max_workers=workers)
    assert started >= 0
    assert started == 0 or queued + in_flight + started <= max(1, limit) * 8
    assert started == 0 or in_flight + started <= workers


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [(0, 8, 4), (0, 4, 4), (1, 8, 3), (4, 8, 0)],
)
def test_groups_of_others_never_fill_an_environments_least_share(own: int, others: int, expected: int) -> None:
    """Else no batch would ever be formed, which takes that share."""
    status = {"queue_size": own + others, "self_queue_size": own, "unallocated_fraction": 0.0}
    assert groups(status, {"min_batch_allocation": 0.5}) == expected


def test_dynamic_sampling_has_more_in_flight_within_its_limit() -> None:
    queued = {"queue_size": 6}
    assert groups(queued, in_flight=1) == 1
    assert groups(queued, in_flight=1, oversampling=2.5) == 4
    assert groups(queued, in_flight=1, oversampling=2.5, max_workers=3) == 2
    assert groups(queued, in_flight=1, oversampling=2.5, may_begin=3) == 3
    assert groups(queued, in_flight=1, oversampling=2.5, may_begin=0) == 0
    assert groups(queued, in_flight=1, oversampling=2.5, sending=1) == 2
    assert groups({"queue_size": 8}, oversampling=2.5) == 0


def test_groups_of_others_fill_what_is_nobodys_least_share() -> None:
    status = {"queue_size": 3, "self_queue_size": 0, "unallocated_fraction": 0.25}
    assert groups(status, {"min_batch_allocation": 0.5}) == 6 - 2
    assert groups(status | {"queue_size": 1}, {"min_batch_allocation": 0.5}) == 6 - 1
    assert groups(status) == 2 - 2


def test_on_policy_waits_for_delivered_batches_to_be_trained() -> None:
    on_policy = {"max_batches_offpolicy": 0}
    assert groups({"current_step": 3, "trained_steps": 2}, on_policy) == 0
    assert groups({"current_step": 3, "trained_steps": 3}, on_policy) == 8
    assert groups({"current_step": 3}, on_policy) == 8  # a trainer that does not say
    assert groups({"current_step": 3, "trained_steps": 2}) == 8


def test_evaluation_stops_limits_or_leaves_sampling() -> None:
    def while_evaluating(handling: EvalHandlingEnum) -> int:
        return groups(config={"eval_handling": handling, "eval_limit_ratio": 0.25}, evaluating=True, max_workers=8)

    assert [while_evaluating(handling) for handling in EvalHandlingEnum] == [0, 2, 8]


def test_nothing_is_sampled_for_a_trainer_that_has_its_last_batch_unless_it_seems_to_have_lost_it() -> None:
    assert groups({"current_step": 10}) == 0
    assert groups({"current_step": 10}, idle_s=SURPLUS_PATIENCE_S) == 8


def test_unknown_batch_size_starts_nothing() -> None:
    assert groups(batch_size=-1) == 0


def test_share_of_the_batch_bounds_an_environment_beside_others() -> None:
    assert batch_share(64, 0.5, None) == 32
    assert batch_share(64, 0.5, 0.25) == 48
    assert groups({"unallocated_fraction": 0.5}) == 4
    assert groups({"unallocated_fraction": 0.0}) == 1  # a group larger than the share still has to come from somewhere


def test_schedule_is_what_was_announced() -> None:
    schedule = EvaluationSchedule(5, 13, at_start=False)
    assert [version for version in range(14) if schedule.is_due(version)] == [5, 10, 13]
    assert EvaluationSchedule(5, 13, at_start=True).is_due(0)
    assert not any(EvaluationSchedule(None, 13, at_start=False).is_due(version) for version in range(14))


def test_each_version_is_due_once_and_of_several_the_newest() -> None:
    schedule = EvaluationSchedule(5, 100, at_start=True)
    assert [schedule.advance(version) for version in (0, 0, 4, 5, 5, 6, 21, 21)] == [
        0,
        None,
        None,
        5,
        None,
        None,
        20,
        None,
    ]


def test_joining_late_evaluates_the_served_version_only() -> None:
    assert EvaluationSchedule(5, 100, at_start=True).advance(12) is None
    assert EvaluationSchedule(5, 100, at_start=True).advance(10) == 10


def test_trainer_that_goes_back_is_evaluated_again() -> None:
    schedule = EvaluationSchedule(5, 100, at_start=False)
    schedule.advance(12)
    assert schedule.went_back(9)
    assert [schedule.advance(version) for version in (9, 10, 11)] == [None, 10, None]
