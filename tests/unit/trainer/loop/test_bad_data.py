"""A group that cannot be trained on is set aside, a bad batch makes no update; the run continues.

The 28 shapes are those that an attack posted to an API that took them all; 21 of them ended the run and every resume
after it.
"""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atroposlib.groups import Untrainable, check
from atroposlib.wire.batching import GroupRequirements
from example_trainer import grpo
from example_trainer.data.batching import make_batch
from example_trainer.errors import TrainerError
from example_trainer.loop.bad_data import Rejection, RejectionBudget
from example_trainer.settings.config import TrainerConfig
from tests.client import http
from tests.unit.trainer import whole_runs
from tests.unit.trainer.fakes import VOCAB, FakeApi, RecordingBridge, as_records, item, serve
from tests.unit.trainer.whole_runs import real_api, rows, weights

MODEL = {"tie_word_embeddings": True}
pytestmark = pytest.mark.usefixtures("one_thread")

Group = dict[str, Any]


def on_sampled(group: Group, name: str, value: float) -> Group:
    """`value` on one sampled token."""
    rows = [list(row) for row in group["inference_logprobs"]]
    rows[1][-1] = value
    return group | {name: rows}


def per_token(group: Group, value: float) -> list[list[float]]:
    return [[value] * len(row) for row in group["tokens"]]


def changed_first(rows: list[list[Any]], value: Any) -> list[list[Any]]:
    return [[value, *rows[0][1:]], *rows[1:]]


