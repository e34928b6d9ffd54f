"""What is read of the API's record of who does what, in each case in which nothing happens."""

from typing import Any

import pytest

from atroposlib.clients.activity import EQUAL_SCORES, GRADER_FAILED, explain, is_silent, is_training
from atroposlib.wire.batching import Activity, EnvActivity, EnvReport


def waiting(environments: list[EnvActivity], **fields: Any) -> Activity:
    """A trainer that waits for a batch of 32 rollouts."""
    found: dict[str, Any] = {
        "trainer": True,
        "trainer_heard_s": 1.0,
        "asked_s": 1.0,
        "batch_size": 32,
        "current_step": 3,
        "num_steps": 20,
    }
    return Activity(**found | fields, environments=environments)


def environment(env_id: int | None = 0, heard_s: float | None = 2.0, *, connected: bool = True, **report: Any) -> Any:
    told = EnvReport("gsm8k", "p", **report)
    return EnvActivity("gsm8k_0", env_id, heard_s, 4, connected, told)


def test_no_trainer_has_registered() -> None:
    (line,) = explain(Activity(False))
    assert line.startswith("no trainer has registered: it loads its model or waits for vLLM")


def test_no_environment_is_registered() -> None:
    assert explain(waiting([])) == [
        "0 of 32 rollouts of the next batch have arrived; no environment is registered: start one, or see its log"
    ]


def test_an_environment_waits_for_vllm_that_loads() -> None:
    vllm = "the inference server at http://127.0.0.1:9001/v1 (connection refused)"
    head, line = explain(waiting([environment(None, waits_for=vllm, waited_s=35.2)]))
    assert head.endswith("no environment is registered: the started ones are not ready")
    assert line == f"environment gsm8k_0 (heard 2 s ago), not yet registered, waits for {vllm}, for 35 s"


def test_the_batch_fills() -> None:
    head, line = explain(waiting([environment(posted=27, in_flight=5)], waiting=12))
    assert head == "3 of 8 groups of the next batch have arrived"
    assert line == "environment gsm8k_0 (heard 2 s ago) samples 5 groups; 27 groups posted"


def test_what_was_thrown_away_and_what_failed_is_told() -> None:
    report = environment(posted=27, in_flight=5, thrown_away=12, failed={"timeout": 2, "scorer": 4})
    _, line = explain(waiting([report]))
    assert "27 groups posted, 12 sampled and thrown away; 6 rollouts failed (4 scorer, 2 timeout)" in line


def test_groups_of_several_sizes_are_counted_in_rollouts() -> None:
    other = EnvActivity("two", 1, 1.0, 8)
    head, _, line = explain(waiting([environment(in_flight=1), other], waiting=12))
    assert head == "12 of 32 rollouts of the next batch have arrived"
    assert line == "environment two (heard 1 s ago) sends no reports"


def test_all_groups_are_dropped_for_equal_scores() -> None:
    dropped = {EQUAL_SCORES: 40, "too long for the trainer": 2}
    _, line = explain(waiting([environment(in_flight=8, dropped=dropped, last_drop="all scores are 0")]))
    assert "samples 8 groups; dropped so far: 40 all scores equal, 2 too long for the trainer" in line
    assert "(the last: all scores are 0); every answer of a group scores the same, so there is nothing to learn" in line


def test_counts_are_those_since_the_last_group_that_was_posted() -> None:
    _, line = explain(waiting([environment(in_flight=8, posted=12, dropped={GRADER_FAILED: 7}, last_drop="no sympy")]))
    assert "12 groups posted; dropped since the last one that was posted: 7 the grader failed" in line
    assert line.endswith("(the last: no sympy); look for the grader's warnings in the environment's log")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"queue_full": True}, "the API's queue is full: it refuses groups until the trainer takes some"),
        ({"journal_error": "disk full"}, "the API takes no groups: disk full"),
        (
            {"waiting": 40, "obstacle": "no choice of whole groups sums to batch_size=32"},
            "10 of 8 groups of the next batch have arrived, but no choice of whole groups sums to batch_size=32",
        ),
        ({"trainer_heard_s": None, "asked_s": 500.0}, "the trainer has been silent for a long time: see its log"),
        ({"asked_s": None}, "the trainer has registered but not yet asked for a batch"),
        ({"asked_s": 42.0}, "the trainer has worked on a batch (step 3 of 20) for 42 s"),
        ({"asked_s": 42.0, "trained_steps": 2}, "the trainer has worked on a batch (step 3 of 20) for 42 s"),
        (
            {"asked_s": 42.0, "trained_steps": 3},
            "the trainer has done step 3 of 20 but not yet asked for the next batch: it waits for an evaluation, or "
            "writes a checkpoint (see its log)",
        ),
    ],
)
def test_what_the_api_knows_by_itself(fields: dict[str, Any], line: str) -> None:
    assert line in explain(waiting([environment()], **fields))


@pytest.mark.parametrize(
    ("gone", "line"),
    [
        (environment(heard_s=None), "has been silent for a long time: see its log, or start it again"),
        (environment(connected=False), "has disconnected"),
    ],
)
def test_an_environment_that_is_gone(gone: EnvActivity, line: str) -> None:
    assert explain(waiting([gone]))[1].endswith(line)


def test_one_that_was_started_again_is_not_asked_for_again() -> None:
    other, again = EnvActivity("gsm8k_1", 1, 1.0, 4), EnvActivity("gsm8k_2", 2, 1.0, 4)
    _, line, *_ = explain(waiting([environment(heard_s=None), other, again]))
    assert line == "environment gsm8k_0 has been silent for a long time: gsm8k_2 may have taken its place"
    _, line, _ = explain(waiting([environment(heard_s=None), EnvActivity("two_0", 1, 1.0, 4)]))
    assert line.endswith("see its log, or start it again")


def test_an_environment_that_ended_is_not_a_registered_one() -> None:
    assert (
        "no environment is registered: the earlier ones have ended"
        in explain(waiting([environment(connected=False)]))[0]
    )


def test_many_environments_are_cut() -> None:
    lines = explain(waiting([environment(number) for number in range(20)], more_environments=100))
    assert len(lines) == 10
    assert lines[-1] == "and 112 more environments"


def test_a_step_that_takes_long_is_no_wait_for_a_batch() -> None:
    assert is_training(waiting([], asked_s=42.0))
    assert not is_training(waiting([], asked_s=1.0))
    assert not is_training(Activity(False))


def test_what_a_silent_environment_said_last_is_not_told_as_if_it_were_true() -> None:
    stopped = environment(heard_s=33.0, waits_for="the trainer: on-policy: it trains", waited_s=5.0)
    _, line = explain(waiting([stopped]))
    assert line.startswith("environment gsm8k_0 has been silent for 33 s: it is stopped or hangs")
    assert "the trainer: on-policy" not in line


@pytest.mark.parametrize("asked_s", [1.0, 42.0])
def test_a_silent_trainer_is_not_told_to_be_at_work(asked_s: float) -> None:
    activity = waiting([environment()], trainer_heard_s=33.0, asked_s=asked_s)
    assert explain(activity)[0].startswith(
        "the trainer (step 3 of 20) has been silent for 33 s: it is stopped or hangs"
    )
    assert is_silent(activity)
    assert not is_silent(waiting([environment()], trainer_heard_s=5.0))
