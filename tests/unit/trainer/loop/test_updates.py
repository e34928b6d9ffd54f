"""Several optimizer updates of one batch: how it is dealt, what each trains on, and what a bad one does."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.data.batching import Batch, Sequence, make_batch
from example_trainer.errors import BadBatch
from example_trainer.exact.check import Comparison
from example_trainer.loop.bad_data import BadBatches
from example_trainer.loop.learner import Learner
from example_trainer.loop.updates import Plan, Updates, deal_updates
from example_trainer.loss.metric import Metric, Metrics
from example_trainer.output.metrics import Row
from example_trainer.settings.config import TrainerConfig
from tests.unit.trainer.data.test_packing import make_sequence
from tests.unit.trainer.fakes import FakeApi, RecordingBridge, as_records, item
from tests.unit.trainer.whole_runs import config, rows, train, weights

MODEL = {"tie_word_embeddings": True, "initializer_range": 0.1}
ADVANTAGES = [1.0, -0.5, 0.25, -1.0, 0.75]
SEVERAL = Plan(updates_per_batch=2, epochs=2, seed=0, step=1)


def answers(*chosen: int) -> list[dict[str, Any]]:
    """Groups of one answer each, with an advantage of its own: a batch of some is a batch that could have come."""
    return [item([0.0], seed=index, advantages=[[ADVANTAGES[index]]]) for index in chosen or range(len(ADVANTAGES))]


def batch_of(groups: list[dict[str, Any]]) -> Batch:
    return make_batch(as_records(groups), seq_len=64, policy_version=0)


def of_rollouts(rollouts: list[int], silent_tokens: int = 0) -> Batch:
    """A batch of sequences with 1, 2, 3, ... trained tokens, each of the rollout that is given."""
    made = [
        make_sequence(place + 2, list(range(1, place + 2)), rollout=rollout) for place, rollout in enumerate(rollouts)
    ]
    batch = batch_of(answers(0))
    return replace(batch, sequences=made, loss_divisor=silent_tokens + sum(each.trained_tokens for each in made))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 3), st.integers(0, 10))
def test_each_epoch_has_every_sequence_once_and_no_rollout_is_cut(
    rollouts: list[int], updates: int, epochs: int, step: int
) -> None:
    batch = of_rollouts(rollouts)
    dealt = deal_updates(batch, Plan(updates, epochs, step=step))
    a_time = min(updates, len(set(rollouts)))
    assert len(dealt) == epochs * a_time
    for epoch in range(epochs):
        parts = dealt[epoch * a_time : (epoch + 1) * a_time]
        assert sorted(id(each) for part in parts for each in part.sequences) == sorted(map(id, batch.sequences))
        owners = [{each.rollout for each in part.sequences} for part in parts]
        assert sum(map(len, owners)) == len(set(rollouts))
        assert max(map(len, owners)) - min(map(len, owners)) <= 1
        assert all(part.loss_divisor == sum(each.trained_tokens for each in part.sequences) for part in parts)


def test_the_seed_and_the_step_decide_how_a_batch_is_dealt() -> None:
    batch = of_rollouts(list(range(12)))

    def dealt(plan: Plan) -> list[list[int]]:
        return [[each.rollout for each in part.sequences] for part in deal_updates(batch, plan)]

    assert dealt(SEVERAL) == dealt(SEVERAL)
    others = [replace(SEVERAL, seed=1), replace(SEVERAL, step=2)]
    assert all(dealt(other)[:2] != dealt(SEVERAL)[:2] for other in others)
    assert dealt(SEVERAL)[:2] != dealt(SEVERAL)[2:]
    assert all(part == sorted(part) for part in dealt(SEVERAL))


def test_tokens_without_a_signal_shrink_every_update_in_proportion() -> None:
    batch = of_rollouts([0, 1, 2, 3], silent_tokens=30)
    parts = deal_updates(batch, Plan(updates_per_batch=2))
    assert [part.loss_divisor for part in parts] == [
        4 * sum(s.trained_tokens for s in part.sequences) for part in parts
    ]
    assert sum(part.loss_divisor for part in parts) == batch.loss_divisor


def test_means_over_rollouts_are_dealt_by_rollouts() -> None:
    batch = replace(of_rollouts([0, 1, 1, 2]), loss_divisor=6)  # three more rollouts have no signal
    parts = deal_updates(batch, Plan(updates_per_batch=2, loss_mean="sequence"))
    assert [part.loss_divisor for part in parts] == [4, 2]


def test_two_updates_and_two_epochs_are_four_optimizer_steps_and_one_sync(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them is what a batch of its mini-batch alone does, bit for bit."""
    settings: dict[str, Any] = dict(training_steps=1, batch_size=5, warmup_steps=0, old_logprobs="sampler")
    after: list[dict[str, torch.Tensor]] = []
    update = Learner.update

    def watched(learner: Learner, rate: float) -> None:
        update(learner, rate)
        after.append({name: value.clone() for name, value in learner.trained.model.state_dict().items()})

    monkeypatch.setattr(Learner, "update", watched)
    bridge = RecordingBridge()
    train(
        model,
        tmp_path / "several",
        api=FakeApi(lambda n: answers()),
        bridge=bridge,
        updates_per_batch=2,
        epochs=2,
        **settings,
    )
    assert (len(after), bridge.versions) == (4, [0, 1])
    (row,) = rows(tmp_path / "several")
    assert (row["updates"], row["lr"]) == (4, 1e-2)
    assert row["grad_norm"] < row["grad_norm_max"]

    batch = batch_of(answers())
    first = [each.rollout for each in deal_updates(batch, SEVERAL)[0].sequences]
    assert len(first) == 3
    train(model, tmp_path / "first", api=FakeApi(lambda n: answers(*first)), **settings | {"batch_size": len(first)})
    alone = weights(tmp_path / "first" / "checkpoints" / "final_model")
    assert all(torch.equal(alone[name], after[0][name]) for name in alone)
    assert not any(torch.equal(alone[name], after[1][name]) for name in alone)