HOPELESS: dict[str, Callable[[Group], Group]] = {
    "no inference_logprobs": lambda g: g | {"inference_logprobs": None},
    "logprob -1e39": lambda g: on_sampled(g, "inference_logprobs", -1e39),
    "logprob -1e30": lambda g: on_sampled(g, "inference_logprobs", -1e30),
    "logprob +0.5": lambda g: on_sampled(g, "inference_logprobs", 0.5),
    "mask is not the token": lambda g: g | {"masks": [[-100] * 4 + [0] * (len(row) - 4) for row in g["tokens"]]},
    "advantages of another length": lambda g: g | {"advantages": [[1.0, 2.0]] * 2},
    "advantages of another count": lambda g: g | {"advantages": [[1.0]]},
    "advantage 1e30": lambda g: g | {"advantages": per_token(g, 1e30)},
    "advantage 1e39": lambda g: g | {"advantages": per_token(g, 1e39)},
    "scores whose sum overflows": lambda g: g | {"scores": [1.7e308, 1.6e308]},
    "overrides too short": lambda g: g | {"overrides": [{}]},
    "overrides too long": lambda g: g | {"overrides": [{}, {}, {"set_advantage_to_zero": True}]},
    "temperature hot": lambda g: g | {"generation_params": {"temperature": "hot"}},
    "temperature [1]": lambda g: g | {"overrides": [{}, {"temperature": [1]}]},
    "temperature 1e-320": lambda g: g | {"group_overrides": {"temperature": 1e-320}},
    "top_k x": lambda g: g | {"generation_params": {"top_k": "x"}},
    "staleness_weight x": lambda g: g | {"group_overrides": {"staleness_weight": "x"}},
    "staleness_weight 1e39": lambda g: g | {"group_overrides": {"staleness_weight": 1e39}},
    "ref_logprobs -1e39": lambda g: on_sampled(g, "ref_logprobs", -1e39),
    "id outside the vocabulary": lambda g: g | {"tokens": changed_first(g["tokens"], VOCAB)},
    "negative id": lambda g: g | {"tokens": changed_first(g["tokens"], -1)},
}
HARMLESS: dict[str, Callable[[Group], Group]] = {
    "empty optional lists": lambda g: g | {"advantages": [], "ref_logprobs": [], "overrides": [], "messages": []},
    "unknown keys": lambda g: g | {"difficulty": "high"},
    "nothing sampled": lambda g: g | {"masks": [[-100] * len(row) for row in g["tokens"]]},
    "one token each": lambda g: g | {"tokens": [[5], [6]], "masks": [[5], [6]], "inference_logprobs": [[0.0], [0.0]]},
    "advantages of zero": lambda g: g | {"advantages": [[0.0], [0.0]]},
    "equal scores": lambda g: g | {"scores": [1.0, 1.0]},
    "temperature 0": lambda g: g | {"generation_params": {"temperature": 0, "top_p": 1, "top_k": -1}},
    "penalties that change nothing": lambda g: (
        g | {"generation_params": {"min_p": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}}}
    ),
}
# What else a conversion or a sum would trip over.
FURTHER: dict[str, Callable[[Group], Group]] = {
    "logprob far out where masked": lambda g: g | {"inference_logprobs": changed_first(g["inference_logprobs"], -1e39)},
    "score 1e10 of one": lambda g: {k: v[:1] if isinstance(v, list) else v for k, v in g.items()} | {"scores": [1e10]},
    "temperature true": lambda g: g | {"generation_params": {"temperature": True}},
    "temperature -1": lambda g: g | {"generation_params": {"temperature": -1}},
    "temperature that vLLM raises": lambda g: g | {"generation_params": {"temperature": 0.009}},
    "temperature 10^400": lambda g: g | {"generation_params": {"temperature": 10**400}},
    "top_p 0": lambda g: g | {"generation_params": {"top_p": 0}},
    "top_p 2": lambda g: g | {"generation_params": {"top_p": 2.0}},
    "top_k 2^70": lambda g: g | {"generation_params": {"top_k": 2**70}},
    "top_k 1.5": lambda g: g | {"overrides": [{"top_k": 1.5}, {}]},
    "min_p": lambda g: g | {"generation_params": {"temperature": 1.0, "min_p": 0.1}},
    "repetition_penalty of one": lambda g: g | {"overrides": [{}, {"repetition_penalty": 1.1}]},
    "logit_bias": lambda g: g | {"group_overrides": {"logit_bias": {"5": -100}}},
    "finish_reasons too few": lambda g: g | {"finish_reasons": ["stop"]},
    "finish reason a number": lambda g: g | {"finish_reasons": ["stop", 1]},
    "failed for an unknown cause": lambda g: g | {"failed": {"bored": 1}},
    "failed -1": lambda g: g | {"failed": {"timeout": -1}},
    "failed a list": lambda g: g | {"failed": [1]},
    "policy version -1": lambda g: g | {"policy_versions": [[-1, 0], [0, 0]]},
    "policy versions backwards": lambda g: g | {"policy_versions": [[2, 1], [0, 0]]},
    "spans not from the start": lambda g: g | {"version_spans": [[[1, 0]], [[0, 0]]]},
    "spans backwards": lambda g: g | {"version_spans": [[[0, 0], [2, 1], [2, 2]], [[0, 0]]]},
    "a span of three": lambda g: g | {"version_spans": [[[0, 0, 0]], [[0, 0]]]},
    "a span of version -1": lambda g: g | {"version_spans": [[[0, -1]], [[0, 0]]]},
    "a sequence without a span": lambda g: g | {"version_spans": [[], [[0, 0]]]},
    "spans of one sequence": lambda g: g | {"version_spans": [[[0, 0]]]},
    "staleness_limit -1": lambda g: g | {"group_overrides": {"staleness_limit": -1}},
    "rollouts from 1": lambda g: g | {"rollouts": [1, 2]},
    "rollouts with a gap": lambda g: g | {"rollouts": [0, 2]},
    "rollouts true": lambda g: g | {"rollouts": [0, True]},
    "rollouts 1.0": lambda g: g | {"rollouts": [0, 1.0]},
    "rollouts too few": lambda g: g | {"rollouts": [0]},
    "rollouts a number": lambda g: g | {"rollouts": 1},
    "one rollout with two scores": lambda g: g | {"rollouts": [0, 0]},
    "ref_logprobs too few": lambda g: g | {"ref_logprobs": g["inference_logprobs"][:1]},
    "group_overrides a list": lambda g: g | {"group_overrides": [1]},
    "an override a string": lambda g: g | {"overrides": ["x", {}]},
    "tokens a string": lambda g: g | {"tokens": ["abc", "abcd"]},
    "tokens of strings": lambda g: g | {"tokens": [["a"], ["b"]]},
    "token 2^70": lambda g: g | {"tokens": changed_first(g["tokens"], 2**70)},
    "token 1.5": lambda g: g | {"tokens": changed_first(g["tokens"], 1.5)},
    "tokens null": lambda g: g | {"tokens": None},
    "no sequence": lambda g: g | {"tokens": [], "masks": [], "scores": []},
    "score null": lambda g: g | {"scores": [None, 1.0]},
    "score a list": lambda g: g | {"scores": [[1.0], 1.0]},
    "scores a number": lambda g: g | {"scores": 1.0},
    "logprob null": lambda g: on_sampled(g, "inference_logprobs", None),  # type: ignore[arg-type]
    "advantages a number": lambda g: g | {"advantages": 1.0},
    "not an object": lambda g: [g],  # type: ignore[dict-item,return-value]
}


