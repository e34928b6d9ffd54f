"""Whole runs on offline data: alone, resumed, and beside what is sampled."""

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from example_trainer import grpo
from example_trainer.data.offline import OfflineDataError
from example_trainer.errors import TrainerError
from example_trainer.loop import learner
from example_trainer.loop.learner import Learner
from example_trainer.loop.offline import OfflineData
from example_trainer.loss.metric import Metrics
from example_trainer.model.policy import Policy
from example_trainer.weights.load import start_policy
from tests.unit.trainer.fakes import FakeApi, item, model_folder
from tests.unit.trainer.whole_runs import config, rows, train, weights

MODEL: dict[str, Any] = {"vocab_size": 300, "tie_word_embeddings": True, "initializer_range": 0.1}
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("talker")
    model_folder(folder, **MODEL)
    save_tiny_tokenizer(folder)
    return str(folder)


@pytest.fixture
def demonstrations(tmp_path: Path) -> Path:
    return written(tmp_path / "sft.jsonl", [{"prefix": f"{n}+1=", "completion": f"{n + 1}."} for n in range(8)])


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    lines = [{"prefix": f"{n}+1=", "pos": f"{n + 1}.", "neg": f"{n}!"} for n in range(8)]
    return written(tmp_path / "dpo.jsonl", lines)


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fine_tune(model: str, folder: Path, data: Path, **changes: Any) -> list[dict[str, Any]]:
    grpo.run(config(model, folder, NOWHERE, offline_data=data, offline_share=1, **changes))
    return rows(folder)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "metric"), [("demonstrations", "sft_loss"), ("pairs", "dpo_loss")])
