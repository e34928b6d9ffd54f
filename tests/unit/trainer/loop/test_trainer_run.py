"""Whole runs of the trainer against a batching API in a thread and a bridge without a peer."""

import logging
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from atroposlib.wire.batching import TrainerStep
from atroposlib.wire.bridge import Decoded, DecodeProbe
from example_trainer import grpo
from example_trainer.bridges import Prepare, SyncReport
from example_trainer.bridges.base import Decodes
from example_trainer.errors import TrainerError
from example_trainer.loop.api_client import ApiClient, ApiError
from example_trainer.loop.run import Run
from example_trainer.loop.timeline import Phase
from example_trainer.output.metrics import ROW_KEYS
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.objectives import PRESETS
from example_trainer.weights.checkpoint import find_checkpoint
from example_trainer.weights.written import CheckpointError
from tests.unit.trainer.fakes import VOCAB, FakeApi, RecordingBridge, item, serve, with_made_up_teacher
from tests.unit.trainer.whole_runs import config, feed, rows, train, weights

MODEL = {"tie_word_embeddings": True}
pytestmark = pytest.mark.usefixtures("one_thread")

REPOSITORY = Path(__file__).parents[4]
BROADCAST = ("--weight-bridge-mode", "shared_vllm", "--use-shared-memory")


class RestartedServer(FakeApi):
    """A vLLM server too, which has generated for 10 s more whenever a batch is delivered."""

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/bridge/activity":
            return {"generating_s": 10.0 * (self.delivered - self.before_start)}
        return super().answer(method, path, query, body)

    before_start = 0


def test_seconds_of_a_server_that_each_sync_starts_again_are_not_lost(model: str, tmp_path: Path) -> None:
    api = RestartedServer(feed)

    class Restarting(RecordingBridge):
        def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
            api.before_start = api.delivered
            return super().sync(policy_version, update)

    with serve(api) as url:
        port = int(url.rpartition(":")[2])
        grpo.run(config(model, tmp_path, url, vllm_host="127.0.0.1", vllm_port=port, training_steps=2), Restarting())
    assert [row["sampler_busy_s"] for row in rows(tmp_path)] == [10, 10]


def test_a_step_in_which_half_of_the_groups_teach_has_half_the_rate_where_asked(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, api=FakeApi(feed), training_steps=2, warmup_steps=0, lr_by_signal=True)
    assert [row["lr"] for row in rows(tmp_path)] == pytest.approx([5e-3, 5e-3])