def good(seed: int) -> Group:
    return item([1.0, 0.0], seed=100 + seed)


def shaped(name: str) -> Group:
    return (HOPELESS | HARMLESS | FURTHER)[name](item([1.0, 0.0], seed=7))


def config(model: str, folder: Path, url: str, **changes: Any) -> TrainerConfig:
    """With the usual bounds no batch is so bad."""
    short: dict[str, Any] = dict(training_steps=3, batch_size=4, checkpoint_interval=1, warmup_steps=0, eval_deadline=0)
    unbounded: dict[str, Any] = dict(mismatch_limit=1e3, dual_clip=0, log_ratio_limit=80)
    return whole_runs.config(model, folder, url, **short | unbounded | changes)


def post(url: str, *groups: Group) -> list[int]:
    """The HTTP status of each post, of the fields that are set."""
    bodies = [{key: value for key, value in group.items() if value is not None} for group in groups]
    return [http.post(url + "/scored_data", json=body, timeout=10).status_code for body in bodies]


@pytest.mark.rotating
@pytest.mark.parametrize("name", [*HOPELESS, *HARMLESS])
def test_no_shape_of_a_group_that_the_api_takes_ends_the_run_or_a_resume(model: str, tmp_path: Path, name: str) -> None:
    """Posted before the trainer, when anything goes; then to the API that knows what the trainer needs."""
    assert (len(HOPELESS), len(HARMLESS)) == (21, 8)
    with real_api() as url:
        assert post(url, good(1), good(2), good(3), shaped(name), *map(good, range(4, 9))) == [200] * 9
        with pytest.raises(KeyboardInterrupt):  # as if killed in the second step
            grpo.run(config(model, tmp_path, url), RecordingBridge(fail_at=2))
        assert post(url, shaped(name)) == [422 if name in HOPELESS else 200]
        grpo.run(config(model, tmp_path, url, resume="auto"), RecordingBridge())
        letters = http.get(url + "/dead-letters", timeout=10).json()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) and row["groups"] == 2 for row in rows(tmp_path))
    assert len(letters) == (name in HOPELESS)


@pytest.mark.parametrize("name", [*HOPELESS, *FURTHER])
def test_what_fails_the_check_is_left_out_of_the_batch(name: str) -> None:
    needs = GroupRequirements(vocab_size=VOCAB, trainable_only=True)
    batch = make_batch(as_records([good(1), shaped(name)]), seq_len=64, policy_version=0, needs=needs)
    assert list(batch.rejected) == [1]
    assert batch.groups == 1