def test_a_model_learns_what_a_file_shows_without_api_and_vllm_and_resumes_with_the_same_bits(
    talker: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: str,
    metric: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, settings = request.getfixturevalue(kind), dict(training_steps=6, checkpoint_interval=3, batch_size=4)
    straight = fine_tune(talker, tmp_path / "straight", data, **settings)
    assert straight[-1][metric] < straight[0][metric] * 0.75
    assert [row["updates"] for row in straight] == list(range(1, 7))
    assert "Step 6/6 | " + metric.replace("_", " ") in capsys.readouterr().out
    fine_tune(talker, tmp_path / "two", data, **settings | {"training_steps": 3})
    (tmp_path / "two/checkpoints/final_model").rename(tmp_path / "first half")
    resumed = fine_tune(talker, tmp_path / "two", data, **settings, resume="latest")
    assert [row[metric] for row in resumed] == [row[metric] for row in straight]
    expected, found = (weights(tmp_path / name / "checkpoints/final_model") for name in ("straight", "two"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    with pytest.raises(TrainerError, match="has done 6 of 6 steps: raise --training-steps"):
        fine_tune(talker, tmp_path / "two", data, **settings, resume="latest")


@pytest.mark.usefixtures("one_thread")
def test_pairs_that_a_resumed_run_does_not_use_again_change_no_bit_of_the_others(talker: str, tmp_path: Path) -> None:
    """What the start model is asked together is rounded together."""
    lines = [{"prefix": f"{n}=", "pos": f"{n} {'yes' * (n % 7)}.", "neg": f"{n}{'!' * (n % 5)}?"} for n in range(16)]
    data = written(tmp_path / "dpo.jsonl", lines)
    settings: dict[str, Any] = {"checkpoint_interval": 1, "batch_size": 4, "micro_batch_tokens": 64}
    straight = fine_tune(talker, tmp_path / "straight", data, training_steps=5, **settings)
    fine_tune(talker, tmp_path / "two", data, training_steps=2, **settings)
    resumed = fine_tune(talker, tmp_path / "two", data, training_steps=5, resume="latest", **settings)
    assert [row["dpo_loss"] for row in resumed] == [row["dpo_loss"] for row in straight]
    expected, found = (weights(tmp_path / name / "checkpoints/final_model") for name in ("straight", "two"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("kind", ["demonstrations", "pairs"])
def test_a_run_without_its_trained_model_writes_it(
    talker: str, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    data, settings = request.getfixturevalue(kind), dict(training_steps=1, checkpoint_interval=1)
    fine_tune(talker, tmp_path, data, **settings)
    final = tmp_path / "checkpoints/final_model"
    made = final.rename(tmp_path / "made")
    fine_tune(talker, tmp_path, data, **settings, resume="latest")
    expected, found = weights(made), weights(final)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # one whole model, or ranks' parts
def test_a_resumed_adapter_reads_the_file_by_the_tokenizer_of_its_model(
    talker: str, tmp_path: Path, pairs: Path, dtype: str
) -> None:
    settings = dict(weight_bridge_mode="lora_only", compute_dtype=dtype, batch_size=4, checkpoint_interval=1)
    straight = fine_tune(talker, tmp_path / "straight", pairs, training_steps=2, **settings)
    fine_tune(talker, tmp_path / "two", pairs, training_steps=1, **settings)
    resumed = fine_tune(talker, tmp_path / "two", pairs, training_steps=2, resume="latest", **settings)
    assert [row["offline_tokens"] for row in resumed] == [row["offline_tokens"] for row in straight]


def test_a_resumed_run_gives_the_memory_of_the_start_model_back(
    talker: str, tmp_path: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which malloc would keep for the trainer, whose steps need less."""
    fine_tune(talker, tmp_path, pairs, training_steps=1, checkpoint_interval=1)
    loaded, is_gone, load = list[weakref.ref[object]](), list[bool](), start_policy

    def start(*given: Any) -> Policy:
        policy = load(*given)
        loaded.append(weakref.ref(policy.model))
        return policy

    monkeypatch.setattr(learner, "start_policy", start)
    monkeypatch.setattr(learner, "give_back_freed_memory", lambda: is_gone.extend(each() is None for each in loaded))
    fine_tune(talker, tmp_path, pairs, training_steps=2, resume="latest")
    assert is_gone == [True]


def test_better_answers_can_be_learned_alone(talker: str, tmp_path: Path, pairs: Path, demonstrations: Path) -> None:
    found = fine_tune(talker, tmp_path / "one", pairs, offline_objective="sft", training_steps=1)
    same = fine_tune(talker, tmp_path / "two", demonstrations, training_steps=1)
    assert found[0]["sft_loss"] == same[0]["sft_loss"]
    with pytest.raises(OfflineDataError, match=r"--offline-objective dpo needs pairs, and .*sft.jsonl:1 is"):
        fine_tune(talker, tmp_path / "three", demonstrations, offline_objective="dpo")


def test_a_model_without_a_tokenizer_reads_no_text(model: str, tmp_path: Path, demonstrations: Path) -> None:
    with pytest.raises(OfflineDataError, match="has no tokenizer; give a model with one"):
        fine_tune(model, tmp_path, demonstrations)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"offline_share": 0.5}, "--offline-share 0.5 is a share of no data: give --offline-data FILE"),
        ({"offline_data": __file__}, "nothing is trained on it; give --offline-share"),
        ({"offline_share": 1.5, "offline_data": __file__}, "less than or equal to 1"),
        ({"offline_share": 0.5, "offline_data": "/no/such/file"}, "does not point to a file"),
    ],
)
def test_data_and_share_belong_together(model: str, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(model, tmp_path, NOWHERE, **changes)


@pytest.mark.parametrize("penalty", ["kl_coef", "entropy_coef"])
def test_penalties_of_rollouts_are_refused_without_any(
    talker: str, tmp_path: Path, demonstrations: Path, penalty: str
) -> None:
    with pytest.raises(TrainerError, match=f"--{penalty.replace('_', '-')} 0.1 acts on rollouts"):
        fine_tune(talker, tmp_path, demonstrations, **{penalty: 0.1})


def test_beside_rollouts_each_has_its_share_of_the_loss(talker: str, tmp_path: Path, demonstrations: Path) -> None:
    settings: dict[str, Any] = dict(training_steps=1, warmup_steps=0, max_grad_norm=1e9)
    mixed = dict(offline_data=demonstrations, offline_share=0.25)

    def row(name: str, **changes: Any) -> dict[str, Any]:
        train(talker, tmp_path / name, **settings, **changes)
        return rows(tmp_path / name)[0]

    alone, both = row("alone"), row("both", **mixed)
    offline = fine_tune(talker, tmp_path / "offline", demonstrations, **settings | {"batch_size": 3})
    assert both["sft_loss"] == offline[0]["sft_loss"]  # 3 examples for 8 rollouts, a quarter or so of all
    assert both["loss"] == pytest.approx(0.75 * alone["loss"] + 0.25 * both["sft_loss"], rel=1e-5)
    assert both["pg_loss"] == pytest.approx(0.75 * alone["pg_loss"], rel=1e-5)
    assert both["entropy"] == alone["entropy"]


def test_a_batch_without_a_signal_still_trains_on_offline_data(
    talker: str, tmp_path: Path, demonstrations: Path
) -> None:
    """At the whole rate, whatever share of the groups has a signal."""
    silent = FakeApi(lambda n: [item([0.0] * 8, seed=n)])
    settings: dict[str, Any] = dict(training_steps=2, warmup_steps=0, updates_per_batch=2, lr_by_signal=True)
    train(talker, tmp_path, api=silent, offline_data=demonstrations, offline_share=0.5, **settings)
    found = rows(tmp_path)
    assert [row["updates"] for row in found] == [2, 4]
    assert [row["lr"] for row in found] == [1e-2, 1e-2]
    assert found[1]["sft_loss"] < found[0]["sft_loss"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The updates whose examples were trained on."""
    updates: list[int] = []
    add = OfflineData.add_gradient

    def noted(data: OfflineData, update: int) -> Metrics:
        updates.append(update)
        return add(data, update)

    monkeypatch.setattr(OfflineData, "add_gradient", noted)
    return updates


def test_each_update_has_its_own_examples(talker: str, tmp_path: Path, demonstrations: Path, asked: list[int]) -> None:
    mixed: dict[str, Any] = dict(offline_data=demonstrations, offline_share=0.5, updates_per_batch=2, epochs=2)
    train(talker, tmp_path, api=FakeApi(lambda n: [item([0.0, 1.0] * 4, seed=n)]), training_steps=2, **mixed)
    assert asked == list(range(8))


@pytest.mark.parametrize("kind", ["demonstrations", "pairs"])
def test_the_examples_of_a_bad_update_are_skipped(
    talker: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: str,
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or each following step would fail on them, too. A resumed run goes on behind them."""
    clip = Learner.clip
    monkeypatch.setattr(Learner, "clip", lambda learner: math.nan if asked[-1] == 1 else clip(learner))
    data, settings = request.getfixturevalue(kind), dict(max_bad_batches=1, batch_size=1, checkpoint_interval=1)
    fine_tune(talker, tmp_path, data, training_steps=3, **settings)
    fine_tune(talker, tmp_path, data, training_steps=5, resume="latest", **settings)
    assert asked == list(range(5))
    assert [row["updates"] for row in rows(tmp_path)] == [1, 1, 2, 3, 4]


def test_an_update_that_is_not_finite_changes_nothing(
    talker: str, tmp_path: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bad batch: skipped, then the end of the run."""
    monkeypatch.setattr(Learner, "clip", lambda learner: math.nan)
    with pytest.raises(TrainerError, match=r"the gradient norm is nan.*--max-bad-batches 1"):
        fine_tune(talker, tmp_path, pairs, max_bad_batches=1, training_steps=5)
    assert [row["updates"] for row in rows(tmp_path)] == [0]