def test_a_run_trains_syncs_reports_and_saves(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api = FakeApi(feed)
    api.evaluations = {0: 0.125, 2: 0.5, 4: 0.75}
    api.pending = {2: 3}
    bridge = RecordingBridge()
    train(model, tmp_path, api=api, bridge=bridge, warmup_steps=2, lr_decay_steps=1)

    assert bridge.versions == [0, 1, 2, 3, 4]
    assert bridge.probes == 2
    assert bridge.closed
    assert api.registrations[0]["batch_size"] == 8
    assert api.registrations[0]["num_steps"] == 4
    assert api.registrations[0]["starting_step"] == 0
    assert api.registrations[0]["vocab_size"] == VOCAB
    reported = [{"step": step, "policy_version": step} for step in range(5)]
    assert api.steps == [*reported, reported[-1] | {"done": True}]

    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert all(tuple(row)[: len(ROW_KEYS)] == ROW_KEYS for row in found)
    assert [row["accuracy"] for row in found] == [None, 0.5, None, 0.75]
    assert [row["staleness_mean"] for row in found] == [0.0, 1.0, 1.0, 1.0]
    assert [row["lr"] for row in found] == pytest.approx([5e-3, 1e-2, 1e-2, 5e-3])
    for row in found:
        assert row["reward_mean"] == 0.25
        assert row["groups"] == 2
        assert row["zero_variance_groups"] == 1
        assert row["kl"] is None
        assert row["sync_stall_s"] == 0.001
        assert row["loss"] is not None

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Before training | accuracy 12.5 %"
    assert lines[1].startswith("Step 1/4 | reward 0.250 | loss ")
    assert "accuracy 50.0 %" in lines[2]

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "final_model")
    start = AutoModelForCausalLM.from_pretrained(model)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "top_k"),
    [(dict(distill="reverse_kl"), 0), (dict(distill="forward_kl", distill_top_k=3), 3)],
)
def test_a_run_that_distils_asks_for_a_teacher_and_shows_the_distance_to_it(
    changes: dict[str, Any], top_k: int, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def taught(delivered: int) -> list[dict[str, Any]] | None:
        batch = feed(delivered)
        return batch and [with_made_up_teacher(group, top_k) for group in batch]

    api = FakeApi(taught)
    train(model, tmp_path, api=api, training_steps=2, distill_coef=0.5, reward_coef=0.0, **changes)
    assert api.registrations[0]["teacher_top_k"] == top_k
    for row in rows(tmp_path):
        assert row["teacher_kl"] is not None
        assert row["grad_norm"] > 0
        assert row["trained_tokens"] == row["completion_tokens"]  # of the groups of equal scores, too
    assert re.search(r"Step 1/2 \| .* \| teacher KL -?\d+\.\d{4} \| ", capsys.readouterr().out)


def test_a_run_that_distils_sets_groups_without_a_teacher_aside(model: str, tmp_path: Path) -> None:
    api = FakeApi(lambda delivered: [with_made_up_teacher(item([1.0, 0.0]), 0), item([1.0, 0.0])])
    train(model, tmp_path, api=api, training_steps=1, distill_coef=1.0)
    (row,) = rows(tmp_path)
    assert (row["rejected_groups"], row["groups"]) == (1, 1)


def test_a_profiler_shows_the_phases_of_a_step_by_the_names_of_the_timeline(model: str, tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        train(model, tmp_path, training_steps=1)
    shown = {event.key: event.count for event in trace.key_averages()}
    assert {name: shown.get(name) for name in get_args(Phase)} == dict.fromkeys(get_args(Phase), 1) | {"overlap": None}


def test_bridge_learner_and_run_have_one_configuration_to_the_end(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that memory and the checkpoint have completed."""
    train(model, tmp_path, training_steps=1, checkpoint_interval=1, share_prefixes=False)
    bridges_have: list[TrainerConfig] = []
    runs: list[Run] = []

    def make_bridge(final: TrainerConfig) -> Prepare:
        bridges_have.append(final)
        return RecordingBridge()

    monkeypatch.setattr(grpo, "make_bridge", make_bridge)
    monkeypatch.setattr(Run, "finish", lambda run: runs.append(run))
    with serve(FakeApi(lambda delivered: feed(1 + delivered))) as url:
        grpo.run(config(model, tmp_path, url, training_steps=2, resume="latest", offload="auto"))
    (run,), (final,) = runs, bridges_have
    assert run.config is run.learner.config is final
    assert (final.share_prefixes, final.offload) == (False, "none")


def test_a_bridge_that_serves_some_versions_only_reports_what_vllm_serves(model: str, tmp_path: Path) -> None:
    """As with restarts: evaluations and the parity probe wait for weights that vLLM has."""
    api = FakeApi(feed)
    api.evaluations = {0: 0.125, 2: 0.5, 4: 0.75}
    api.pending = {1: 10**9, 3: 10**9}  # to wait for a policy that is not served would be useless
    bridge = RecordingBridge(serves_every=2)
    train(model, tmp_path, api=api, bridge=bridge)
    assert [(report["step"], report["policy_version"]) for report in api.steps] == [
        (0, 0),
        (1, 0),
        (2, 2),
        (3, 2),
        (4, 4),
        (4, 4),
    ]
    assert [(row["policy_version"], row["served_version"], row["accuracy"]) for row in rows(tmp_path)] == [
        (1, 0, None),
        (2, 2, 0.5),
        (3, 2, None),
        (4, 4, 0.75),
    ]
    assert bridge.probes == 2


def test_a_lost_vllm_ends_the_wait_for_a_batch(model: str, tmp_path: Path) -> None:
    bridge = RecordingBridge()

    def no_batch(delivered: int) -> None:
        bridge.lost = True

    with pytest.raises(TrainerError, match="vLLM is lost"):
        train(model, tmp_path, api=FakeApi(no_batch), bridge=bridge, fetch_timeout=60)
    assert bridge.closed


def test_training_raises_the_probability_of_rewarded_answers(model: str, tmp_path: Path) -> None:
    """The same batch each step: its surrogate must improve, or the sign or the update is wrong."""
    train(model, tmp_path, api=FakeApi(lambda delivered: feed(0)), training_steps=6, lr=3e-3, warmup_steps=0)
    losses = [row["pg_loss"] for row in rows(tmp_path)]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("shares", [True, False])
def test_a_resumed_run_shares_prefixes_as_before(model: str, tmp_path: Path, shares: bool) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(model, straight, training_steps=2, share_prefixes=shares)
    train(model, resumed, training_steps=1, checkpoint_interval=1, share_prefixes=shares)
    with pytest.raises(CheckpointError, match=r"was computed with .*, and this run has .*, which rounds differently"):
        train(model, resumed, first_step=1, training_steps=2, resume="latest", share_prefixes=not shares)
    train(model, resumed, first_step=1, training_steps=2, resume="latest")
    expected, found = (weights(folder / "checkpoints/final_model") for folder in (straight, resumed))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_resumed_run_ends_with_the_same_bits(model: str, tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(model, straight, checkpoint_interval=2)
    with pytest.raises(KeyboardInterrupt):
        train(model, resumed, bridge=RecordingBridge(fail_at=4), checkpoint_interval=2)
    assert [row["step"] for row in rows(resumed)] == [1, 2, 3]  # step 3 was done, step 2 was kept

    bridge = RecordingBridge()
    api = train(model, resumed, first_step=2, bridge=bridge, checkpoint_interval=2, resume="auto")
    assert bridge.versions == [2, 3, 4]
    assert api.registrations[0]["starting_step"] == 2
    assert api.steps[0] == {"step": 2, "policy_version": 2}
    assert [row["step"] for row in rows(resumed)] == [1, 2, 3, 4]

    for name in ("checkpoints/final_model", "checkpoints/step_4"):
        expected, found = weights(straight / name), weights(resumed / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    timings = {key for key in rows(straight)[0] if key == "time" or key.endswith("_s")}
    for expected_row, row in zip(rows(straight), rows(resumed), strict=True):
        assert {key: value for key, value in row.items() if key not in timings} == {
            key: value for key, value in expected_row.items() if key not in timings
        }


@pytest.mark.parametrize("lost", ["report_step", "evaluation"])
def test_an_api_that_is_lost_once_a_step_is_made_costs_no_checkpoint(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    works = getattr(ApiClient, lost)

    def fails(api: ApiClient, what: Any, *more: float, **named: float) -> object:
        if what in (2, TrainerStep(2, 2)):
            raise ApiError("the batching API did not answer")
        return works(api, what, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(ApiClient, lost, fails)
        with pytest.raises(ApiError, match="did not answer"):
            train(model, tmp_path / "one", checkpoint_interval=2)
    assert [row["step"] for row in rows(tmp_path / "one")] == [1, 2]
    train(model, tmp_path / "one", first_step=2, checkpoint_interval=2, resume="latest")
    train(model, tmp_path / "other")
    assert [row["loss"] for row in rows(tmp_path / "one")] == [row["loss"] for row in rows(tmp_path / "other")]


def test_a_batch_without_a_signal_changes_no_weight_but_raises_the_version(model: str, tmp_path: Path) -> None:
    bridge = RecordingBridge()
    train(model, tmp_path, api=FakeApi(lambda n: [item([1.0, 1.0], seed=n)]), bridge=bridge, training_steps=2)
    assert bridge.versions == [0, 1, 2]
    assert [(row["loss"], row["grad_norm"], row["updates"], row["policy_version"]) for row in rows(tmp_path)] == [
        (None, None, 0, 1),
        (None, None, 0, 2),
    ]
    start, trained = weights(Path(model)), weights(tmp_path / "checkpoints" / "final_model")
    assert all(torch.equal(start[key], trained[key]) for key in start)


def test_the_learning_rate_falls_in_steps_without_an_update_and_goes_on_after_a_resume(
    model: str, tmp_path: Path
) -> None:
    """Step 2 of five has no signal; the run is cut after step 3."""

    def batches(first_step: int) -> FakeApi:
        return FakeApi(lambda n: [item([1.0, 1.0 if first_step + n == 1 else 0.0], seed=first_step + n)])

    settings: dict[str, Any] = dict(training_steps=5, warmup_steps=2, lr_decay_steps=2, checkpoint_interval=1)
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path, api=batches(0), bridge=RecordingBridge(fail_at=4), **settings)
    train(model, tmp_path, api=batches(3), resume="latest", **settings)
    expected = [pytest.approx(5e-3), None, 1e-2, pytest.approx(1e-2 * 2 / 3), pytest.approx(1e-2 / 3)]
    assert [row["lr"] for row in rows(tmp_path)] == expected


def test_the_checkpoint_is_a_plain_model_folder_without_the_bridge_s_buffer(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, training_steps=1, checkpoint_interval=1)
    size = (Path(model) / "model.safetensors").stat().st_size
    assert (tmp_path / "checkpoints" / "step_1" / "model.safetensors").stat().st_size == size


def test_only_the_newest_checkpoints_of_the_run_are_kept(model: str, tmp_path: Path) -> None:
    save_path = tmp_path / "checkpoints"
    train(model, tmp_path, training_steps=1, checkpoint_interval=1)
    (save_path / "step_1").rename(save_path / "step_77")
    leftover = save_path / ".step_9.partial-4194399"  # above the largest process id
    leftover.mkdir()
    train(model, tmp_path, checkpoint_interval=1, keep_checkpoints=2)
    names = [".begun", ".ended", "final_model", "latest", "step_3", "step_4", "step_77"]
    assert sorted(path.name for path in save_path.iterdir()) == names
    assert (save_path / "latest").read_text() == "step_4\n"


def test_a_damaged_checkpoint_is_refused_and_a_finished_run_says_what_to_raise(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, training_steps=1, checkpoint_interval=1)
    with pytest.raises(TrainerError, match="has done 1 of 1 steps: raise --training-steps"):
        train(model, tmp_path, training_steps=1, resume="latest")
    for name in ("model.safetensors", "trainer_state.pt"):
        path = tmp_path / "checkpoints" / "step_1" / name
        content, size = path.read_bytes(), path.stat().st_size
        os.truncate(path, size - 100)
        says = f"{name} has {size - 100} bytes, the checkpoint was written with {size}"
        with pytest.raises(CheckpointError, match=says):
            find_checkpoint("latest", tmp_path / "checkpoints")
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="SHA-256 differs"):
            find_checkpoint(str(path.parent), tmp_path)
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("mode", "left"), [("shared_vllm", ["step_3", "step_4"]), ("none", ["step_2", "step_3", "step_4"])]
)
def test_a_run_that_resumes_often_keeps_no_more_checkpoints(
    model: str, tmp_path: Path, mode: str, left: list[str]
) -> None:
    """But the one from which vLLM may be started again, where the trainer does that."""
    settings: dict[str, Any] = {"checkpoint_interval": 1, "keep_checkpoints": 2, "resume": "auto"}
    settings |= {"weight_bridge_mode": mode, "use_shared_memory": mode != "none"}
    for steps in (1, 2, 4):
        train(model, tmp_path, training_steps=steps, **settings)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == left


@pytest.mark.parametrize("left", ["nothing", "the model of a shorter run", "the trained model"])
def test_a_run_that_was_killed_between_its_last_step_and_its_end_is_finished(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Whatever the clock was meanwhile, and when files were copied."""
    checkpoints = tmp_path / "checkpoints"
    if left == "the model of a shorter run":
        train(model, tmp_path, training_steps=1, checkpoint_interval=1)
    last_act = "report" if left == "the trained model" else "finish"
    with monkeypatch.context() as patched:
        patched.setattr(Run, last_act, killed_at_the_end(getattr(Run, last_act)))
        with pytest.raises(KeyboardInterrupt):
            train(model, tmp_path, training_steps=2, checkpoint_interval=1, resume="auto")
    for file in checkpoints.rglob("manifest.json"):
        os.utime(file, (1, 1) if "step" in file.parent.name else None)
    api = train(model, tmp_path, training_steps=2, checkpoint_interval=1, resume="latest")
    assert api.delivered == 0
    assert api.steps[-1] == {"step": 2, "policy_version": 2, "done": True}
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    found, made = weights(checkpoints / "final_model"), weights(checkpoints / "step_2")
    assert all(torch.equal(found[name], made[name]) for name in made)
    os.utime(checkpoints / "final_model/manifest.json", (1, 1))
    with pytest.raises(TrainerError, match="has done 2 of 2 steps"):
        train(model, tmp_path, training_steps=2, resume="latest")
    shutil.rmtree(checkpoints / "final_model")
    train(model, tmp_path, training_steps=2, resume="latest")
    assert (checkpoints / "final_model").exists()


def killed_at_the_end(method: Callable[..., None]) -> Callable[..., None]:
    """The method of a run, until it is asked to end or to tell that all is done."""

    def wrapped(run: Run, *told: TrainerStep) -> None:
        if not told or told[0].done:
            raise KeyboardInterrupt
        method(run, *told)

    return wrapped


def test_resuming_from_what_is_not_there_says_so(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path) is None
    assert find_checkpoint(None, tmp_path) is None
    with pytest.raises(CheckpointError, match="latest does not exist"):
        find_checkpoint("latest", tmp_path)
    with pytest.raises(CheckpointError, match="nowhere is not a complete checkpoint"):
        find_checkpoint("nowhere", tmp_path)


def test_a_write_that_fails_leaves_the_previous_checkpoint(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, training_steps=1, checkpoint_interval=1)
    (tmp_path / "checkpoints/.ended").unlink()  # of the first run alone
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the model has about 80 kB: the write fails half-way, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"cannot write .*step_2: .*; earlier checkpoints are untouched. Free space"
        ):
            train(model, tmp_path, first_step=1, training_steps=2, checkpoint_interval=1, resume="latest")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()} == before


def test_a_disk_that_is_too_small_is_seen_before_writing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(CheckpointError, match="MB are needed, 0 MB are free"):
        train(model, tmp_path, training_steps=1, checkpoint_interval=1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_parity_above_the_tolerance_stops_the_run_unless_products_are_in_bfloat16(model: str, tmp_path: Path) -> None:
    bridge = RecordingBridge(parity=0.2)
    says = r"by 0.2 nats \(root mean square\) right after a sync \(--parity-tolerance 0.05\)"
    with pytest.raises(TrainerError, match=says):
        train(model, tmp_path, bridge=bridge)
    assert bridge.closed
    train(model, tmp_path, bridge=RecordingBridge(parity=0.2), kernels="bfloat16", training_steps=1)


class DecodesAnother(RecordingBridge):
    """Its server is not asked before policy version `wrong`, which it decodes by the one before."""

    url = "http://a"

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self._wrong = wrong

    def decoders(self) -> Sequence[Decodes]:
        return [self] if self.versions[-1] >= self._wrong else []

    def longest(self) -> int | None:
        return None

    def decode(self, probe: DecodeProbe) -> Decoded:
        return Decoded(self._wrong - 1, [], [], [])


def test_a_decode_probe_that_fails_at_the_end_costs_no_trained_model(model: str, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="decoded with policy version 1, not 2"):
        train(model, tmp_path, bridge=DecodesAnother(2), training_steps=2, probe_every=1)
    assert len(rows(tmp_path)) == 2
    train(model, tmp_path / "right", training_steps=2)
    found, expected = (weights(folder / "checkpoints/final_model") for folder in (tmp_path, tmp_path / "right"))
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_tensor_that_vllm_was_not_given_stops_the_run(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = RecordingBridge()
    bridge.differing = ["lm_head.weight", "model.norm.weight"]
    with pytest.raises(TrainerError, match=r"2 of the tensors .* policy version 0, among them lm_head.weight"):
        train(model, tmp_path, bridge=bridge)
    assert bridge.closed
    bridge = RecordingBridge()
    caplog.set_level("INFO")
    train(model, tmp_path / "equal", bridge=bridge)
    assert caplog.text.count("Digest: every word of vLLM's weights is the trainer's") == bridge.probes == 2


def test_an_unknown_model_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        TrainerError,
        match=r"cannot load --model-name './no/such', a model id .*; give a Hugging Face model id .* or a directory",
    ):
        train("./no/such", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainerError, match=r"cannot load --model-name '.*empty', a directory: "):
        train(str(tmp_path / "empty"), tmp_path)


def test_non_finite_gradients_leave_the_weights(model: str, tmp_path: Path) -> None:
    group = item([1.0, 0.0])
    group["inference_logprobs"] = [
        [value if value == 1.0 else -75.0 for value in row] for row in group["inference_logprobs"]
    ]
    impossible = FakeApi(lambda n: [group])
    unbounded: dict[str, Any] = {"mismatch_limit": 1e3, "dual_clip": 0, "log_ratio_limit": 80}
    with pytest.raises(TrainerError, match=r"the gradient norm is (nan|inf); the weights were not changed"):
        train(model, tmp_path, api=impossible, **unbounded, on_bad_batch="stop")
    train(model, tmp_path, api=FakeApi(lambda n: [group]), **unbounded, on_bad_batch="skip", training_steps=2)
    start, trained = weights(Path(model)), weights(tmp_path / "checkpoints" / "final_model")
    assert all(torch.equal(start[key], trained[key]) for key in start)


def test_recomputed_log_probabilities_make_the_first_update_s_ratio_one(model: str, tmp_path: Path) -> None:
    """The sampler's are made up; what it kept of the distribution is computed in either pass."""
    api = FakeApi(lambda n: [item([1.0, 0.0], seed=n, generation_params={"top_p": 0.7, "top_k": 9})])
    train(model, tmp_path, api=api, training_steps=2, old_logprobs="recomputed")
    for row in rows(tmp_path):
        assert (row["ratio_mean"], row["ratio_clipped_frac"]) == (1.0, 0.0)
        assert row["logprob_diff_mean"] > 0.1


@pytest.mark.parametrize("algorithm", list(PRESETS))
def test_every_preset_trains_with_corrections_and_several_updates(model: str, tmp_path: Path, algorithm: str) -> None:
    several: dict[str, Any] = {
        "updates_per_batch": 2,
        "old_logprobs": "recomputed",
        "importance": "mask",
        "off_policy_mask": 0.5,
    }
    train(model, tmp_path, algorithm=algorithm, training_steps=2, checkpoint_interval=0, **several)
    for row in rows(tmp_path):
        assert row["loss"] is not None
        assert row["grad_norm"] > 0
        assert row["ratio_max"] >= 1
        assert 0 < row["importance_masked_frac"] < 1


def test_kl_to_the_start_model_grows_from_zero(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, kl_coef=0.1, entropy_coef=0.01, warmup_steps=0)
    kl = [row["kl"] for row in rows(tmp_path)]
    assert kl[0] == pytest.approx(0, abs=1e-7)
    assert kl[-1] > 1e-4


def test_the_kl_term_pulls_the_policy_back_where_all_groups_have_equal_scores(model: str, tmp_path: Path) -> None:
    """Only the first batch has a signal. Without momentum every later update is the KL term's alone."""
    batches = FakeApi(lambda n: [item([1.0, 1.0 if n else 0.0], seed=1), item([0.0, 0.0], seed=2)])
    settings: dict[str, Any] = dict(kl_coef=0.1, warmup_steps=0, adam_betas=(0.0, 0.999), lr=3e-3)
    train(model, tmp_path, api=batches, training_steps=5, **settings)
    found = rows(tmp_path)
    assert [row["updates"] for row in found] == [1, 2, 3, 4, 5]
    assert [row["zero_variance_groups"] for row in found] == [1, 2, 2, 2, 2]
    assert all(row["trained_tokens"] == row["completion_tokens"] for row in found)
    for row in found[1:]:
        assert row["pg_loss"] == 0
        assert row["loss"] == pytest.approx(0.1 * row["kl"], rel=1e-6)
    assert found[-1]["kl"] < found[1]["kl"] / 2


def test_adafactor_trains_too(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, optimizer="adafactor", training_steps=2, checkpoint_interval=1)
    train(model, tmp_path, first_step=2, optimizer="adafactor", training_steps=3, resume="latest")
    with pytest.raises(
        CheckpointError, match="contains the moments of Adafactor, but this run uses AdamW: give the same --optimizer"
    ):
        train(model, tmp_path, first_step=2, optimizer="adamw", training_steps=3, resume="latest")


def test_tensorboard_gets_the_rows(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, training_steps=1, tensorboard=True)
    assert list((tmp_path / "logs" / "tensorboard").glob("events*"))


def test_a_fresh_run_keeps_an_earlier_run_s_metrics_aside(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, training_steps=1)
    train(model, tmp_path, training_steps=2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert len(list((tmp_path / "logs").glob("metrics.2*.jsonl"))) == 1


def run_script(*flags: str, path: str = "example_trainer/grpo.py") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-u", path, *flags], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )


@pytest.mark.services
def test_the_guide_s_command_resolves_when_run_by_path() -> None:
    command = (
        "--model-name Qwen/Qwen2.5-14B-Instruct --weight-bridge-mode shared_vllm --vllm-port 9001 --lr 1e-6"
        " --batch-size 4 --training-steps 100 --use-shared-memory"
    )
    done = run_script(*command.split(), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "training_steps: 100\n" in done.stdout
    assert "gradient_accumulation_steps: 32\n" in done.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--training-steps", "5"], "--model-name is required"),
        (["--model", "m", "--optimizer", "adamw_8bit"], "adamw_8bit needs the package bitsandbytes"),
        (["--model", "m", "--single-copy", "--use-shared-memory"], "cannot be combined"),
        (["--model", "m", "--trainig-steps", "5"], "did you mean 'training_steps'"),
        (["--model", "m", "--clip-eps", "-1"], "clip_eps"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_2(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        grpo.main(flags)
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert says in error
    assert error.count("\n") == 1


def test_an_error_is_one_line_on_stderr_and_exit_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = logging.getLogger()
    handlers = list(root.handlers)
    with pytest.raises(SystemExit) as ended:
        grpo.main(["--model", "m", *BROADCAST, "--save-path", str(tmp_path), "--resume", "latest"])
    root.handlers[:] = handlers
    assert ended.value.code == 1
    assert (
        capsys.readouterr().err
        == f"grpo: error: --resume latest: {tmp_path}/latest does not exist; use --resume auto to start afresh, or "
        "name a checkpoint directory\n"
    )


def test_a_resumed_run_takes_a_changed_learning_rate(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, training_steps=1, checkpoint_interval=1, lr=1e-2, warmup_steps=0)
    train(model, tmp_path, first_step=1, training_steps=2, resume="latest", lr=3e-3, warmup_steps=0)
    assert [row["lr"] for row in rows(tmp_path)] == [1e-2, 3e-3]


def test_a_bridge_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode shared_vllm is not available; choose: --weight-bridge-mode none, "):
        config("no/such/model", tmp_path, "http://127.0.0.1:1", weight_bridge_mode="shared_vllm")