def test_the_rate_rises_from_update_to_update(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has its mean over the step's updates."""
    made: list[float] = []
    update = Learner.update

    def noted(learner: Learner, rate: float) -> None:
        made.append(rate)
        update(learner, rate)

    monkeypatch.setattr(Learner, "update", noted)
    settings: dict[str, Any] = dict(training_steps=2, batch_size=5, warmup_steps=5, lr=1e-3)
    train(model, tmp_path, api=FakeApi(lambda n: answers()), updates_per_batch=2, epochs=2, **settings)
    assert made == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, *[1e-3] * 4])
    assert [row["lr"] for row in rows(tmp_path)] == pytest.approx([5e-4, 1e-3])


def test_recomputed_ratios_leave_one_as_the_updates_go_on(model: str, tmp_path: Path) -> None:
    """In the second epoch the same tokens have another ratio, against the policy before the first update."""
    settings: dict[str, Any] = dict(training_steps=1, batch_size=5, epochs=2, warmup_steps=0, lr=1e-3)
    train(model, tmp_path, api=FakeApi(lambda n: answers()), **settings)
    (row,) = rows(tmp_path)
    assert row["ratio_mean"] != 1
    assert row["ratio_mean"] == pytest.approx(1, abs=0.2)


def test_a_row_of_several_updates_has_means_the_largest_and_of_the_sampler_the_first_figures(
    model: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = dict(training_steps=1, batch_size=5, warmup_steps=0, old_logprobs="sampler", dual_clip=0)
    for name, epochs in (("one", 1), ("two", 2)):
        train(model, tmp_path / name, api=FakeApi(lambda n: answers()), epochs=epochs, **settings)
    (first,), (both,) = rows(tmp_path / "one"), rows(tmp_path / "two")
    disagreement = ("logprob_diff_mean", "logprob_diff_max", "sampler_kl")
    assert [both[name] for name in disagreement] == [first[name] for name in disagreement]
    assert both["ratio_max"] >= first["ratio_max"]
    assert min(both["ratio_max"], both["grad_norm_max"]) > 0
    for name in ("loss", "entropy", "grad_norm", "ratio_mean"):
        assert both[name] != first[name]


def test_a_resumed_run_of_several_updates_ends_with_the_same_bits(model: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(updates_per_batch=2, epochs=2, training_steps=2, checkpoint_interval=1)
    batches = [answers(0, 1, 2), answers(2, 3, 4)]
    train(model, tmp_path / "straight", api=FakeApi(lambda n: batches[n]), **settings)
    with pytest.raises(KeyboardInterrupt):
        train(
            model,
            tmp_path / "resumed",
            api=FakeApi(lambda n: batches[n]),
            bridge=RecordingBridge(fail_at=2),
            **settings,
        )
    train(model, tmp_path / "resumed", api=FakeApi(lambda n: batches[1]), resume="latest", **settings)
    straight, resumed = (weights(tmp_path / name / "checkpoints" / "final_model") for name in ("straight", "resumed"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert [row["updates"] for row in rows(tmp_path / "resumed")] == [4, 8]


class FakeLearner(Learner):
    """Gradients with the norms that are given; it notes their results."""

    def __init__(self, *norms: float) -> None:
        self._norms = list(norms)
        self.did: list[str] = []
        self.comparison = Comparison()

    def gradients(self, sequences: list[Sequence], loss_divisor: float) -> Metrics:
        return {"loss": Metric("sum", loss_divisor), "kl": Metric("mean", 0.0, weight=0.0)}

    def clip(self) -> float:
        return self._norms.pop(0)

    def update(self, rate: float) -> None:
        self.did.append("update")

    def discard(self) -> None:
        self.did.append("discard")


def test_a_bad_mini_batch_makes_no_update_and_the_others_do() -> None:
    learner, bad = FakeLearner(math.inf, 1.0, math.nan, 3.0), BadBatches("skip", 3)
    updates = Updates(learner, bad, SEVERAL)
    updates.begin(of_rollouts([0, 1, 2, 3]), lambda comparison: {"checked": 1})
    assert learner.did == ["discard"]
    updates.make()
    assert learner.did == ["discard", "update", "discard", "update"]
    assert (updates.made, bad.total) == (2, 2)
    row = updates.row()
    assert (row["grad_norm"], row["grad_norm_max"], row["kl"], row["checked"]) == (2.0, 3.0, None, 1)


def test_a_bad_mini_batch_ends_the_run_where_that_is_asked_for() -> None:
    updates = Updates(FakeLearner(1.0, math.inf), BadBatches("stop", 3), SEVERAL)
    updates.begin(of_rollouts([0, 1]), lambda comparison: {})
    with pytest.raises(BadBatch, match="the gradient norm is inf"):
        updates.make()


def test_a_batch_of_another_model_makes_no_update_at_all() -> None:
    learner = FakeLearner(1.0, 1.0)

    def refuse(comparison: Comparison) -> Row:
        raise BadBatch("another model's")

    updates = Updates(learner, BadBatches("skip", 3), SEVERAL)
    updates.begin(of_rollouts([0, 1]), refuse)
    updates.make()
    assert (learner.did, updates.made, updates.row()) == (["discard"], 0, {})


def test_a_step_without_a_sequence_makes_no_update() -> None:
    learner = FakeLearner()
    updates = Updates(learner, BadBatches("stop", 0), SEVERAL)
    updates.begin(replace(of_rollouts([0]), sequences=[]), lambda comparison: {"tokens": 0})
    updates.make()
    assert (learner.did, updates.row()) == ([], {"tokens": 0})


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, "sampler"),
        ({"epochs": 2}, "recomputed"),
        ({"updates_per_batch": 2}, "recomputed"),
        ({"epochs": 2, "old_logprobs": "sampler"}, "sampler"),
        ({"old_logprobs": "recomputed"}, "recomputed"),
    ],
)
def test_several_updates_recompute_unless_told_otherwise(flags: dict[str, Any], found: str, tmp_path: Path) -> None:
    settings: TrainerConfig = config("m", tmp_path, "http://127.0.0.1:1", **flags)
    assert settings.old_logprobs == found


def test_more_updates_than_rollouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--updates-per-batch 9: a batch has 8 rollouts"):
        config("m", tmp_path, "http://127.0.0.1:1", updates_per_batch=9)