def test_groups_from_an_api_that_checks_nothing_are_left_out_and_a_batch_of_them_alone_is_no_step(
    model: str, tmp_path: Path
) -> None:
    with serve(FakeApi(lambda n: [shaped("top_k x")] if n == 1 else [good(n), shaped("tokens null")])) as url:
        grpo.run(config(model, tmp_path, url, training_steps=2, checkpoint_interval=0), RecordingBridge())
    assert [(row["rejected_groups"], row["groups"]) for row in rows(tmp_path)] == [(1, 1), (2, 1)]
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path))


def test_a_negative_id_is_none_of_any_vocabulary() -> None:
    with pytest.raises(Untrainable, match=r"tokens\[0\]\[0\]: -1 is not an id of any vocabulary"):
        check(shaped("negative id"), GroupRequirements(trainable_only=True))


@pytest.mark.parametrize("value", [10**400, ["x"] * 3, "[" * 400], ids=["a huge integer", "a list", "brackets"])
def test_fields_that_are_not_trained_on_may_hold_anything_the_api_reads(model: str, tmp_path: Path, value: Any) -> None:
    with real_api() as url:
        assert post(url, good(1) | {"generation_params": {"note": value}}, good(2)) == [200, 200]
        grpo.run(config(model, tmp_path, url, training_steps=1), RecordingBridge())
    assert rows(tmp_path)[0]["groups"] == 2


