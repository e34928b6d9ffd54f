"""The best policies that a run keeps, and what it does with them at its end."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from atroposlib.wire.held_out import HeldOut
from example_trainer import grpo
from example_trainer.bridges import BridgeError, SyncReport
from example_trainer.errors import TrainerError
from example_trainer.loop.api_client import ApiClient, ApiError
from example_trainer.loop.best import BestPolicy
from example_trainer.loop.saves import Saves
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import find_checkpoint
from example_trainer.weights.manifest import expect_whole
from example_trainer.weights.written import CheckpointError
from tests.unit.trainer.fakes import FakeApi, RecordingBridge, item, serve

pytestmark = pytest.mark.usefixtures("one_thread")
MODEL = {"tie_word_embeddings": True}


def train(
    model: str,
    folder: Path,
    accuracies: dict[int, float],
    stop_at: int | None = None,
    final: dict[int, float] | None = None,
    serves_every: int = 1,
    **changes: Any,
) -> tuple[FakeApi, RecordingBridge]:
    """A run whose policy versions have these held-out accuracies, and `final` ones with further questions, killed when
    it syncs version `stop_at`.
    """
    latest = folder / "checkpoints/latest"
    first = int(latest.read_text().rpartition("_")[2]) if "resume" in changes and latest.exists() else 0
    api = FakeApi(lambda delivered: [item([1.0, 0.0, 0.0, 1.0], seed=10 + first + delivered)])
    api.evaluations, api.questions, api.final = accuracies, 64, final or {}
    bridge = RecordingBridge(fail_at=stop_at, serves_every=serves_every)
    settings: dict[str, Any] = dict(
        model_name=model,
        training_steps=4,
        batch_size=4,
        gradient_accumulation_steps=1,
        lr=1e-2,
        save_path=folder / "checkpoints",
        log_dir=folder / "logs",
        weight_bridge_mode="shared_vllm",
        use_shared_memory=True,
        checkpoint_interval=1,
        keep_checkpoints=0,
        api_timeout=5,
        fetch_timeout=5,
    )
    killed = contextlib.nullcontext() if stop_at is None else pytest.raises(KeyboardInterrupt)
    with serve(api) as url, killed:
        grpo.run(TrainerConfig(**settings | {"atropos_url": url} | changes), bridge)
    return api, bridge


def kept(folder: Path) -> tuple[str, list[str]]:
    """What `best_model` names, and the directories of best policies."""
    checkpoints = folder / "checkpoints"
    return (checkpoints / "best_model").readlink().name, sorted(each.name for each in checkpoints.glob("best_model_*"))


@pytest.mark.parametrize(
    ("accuracies", "keep", "link", "folders"),
    [
        ({1: 0.5, 2: 0.75, 3: 0.625, 4: 0.5}, 1, "best_model_2", ["best_model_2"]),
        ({1: 0.5, 2: 0.75, 3: 0.625, 4: 0.5}, 2, "best_model_2", ["best_model_2", "best_model_3"]),
        ({2: 0.75, 4: 0.75}, 1, "best_model_4", ["best_model_4"]),  # a tie goes to the later one
        ({0: 0.875, 3: 0.25}, 1, "best_model_3", ["best_model_3"]),  # what was there before training is --model-name
    ],
)
def test_a_run_keeps_the_best_policies(
    model: str, tmp_path: Path, accuracies: dict[int, float], keep: int, link: str, folders: list[str]
) -> None:
    train(model, tmp_path, accuracies, keep_best=keep)
    assert kept(tmp_path) == (link, folders)
    checkpoints = tmp_path / "checkpoints"
    for folder in folders:
        version = int(folder.rpartition("_")[2])
        best, then = (load_file(checkpoints / name / "model.safetensors") for name in (folder, f"step_{version}"))
        assert all(torch.equal(best[name], then[name]) for name in then)
        told = msgspec.json.decode((checkpoints / folder / "evaluation.json").read_bytes(), type=BestPolicy)
        assert (told.step, told.policy_version, told.held_out.accuracy) == (version, version, accuracies[version])
        assert told.held_out.questions == 64


def test_the_end_of_a_run_tells_last_and_best(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(model, tmp_path, {2: 0.75, 4: 0.5})
    said = capsys.readouterr().out
    assert "Last policy: version 4, held-out accuracy 50.0 % ± 6.2 (64 questions)" in said
    best = tmp_path / "checkpoints/best_model"
    assert f"Best policy, in {best}: version 2, held-out accuracy 75.0 % ± 5.4 (64 questions)" in said


@pytest.mark.parametrize(("accuracies", "keep"), [({}, 1), ({2: 0.5}, 0)])
def test_nothing_is_kept_without_evaluations_or_where_none_is_asked_for(
    model: str, tmp_path: Path, accuracies: dict[int, float], keep: int
) -> None:
    train(model, tmp_path, accuracies, training_steps=2, keep_best=keep)
    assert not list((tmp_path / "checkpoints").glob("best_*"))


def test_the_best_policy_is_served_again_and_asked_what_the_last_one_was_asked(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracies = {2: 0.75, 4: 0.5, 5: 0.75}
    api, bridge = train(model, tmp_path, accuracies, final={4: 0.53125, 5: 0.71875})
    assert api.registrations[0]["says_done"]
    assert api.steps[-3:] == [
        {"step": 4, "policy_version": 4},
        {"step": 4, "policy_version": 5, "weights_of": 2},
        {"step": 4, "policy_version": 5, "weights_of": 2, "done": True},
    ]
    assert bridge.versions == [0, 1, 2, 3, 4, 5]
    checkpoints, served = tmp_path / "checkpoints", dict(bridge.trained.model.named_parameters())
    best = load_file(checkpoints / "best_model/model.safetensors")
    last = load_file(checkpoints / "final_model/model.safetensors")
    assert all(torch.equal(best[name], served[name]) for name in best)
    assert not all(torch.equal(last[name], served[name]) for name in last)
    said = capsys.readouterr().out
    assert "Last policy: version 4, held-out accuracy 53.1 % ± 3.1 (256 questions)" in said
    assert "version 2, held-out accuracy 71.9 % ± 2.8 (256 questions)" in said


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_policy_is_the_best_one_if_it_does_as_well_on_further_questions(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: int
) -> None:
    train(model, tmp_path, {2: 0.75, 4: 0.5, 5: 0.75}, final={4: 0.8125, 5: 0.8125}, keep_best=keep)
    folders = ["best_model_2", "best_model_4"]
    assert kept(tmp_path) == ("best_model_4", folders[-keep:])
    best, last = tmp_path / "checkpoints/best_model", tmp_path / "checkpoints/final_model"
    expect_whole(best, TrainerError)
    assert (best / "model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()
    told = msgspec.json.decode((best / "evaluation.json").read_bytes(), type=BestPolicy)
    assert (told.policy_version, told.held_out.accuracy) == (4, 0.5)
    assert f"Best policy, in {best}: version 4, held-out accuracy 81.2 %" in capsys.readouterr().out


def test_a_server_that_is_lost_at_the_end_costs_the_further_questions_alone(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(bridge: RecordingBridge, policy_version: int, update: Any) -> SyncReport:
        if policy_version == 5:
            raise BridgeError("vLLM is lost")
        return sync(bridge, policy_version, update)

    sync = RecordingBridge.sync
    monkeypatch.setattr(RecordingBridge, "sync", lost)
    api, _ = train(model, tmp_path, {2: 0.75, 4: 0.5}, final={4: 0.5})
    assert "The best policy is not asked further questions: vLLM is lost" in caplog.text
    assert api.steps[-1] == {"step": 4, "policy_version": 4, "done": True}
    assert (tmp_path / "checkpoints/final_model").is_dir()


@pytest.mark.parametrize(
    ("accuracies", "final"),
    [
        ({2: 0.5, 4: 0.75}, {4: 0.75}),  # the last is the best
        ({2: 0.75, 4: 0.5}, {}),  # no further questions
        ({}, {}),
    ],
)
def test_nothing_is_served_again_that_tells_nothing(
    model: str, tmp_path: Path, accuracies: dict[int, float], final: dict[int, float]
) -> None:
    api, bridge = train(model, tmp_path, accuracies, final=final)
    assert bridge.versions == [0, 1, 2, 3, 4]
    assert api.steps[-1] == {"step": 4, "policy_version": 4, "done": True}


@pytest.mark.parametrize(
    ("accuracies", "limit", "steps"),
    [
        ({1: 0.75, 2: 0.5, 3: 0.5, 4: 0.875}, 2, 4),
        ({1: 0.75, 2: 0.5, 3: 0.75, 4: 0.5, 5: 0.5}, 2, 4),  # a tie is a new best policy, and no gain
        ({step: 0.75 for step in range(1, 8)}, 2, 4),
        ({1: 0.75, 2: 0.5, 3: 0.5}, 0, 8),
        ({1: 0.75, 2: 0.5, 3: 0.5}, 3, 8),
        ({6: 0.75, 7: 0.5}, 1, 8),  # the next step is the last anyway
    ],
)
@pytest.mark.parametrize("keep", [0, 1])
def test_a_run_ends_when_it_is_flat(
    model: str, tmp_path: Path, accuracies: dict[int, float], limit: int, steps: int, keep: int
) -> None:
    api, bridge = train(model, tmp_path, accuracies, stop_when_flat=limit, training_steps=8, keep_best=keep)
    assert bridge.versions == list(range(steps + 1))
    shorter = {"num_steps": steps} if steps < 8 else {}
    assert api.steps[-1] == {"step": steps, "policy_version": steps, "done": True} | shorter
    assert (tmp_path / "checkpoints/final_model").is_dir()


def test_a_bridge_that_serves_some_versions_serves_the_last_of_a_run_that_ends_early(
    model: str, tmp_path: Path
) -> None:
    flat: dict[str, Any] = {"stop_when_flat": 1, "training_steps": 12}
    api, bridge = train(model, tmp_path, {3: 0.75, 6: 0.5}, serves_every=3, **flat)
    assert bridge.versions[-1] == 7
    assert [step["policy_version"] for step in api.steps] == [0, 0, 0, 3, 3, 3, 6, 7, 7]


def test_a_resumed_run_is_as_flat_as_it_was(model: str, tmp_path: Path) -> None:
    flat: dict[str, Any] = {"stop_when_flat": 2, "training_steps": 8}
    train(model, tmp_path, {1: 0.75, 2: 0.5}, stop_at=3, **flat)
    api, _ = train(model, tmp_path, {3: 0.5, 4: 0.5}, resume="latest", **flat)
    assert api.steps[-1] == {"step": 4, "policy_version": 4, "done": True, "num_steps": 4}


def test_a_run_that_is_about_to_end_does_so_when_it_resumes(model: str, tmp_path: Path) -> None:
    flat: dict[str, Any] = {"stop_when_flat": 2, "training_steps": 8}
    train(model, tmp_path, {1: 0.75, 2: 0.5, 3: 0.5}, stop_at=4, **flat)
    api, bridge = train(model, tmp_path, {4: 0.875}, resume="latest", **flat)
    assert bridge.versions == [3, 4]
    assert api.steps[0] == {"step": 3, "policy_version": 3, "num_steps": 4}
    with pytest.raises(TrainerError, match=r"of a run that ended at step 4, .*: give --stop-when-flat 0 to continue"):
        train(model, tmp_path, {}, resume="latest", **flat)
    _, bridge = train(model, tmp_path, {}, resume="latest", training_steps=8)
    assert bridge.versions == [4, 5, 6, 7, 8]


def test_a_run_that_ended_early_without_its_model_writes_it_alone(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat: dict[str, Any] = {"stop_when_flat": 1, "training_steps": 8}
    with monkeypatch.context() as patch:
        patch.setattr(Saves, "write_final", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(model, tmp_path, {1: 0.75, 2: 0.5}, **flat)
    _, bridge = train(model, tmp_path, {}, resume="latest", **flat)
    assert bridge.versions == [3]
    assert (tmp_path / "checkpoints/final_model").is_dir()


def raise_interrupt(saves: Saves) -> Path:
    raise KeyboardInterrupt


def test_a_resumed_run_counts_gains_from_its_checkpoint_on(model: str, tmp_path: Path) -> None:
    flat: dict[str, Any] = {"stop_when_flat": 1, "training_steps": 8}
    train(model, tmp_path, {1: 0.5, 2: 0.625, 3: 0.75}, stop_at=4, **flat)
    again = str(tmp_path / "checkpoints/step_2")  # from where steps are made and evaluated a second time
    (tmp_path / "checkpoints/latest").write_text("step_2\n")
    api, _ = train(model, tmp_path, {3: 0.75, 4: 0.875, 5: 0.5}, resume=again, **flat)
    assert api.steps[-1]["step"] == 6


def test_a_resumed_run_knows_how_well_a_policy_did_that_it_did_not_keep(model: str, tmp_path: Path) -> None:
    flat: dict[str, Any] = {"stop_when_flat": 2, "training_steps": 8, "keep_best": 0}
    train(model, tmp_path, {1: 0.75, 2: 0.5}, stop_at=3, **flat)
    api, _ = train(model, tmp_path, {3: 0.625}, resume="latest", **flat)
    assert api.steps[-1]["step"] == 4


def test_a_resumed_run_knows_what_was_best_and_whose_it_was(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, {1: 0.75, 2: 0.5}, stop_at=3)
    checkpoints = tmp_path / "checkpoints"
    foreign = BestPolicy("another run", 9, 9, HeldOut(1.0))
    for name, content in {"best_model_9": msgspec.json.encode(foreign), "best_model_8": b"{"}.items():
        (checkpoints / name).mkdir()
        (checkpoints / name / "evaluation.json").write_bytes(content)
    (checkpoints / "best_model").unlink()  # a kill between the directory and the link
    train(model, tmp_path, {3: 0.625, 4: 0.75}, resume="latest", training_steps=3)
    assert kept(tmp_path) == ("best_model_1", ["best_model_1", "best_model_8", "best_model_9"])
    train(model, tmp_path, {3: 0.625, 4: 0.75}, resume="latest")
    assert kept(tmp_path) == ("best_model_4", ["best_model_4", "best_model_8", "best_model_9"])


def test_the_best_policy_of_a_checkpoint_stays_until_the_next_one(model: str, tmp_path: Path) -> None:
    """A resumed run makes the step again that outdid it, and may do worse."""
    every_third: dict[str, Any] = {"checkpoint_interval": 3, "training_steps": 6}
    train(model, tmp_path, {1: 0.75, 4: 0.875, 5: 1.0}, stop_at=6, **every_third)
    assert kept(tmp_path) == ("best_model_5", ["best_model_1", "best_model_5"])
    train(model, tmp_path, {4: 0.25}, resume="latest", **every_third)
    link, (best, aside) = kept(tmp_path)
    assert link == best == "best_model_1"
    assert aside.startswith("best_model_5.")
    train(model, tmp_path, {7: 0.875}, resume="latest", **every_third | {"training_steps": 7})
    assert kept(tmp_path) == ("best_model_7", [aside, "best_model_7"])


@pytest.mark.parametrize("adapter", [False, True])
def test_what_a_run_wrote_after_its_checkpoint_is_not_its_own_when_it_resumes(
    model: str, tmp_path: Path, adapter: bool
) -> None:
    """Resumed from step 1, it is killed before its next checkpoint."""
    form: dict[str, Any] = {"weight_bridge_mode": "lora_only", "use_shared_memory": False} if adapter else {}
    step, best = ("adapter_step_", "best_adapter") if adapter else ("step_", "best_model")
    train(model, tmp_path, {1: 0.5, 3: 0.875}, stop_at=4, keep_best=2, **form)
    checkpoints = tmp_path / "checkpoints"
    former = weights_in(checkpoints / f"{step}3")
    train(model, tmp_path, {}, resume=str(checkpoints / f"{step}1"), stop_at=2, keep_checkpoints=2, **form)
    assert (checkpoints / "latest").read_text() == f"{step}1\n"
    assert (checkpoints / best).readlink().name == f"{best}_1"
    (aside,) = checkpoints.glob(f"{step}3.*")
    assert weights_in(aside) == former
    assert len(list(checkpoints.glob(f"{best}_3.*"))) == 1
    train(
        model, tmp_path, {3: 0.25}, resume="latest", keep_checkpoints=2, keep_best=2, training_steps=3, lr=2e-2, **form
    )
    names = sorted(each.name for each in checkpoints.iterdir() if "." not in each.name)
    assert [name for name in names if "step" in name] == [f"{step}2", f"{step}3"]
    assert (checkpoints / best).readlink().name == f"{best}_1"
    assert weights_in(checkpoints / f"{best}_3") == weights_in(checkpoints / f"{step}3") != former


def weights_in(folder: Path) -> bytes:
    (file,) = folder.glob("*model.safetensors")
    return file.read_bytes()


def test_latest_names_nothing_where_the_checkpoint_that_a_run_continues_lies_elsewhere(
    model: str, tmp_path: Path
) -> None:
    train(model, tmp_path, {}, training_steps=2)
    checkpoints = tmp_path / "checkpoints"
    elsewhere = (checkpoints / "step_1").rename(tmp_path / "step_1")
    train(model, tmp_path, {}, resume=str(elsewhere), stop_at=2)
    with pytest.raises(CheckpointError, match=r"has 1 checkpoints but no latest"):
        find_checkpoint("latest", checkpoints)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "resumed from elsewhere"])
def test_latest_names_no_checkpoint_of_another_run(model: str, tmp_path: Path, fresh: bool) -> None:
    """A run in the directory of an earlier one is killed before its first checkpoint."""
    train(model, tmp_path, {}, training_steps=2)
    train(model, tmp_path / "other", {}, training_steps=1)
    checkpoints = tmp_path / "checkpoints"
    start: dict[str, Any] = {} if fresh else {"resume": str(tmp_path / "other/checkpoints/step_1")}
    train(model, tmp_path, {}, stop_at=2, checkpoint_interval=2, training_steps=2, **start)
    for resume in ("latest",) if fresh else ("latest", "auto"):
        with pytest.raises(CheckpointError, match=r"has 2 checkpoints but no latest; name one .*step_2"):
            find_checkpoint(resume, checkpoints)
    if fresh:
        train(model, tmp_path, {}, training_steps=1, resume="auto")
        assert (checkpoints / "latest").read_text() == "step_1\n"
        assert (tmp_path / "logs/metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("earlier", [False, True])
def test_a_run_that_was_killed_before_latest_named_its_first_checkpoint_continues_that(
    model: str, tmp_path: Path, earlier: bool
) -> None:
    if earlier:
        train(model, tmp_path, {}, training_steps=2)
    train(model, tmp_path, {}, training_steps=1)
    (tmp_path / "checkpoints/latest").unlink()
    assert find_checkpoint("auto", tmp_path / "checkpoints") == tmp_path / "checkpoints/step_1"
    assert find_checkpoint("latest", tmp_path / "checkpoints") == tmp_path / "checkpoints/step_1"


@pytest.mark.parametrize("content", [b"step_2\n", b"\xff\0", b""])
def test_a_fresh_run_needs_no_whole_pointer(model: str, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/latest").write_bytes(content)
    train(model, tmp_path, {}, training_steps=1)
    assert (tmp_path / "checkpoints/latest").read_text() == "step_1\n"


def test_a_checkpoint_that_somebody_moved_and_linked_stays_the_latest(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, {}, training_steps=2)
    checkpoints = tmp_path / "checkpoints"
    moved = (checkpoints / "step_2").rename(tmp_path / "step_2")
    (checkpoints / "step_2").symlink_to(moved)
    train(model, tmp_path, {}, resume="auto", stop_at=3)
    assert (checkpoints / "latest").read_text() == "step_2\n"


@pytest.mark.parametrize("steps", [2, 4])
def test_an_evaluation_that_was_lost_is_asked_for_when_the_run_resumes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """At the last step, too."""

    def fails(api: ApiClient, version: int, deadline_s: float) -> HeldOut | None:
        if version == 2:
            raise ApiError("the batching API did not answer")
        return works(api, version, deadline_s)

    works = ApiClient.evaluation
    with monkeypatch.context() as patch:
        patch.setattr(ApiClient, "evaluation", fails)
        with pytest.raises(ApiError, match="did not answer"):
            train(model, tmp_path, {1: 0.5}, training_steps=steps)
    train(model, tmp_path, {2: 0.75, 4: 0.625}, training_steps=steps, resume="latest")
    assert kept(tmp_path) == ("best_model_2", ["best_model_2"])
    checkpoints = tmp_path / "checkpoints"
    assert weights_in(checkpoints / "best_model") == weights_in(checkpoints / "step_2")


def test_an_evaluation_that_was_counted_is_not_asked_for_again(model: str, tmp_path: Path) -> None:
    flat: dict[str, Any] = {"stop_when_flat": 2, "training_steps": 8}
    train(model, tmp_path, {1: 0.75, 2: 0.5}, stop_at=3, **flat)
    api, _ = train(model, tmp_path, {2: 0.5, 3: 0.875, 4: 0.5, 5: 0.5}, resume="latest", **flat)
    assert api.steps[-1]["step"] == 6


def test_a_link_that_a_killed_process_had_begun_is_removed(model: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "best_model_1").mkdir(parents=True)
    (checkpoints / ".best_model.partial-99999999").symlink_to("best_model_1")
    train(model, tmp_path, {}, training_steps=1)
    assert not list(checkpoints.glob(".best_model*"))
    assert (checkpoints / "best_model_1").is_dir()
