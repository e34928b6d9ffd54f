"""How a run's checkpoints come to the disk while it trains on, by one rank in this process."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atropos_launcher.plan.site import find_model
from atroposlib.flags import ConfigError
from atroposlib.wire.bridge import read_policy_version
from example_trainer.bridges import BridgeError, SyncReport
from example_trainer.bridges.restart import servable
from example_trainer.errors import ModelError, TrainerError
from example_trainer.loop import saves as saves_module
from example_trainer.loop.learner import HOST_RESERVE, Learner
from example_trainer.loop.saves import Saves
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights import shards
from example_trainer.weights.checkpoint import Progress, expect_same_model, find_checkpoint
from example_trainer.weights.shards import ShardFiles
from example_trainer.weights.written import CheckpointError
from tests.unit.common.disk import broken_disk, expect_durable, watch_disk
from tests.unit.trainer.fakes import ROUTED, FakeApi, RecordingBridge, model_folder, random_model
from tests.unit.trainer.rank_child import sequences
from tests.unit.trainer.whole_runs import feed
from tests.unit.trainer.whole_runs import train as train_run
from tests.waiting import wait_until

MODEL = {"tie_word_embeddings": True}
Make = Callable[..., tuple[Learner, Saves]]


@pytest.fixture
def make(model: str, tmp_path: Path) -> Make:
    """A learner and its saves, in shards unless the changes say otherwise."""

    def made(**changes: Any) -> tuple[Learner, Saves]:
        settings = {"model_name": model, "save_path": tmp_path / "saved", "checkpoint_format": "sharded", "lr": 1e-2}
        config = TrainerConfig.model_validate(settings | changes)
        learner = Learner(config, torch.device("cpu"), ALONE)
        learner.load(config.resume or config.model_name)
        learner.begin(config.resume or "")
        return learner, Saves(config, learner, time.sleep)

    return made


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written until it is set."""
    opened, cut = threading.Event(), shards._cut

    def late(blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        opened.wait(20)
        yield from cut(blocks)

    monkeypatch.setattr(shards, "_cut", late)
    yield opened
    opened.set()


def train(learner: Learner, step: int) -> float | None:
    loss = learner.gradients(*sequences(step))["loss"].value
    learner.clip()
    learner.update(1e-2)
    return loss


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.trained.model.named_parameters()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_training_goes_on_and_the_checkpoint_holds_the_weights_of_its_step(
    make: Make, gate: threading.Event, tmp_path: Path
) -> None:
    learner, saves = make()
    train(learner, 1)
    at_save = weights(learner)
    saves.save(Progress(1, 1, 1, leases=[7]))
    train(learner, 2)
    assert not saves.advance()
    assert saves.saved_leases == []
    assert find_checkpoint("auto", tmp_path / "saved") is None
    gate.set()
    saves.complete()
    assert saves.saved_leases == [7]
    saved = find_checkpoint("latest", tmp_path / "saved")
    assert saved == tmp_path / "saved/step_1"
    assert read_policy_version(str(saved)) == 1
    files = ShardFiles(saved)
    for name, value in at_save.items():
        assert torch.equal(files.part(name, 0, 0, len(value)), value)


def test_a_resumed_run_learns_the_same_and_a_dropout_would_too(make: Make, tmp_path: Path) -> None:
    learner, saves = make()
    train(learner, 1)
    saves.save(Progress(1, 1, 1))
    drawn, losses = torch.rand(3), [train(learner, step) for step in (2, 3)]
    saves.complete()
    resumed, _ = make(resume=str(tmp_path / "saved/step_1"))
    assert resumed.progress == Progress(1, 1, 1)
    assert torch.equal(torch.rand(3), drawn)
    assert [train(resumed, step) for step in (2, 3)] == losses


def test_without_memory_for_a_copy_training_waits_until_the_same_file_is_written(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner, saves = make()
    train(learner, 1)
    saves.save(Progress(1, 1, 1))
    saves.complete()
    shard = "shards/rank_0.safetensors"
    copied = (tmp_path / "saved/step_1" / shard).read_bytes()
    monkeypatch.setattr("example_trainer.loop.learner.available_memory", lambda: HOST_RESERVE - 1)
    saves.save(Progress(2, 1, 1))  # the memory of the first copy is kept
    saves.complete()
    assert "written while training waits" not in caplog.text
    learner.close()
    poor = Saves(learner.config, learner, time.sleep)
    monkeypatch.setattr(learner, "_writer", shards.ShardWriter())
    poor.save(Progress(3, 1, 1))
    assert poor.advance()  # without a wait
    assert "is written while training waits: a copy of its" in caplog.text
    assert (tmp_path / "saved/step_3" / shard).read_bytes() == copied


def test_files_are_on_the_disk_before_the_checkpoint_and_latest_have_their_names(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, saves = make()
    train(learner, 1)
    acts = watch_disk(monkeypatch)
    saves.save(Progress(1, 1, 1))
    saves.complete()
    _, named = expect_durable(acts, tmp_path / "saved/step_1")
    pointed, _ = expect_durable(acts, tmp_path / "saved/latest")
    assert named < pointed


def test_the_next_save_waits_for_the_one_before_and_the_oldest_goes(
    make: Make, gate: threading.Event, tmp_path: Path
) -> None:
    learner, saves = make(keep_checkpoints=1)
    saves.save(Progress(1, 1, 0, leases=[1]))
    threading.Timer(0.3, gate.set).start()
    start = time.monotonic()
    saves.save(Progress(2, 2, 0, leases=[2]))
    assert time.monotonic() - start > 0.2
    assert names(tmp_path / "saved")[-2:] == ["latest", "step_1"]
    saves.complete()
    assert names(tmp_path / "saved") == ["latest", "step_2"]
    assert saves.saved_leases == [1, 2]
    learner.close()


@pytest.mark.parametrize(("written", "hangs"), [([1, 1, 2, 2, 3, 3], False), ([1, 1, 1, 1, 1, 2], True)])
def test_a_disk_that_hangs_ends_the_run_and_one_that_is_slow_does_not(
    make: Make, gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int], hangs: bool
) -> None:
    learner, _ = make()
    clock = [0.0]
    monkeypatch.setattr(saves_module, "STALLED_S", 2.5)
    monkeypatch.setattr(saves_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def pause(seconds: float) -> None:
        clock[0] += 1
        if len(states) == 1:
            gate.set()
            assert learner._writer._thread is not None
            learner._writer._thread.join()

    saves = Saves(learner.config, learner, pause)
    saves.save(Progress(1, 1, 1))
    states = [[shards.Written(bytes=nbytes)] for nbytes in written]
    really = learner.saved
    monkeypatch.setattr(learner, "saved", lambda: states.pop(0) if states else really())
    if hangs:
        with pytest.raises(CheckpointError, match=r"step_1\..* no rank has written to it for 2 s: the disk hangs"):
            saves.complete()
        saves.leave(None, None, None)
        assert find_checkpoint("auto", tmp_path / "saved") is None
    else:
        saves.complete()
        assert find_checkpoint("auto", tmp_path / "saved") == tmp_path / "saved/step_1"


def test_a_disk_that_fails_is_one_line_and_leaves_the_checkpoint_before(make: Make, tmp_path: Path) -> None:
    _, saves = make()
    saves.save(Progress(1, 1, 0, leases=[1]))
    saves.complete()
    with broken_disk():
        saves.save(Progress(2, 2, 0, leases=[2]))
        with pytest.raises(CheckpointError, match=r"cannot write .*step_2: Input/output error; earlier checkpoints"):
            saves.complete()
    assert names(tmp_path / "saved") == ["latest", "step_1"]
    assert saves.saved_leases == [1]


def test_the_trained_model_is_written_though_the_checkpoint_before_it_failed(make: Make, tmp_path: Path) -> None:
    learner, saves = make()
    with broken_disk():
        saves.save(Progress(2, 2, 0))
        wait_until(lambda: learner.saved()[0].failed)
    with pytest.raises(CheckpointError, match=r"cannot write .*step_2: Input/output error"):
        saves.write_final()
    assert names(tmp_path / "saved") == ["final_model"]


def test_a_disk_that_is_too_small_is_seen_before_anything_is_copied(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, saves = make()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(CheckpointError, match="about 0 MB are needed, 0 MB are free"):
        saves.save(Progress(1, 1, 0))
    assert names(tmp_path / "saved") == []


@pytest.mark.parametrize(
    ("error", "left"), [(KeyboardInterrupt(), []), (TrainerError("vLLM is lost"), ["latest", "step_1"])]
)
def test_a_run_that_fails_completes_its_checkpoint_and_one_that_is_ended_drops_it(
    make: Make, gate: threading.Event, tmp_path: Path, error: BaseException, left: list[str]
) -> None:
    _, saves = make()
    saves.save(Progress(1, 1, 0))
    threading.Timer(0.2, gate.set).start()
    saves.leave(type(error), error, None)
    assert names(tmp_path / "saved") == left


class LosesVllm(RecordingBridge):
    """Whose vLLM is gone after its first update, while `gate` still holds the checkpoint up."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        report = super().sync(policy_version, update)
        if policy_version == 1:
            self.lost = True
            threading.Timer(0.5, self.gate.set).start()
        return report


def test_a_checkpoint_and_the_trained_model_need_no_vllm(model: str, gate: threading.Event, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_format": "sharded", "checkpoint_interval": 1}
    train_run(model, tmp_path / "ends", bridge=LosesVllm(gate), training_steps=1, **settings)
    assert {"final_model", "latest", "step_1"} <= set(names(tmp_path / "ends/checkpoints"))
    gate.clear()
    api = FakeApi(lambda delivered: feed(0) if delivered == 0 else None)
    with pytest.raises(BridgeError, match="vLLM is lost"):
        train_run(model, tmp_path / "waits", api=api, bridge=LosesVllm(gate), training_steps=2, **settings)
    assert names(tmp_path / "waits/checkpoints") == ["latest", "step_1"]


def test_the_format_follows_the_model_unless_it_is_given(make: Make) -> None:
    assert not make(checkpoint_format="auto")[1].sharded
    assert not make(checkpoint_format="hf")[1].sharded
    assert not make(checkpoint_format="auto", weight_bridge_mode="lora_only")[1].sharded
    with pytest.raises(CheckpointError, match=r"--checkpoint-format sharded splits .* --optimizer adafactor does not"):
        make(optimizer="adafactor")
    with pytest.raises(
        CheckpointError, match=r"--checkpoint-format sharded splits .* --weight-bridge-mode lora_only does"
    ):
        make(weight_bridge_mode="lora_only")


def test_a_model_with_a_scaled_embedding_resumes_from_its_shards(make: Make, tmp_path: Path) -> None:
    random_model("gemma3_text").save_pretrained(tmp_path / "gemma")
    changes = {"model_name": str(tmp_path / "gemma")}
    learner, saves = make(**changes)
    train(learner, 1)
    saves.save(Progress(1, 1, 1))
    losses = [train(learner, step) for step in (2, 3)]
    saves.complete()
    again, _ = make(**changes, resume=str(tmp_path / "saved/step_1"))
    assert [train(again, step) for step in (2, 3)] == losses


def test_a_model_that_could_not_be_loaded_from_shards_is_not_saved_in_them(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("example_trainer.loop.saves.LARGE_PARAMETERS", 1000)
    random_model("glm4_moe", **ROUTED).save_pretrained(tmp_path / "glm")
    changes = {"model_name": str(tmp_path / "glm")}
    assert not make(**changes, checkpoint_format="auto")[1].sharded
    with pytest.raises(ModelError, match=r"Glm4MoeTopkRouter with a buffer .*--checkpoint-format hf"):
        make(**changes)


def test_large_models_are_saved_in_shards(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("example_trainer.loop.saves.LARGE_PARAMETERS", 1000)
    assert make(checkpoint_format="auto")[1].sharded
    assert not make(checkpoint_format="auto", optimizer="adafactor")[1].sharded


def test_another_model_is_refused_before_anything_is_loaded(make: Make, model: str, tmp_path: Path) -> None:
    _, saves = make()
    saves.save(Progress(1, 1, 0))
    saves.complete()
    saved = tmp_path / "saved/step_1"
    expect_same_model(saved, TrainerConfig.model_validate({"model_name": model}))
    expect_same_model(saved, TrainerConfig.model_validate({"model_name": str(tmp_path / "gone")}))
    other = model_folder(tmp_path / "other", hidden_size=16, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"step_1 is a checkpoint of another model: it has \[97, 32\] for") as no:
        expect_same_model(saved, TrainerConfig.model_validate({"model_name": other}))
    assert str(no.value).isprintable()


def test_a_sharded_checkpoint_is_exported_for_a_vllm_that_starts_from_it(make: Make, tmp_path: Path) -> None:
    learner, saves = make()
    saves.save(Progress(1, 4, 0))
    saves.complete()
    config = TrainerConfig.model_validate({"model_name": "m", "save_path": tmp_path / "saved"})
    served = Path(servable(config, str(tmp_path / "saved/step_1")))
    assert served == tmp_path / "saved/served_4"
    assert read_policy_version(str(served)) == 4
    exported = load_file(served / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in weights(learner).items())
    assert servable(config, str(served)) == str(served)
    assert servable(config, str(tmp_path / "saved/step_1")) == str(served)


def test_the_launcher_takes_no_sharded_checkpoint_as_a_model(make: Make, tmp_path: Path) -> None:
    _, saves = make()
    saves.save(Progress(1, 1, 0))
    saves.complete()
    with pytest.raises(ConfigError, match=r"--model .*step_1 is a sharded checkpoint, not a model: .* `atropos export"):
        find_model(str(tmp_path / "saved/step_1"))


def test_a_missing_shard_is_named(make: Make, tmp_path: Path) -> None:
    _, saves = make()
    saves.save(Progress(1, 1, 0))
    saves.complete()
    saved = tmp_path / "saved/step_1"
    (saved / "shards/rank_0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank_0.safetensors is missing, the checkpoint was written with"):
        find_checkpoint("latest", tmp_path / "saved")
    assert "shards/rank_0.safetensors" in json.loads((saved / "manifest.json").read_bytes())