def test_what_the_trainer_rejects_is_kept_by_the_api_with_environment_and_reason(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the API's check knew less than the trainer's; then API and trainer are restarted."""
    journal = tmp_path / "journal.db"
    bad = shaped("logprob +0.5")

    def environment() -> None:
        joined: dict[str, Any] = {}
        while joined.get("status") != "success":
            announced = dict(desired_name="dice", weight=1.0, max_token_length=64, group_size=2)
            joined = http.post(url + "/register-env", json=announced, timeout=10).json()
        mine = [group | {"env_id": joined["env_id"]} for group in (good(1), bad, bad)]
        post(url, *mine, shaped("negative id"), *map(good, range(2, 8)))

    with monkeypatch.context() as patch:
        patch.setattr("atroposlib.api.groups.group_checks.check", lambda group, needs: None)
        with real_api(journal=journal) as url:
            threading.Thread(target=environment, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                grpo.run(config(model, tmp_path, url), RecordingBridge(fail_at=2))
            assert http.get(url + "/status", timeout=10).json()["rejected_groups"] == 3
            metrics = http.get(url + "/metrics", timeout=10).text
    assert 'atropos_groups_rejected_total{found_by="trainer"} 3.0' in metrics
    assert "environment dice_0: inference_logprobs[1]" in caplog.text
    with real_api(journal=journal) as url:
        grpo.run(config(model, tmp_path, url, resume="auto"), RecordingBridge())
        letters = http.get(url + "/dead-letters?groups=true", timeout=10).json()
    assert sorted(letter["environment"] for letter in letters) == ["dice_0", "dice_0", "unknown"]
    assert letters[-1]["group"]["tokens"] == bad["tokens"]
    assert letters[-1]["reason"].startswith("inference_logprobs[1]")
    assert [row["rejected_groups"] for row in rows(tmp_path)] == [1, 0, 0]


# --- budgets --------------------------------------------------------------------------------------------------


def test_many_groups_that_cannot_be_trained_on_end_the_run_with_the_environment(model: str, tmp_path: Path) -> None:
    bad = shaped("logprob +0.5") | {"env_id": 3}
    with serve(FakeApi(lambda n: [good(n), bad])) as url:
        says = r"3 of the last 6 groups .*\(limit 2, --max-rejected-groups\); 3 of them .*env_id 3.*0.5 is no"
        with pytest.raises(TrainerError, match=says):
            grpo.run(config(model, tmp_path, url, training_steps=9, max_rejected_groups=2), RecordingBridge())
    assert len(rows(tmp_path)) == 2


def test_groups_that_the_api_set_aside_count_too(model: str, tmp_path: Path) -> None:
    with real_api() as url:
        post(url, *[shaped("negative id")] * 5, good(1), good(2))
        with pytest.raises(
            TrainerError,
            match=r"5 of the last 5 groups cannot be trained on \(limit 4, .*tokens\[0\]\[0\]: -1 is not an id",
        ):
            grpo.run(config(model, tmp_path, url, max_rejected_groups=4), RecordingBridge())
        assert len(http.get(url + "/dead-letters", timeout=10).json()) == 5  # they do not come again


def test_the_budget_is_of_the_last_hundred_groups() -> None:
    budget = RejectionBudget(2)
    for _ in range(3):
        budget.note([Rejection("a", "no")])
        budget.note([], trainable=60)
    budget.note([Rejection("a", "no")])
    with pytest.raises(TrainerError, match="3 of the last 100 groups"):
        budget.note([Rejection("a", "no")])
    assert budget.total == 5


# --- batches --------------------------------------------------------------------------------------------------


def impossible(seed: int) -> Group:
    """Passes every check, and gives a gradient that is not finite: the sampler's probabilities are as good as 0."""
    group = good(seed)
    rows = [[value if value == 1.0 else -75.0 for value in row] for row in group["inference_logprobs"]]
    return group | {"inference_logprobs": rows}


def test_a_bad_batch_is_skipped_and_leaves_weights_moments_and_warm_up(model: str, tmp_path: Path) -> None:
    """Steps 2 and 3 of four are bad: the result is that of steps 1 and 4 alone."""

    def train(folder: str, batches: list[Group], **changes: Any) -> Path:
        with serve(FakeApi(lambda n: [batches[n]])) as url:
            settings = dict(training_steps=len(batches), checkpoint_interval=0, warmup_steps=3) | changes
            grpo.run(config(model, tmp_path / folder, url, **settings), RecordingBridge())
        return tmp_path / folder

    with_bad = train("bad", [good(1), impossible(2), impossible(3), good(4)])
    without = train("good", [good(1), good(4)])
    found = rows(with_bad)
    assert [row["bad_batches"] for row in found] == [0, 1, 2, 2]
    assert [row["updates"] for row in found] == [1, 1, 1, 2]
    assert [row["loss"] is None for row in found] == [False, True, True, False]
    assert [row["policy_version"] for row in found] == [1, 2, 3, 4]
    final = Path("checkpoints", "final_model")
    expected = weights(without / final)
    assert all(torch.equal(value, expected[name]) for name, value in weights(with_bad / final).items())


@pytest.mark.parametrize(
    ("changes", "done", "says"),
    [
        (dict(on_bad_batch="stop"), 0, r"\(--on-bad-batch stop; use skip to skip such a batch\)"),
        (dict(max_bad_batches=1), 1, r"\(2 batches in a row; --max-bad-batches 1\)"),
        (dict(), 3, r"\(4 batches in a row; --max-bad-batches 3\)"),
    ],
)
def test_bad_batches_end_the_run_when_told_or_when_there_are_too_many(
    model: str, tmp_path: Path, changes: dict[str, Any], done: int, says: str
) -> None:
    with (
        serve(FakeApi(lambda n: [impossible(n)])) as url,
        pytest.raises(TrainerError, match=rf"the gradient norm is (nan|inf); the weights were not changed.*{says}"),
    ):
        grpo.run(config(model, tmp_path, url, training_steps=9, **changes), RecordingBridge())
    assert len(rows(tmp_path)) == done


def test_a_batch_of_another_model_s_log_probabilities_among_others_is_skipped(model: str, tmp_path: Path) -> None:
    group = good(1)
    far = group | {
        "inference_logprobs": [[v if v == 1.0 else -50.0 for v in row] for row in group["inference_logprobs"]]
    }
    with serve(FakeApi(lambda n: [far if n == 0 else good(n)])) as url:
        grpo.run(
            config(model, tmp_path, url, training_steps=2, mismatch_limit=20.0, checkpoint_interval=0),
            RecordingBridge(),
        )
    assert [row["loss"] is None for row in rows(tmp_path)] == [True, False]
