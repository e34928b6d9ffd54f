"""What a power failure leaves of checkpoints: each is flushed whole before it gets its name, and named by `latest` only
after that; an older one is removed last.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.optim import AdamW

from atroposlib.processes.identity import first_ticks
from atroposlib.wire.bridge import read_policy_version
from example_trainer.weights.checkpoint import STATE, Checkpoints, Progress, find_checkpoint, restore, set_later_aside
from example_trainer.weights.manifest import MANIFEST
from example_trainer.weights.written import (
    CheckpointError,
    TrainedModel,
    remove_folder,
    remove_leftovers,
    set_aside,
    write_folder,
)
from tests.unit.common.disk import Act, broken_disk, expect_durable, watch_disk
from tests.unit.trainer.fakes import tiny_model


def write_two_files(folder: Path) -> None:
    (folder / STATE).write_bytes(b"moments")
    (folder / "nested").mkdir()
    (folder / "nested" / "weights").write_bytes(b"weights")


def test_every_file_and_directory_is_flushed_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = watch_disk(monkeypatch)
    write_folder(tmp_path / "step_1", write_two_files, 100)
    expect_durable(acts, tmp_path / "step_1")
    found = sorted(path.relative_to(tmp_path / "step_1").as_posix() for path in (tmp_path / "step_1").rglob("*"))
    assert found == [MANIFEST, "nested", "nested/weights", STATE]


def test_a_checkpoint_that_is_replaced_is_removed_when_the_new_one_has_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "step_1", write_two_files, 100)
    acts = watch_disk(monkeypatch)
    write_folder(tmp_path / "step_1", write_two_files, 100)
    _, named = expect_durable(acts, tmp_path / "step_1")
    still_there = [name for name in acts[named].content.split(b"\0") if b".replaced-" in name]
    assert len(still_there) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_checkpoint_that_stepped_aside_for_one_that_never_came_is_found_again(tmp_path: Path) -> None:
    """A trainer was killed while it wrote step 1 again."""
    write_folder(tmp_path / "step_1", write_two_files, 100)
    (tmp_path / "latest").write_text("step_1\n")
    gone = 4194399  # above the largest process id
    (tmp_path / "step_1").rename(tmp_path / f".step_1.replaced-{gone}")
    write_folder(tmp_path / "step_2", write_two_files, 100)
    (tmp_path / f".step_2.replaced-{gone}").mkdir()
    (tmp_path / f".latest.partial-{gone}").write_text("step_")  # killed while `latest` was written
    remove_leftovers(tmp_path)
    assert find_checkpoint("latest", tmp_path) == tmp_path / "step_1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1", "step_2"]


def test_what_a_kill_leaves_of_a_former_checkpoint_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path) -> None:
        (folder / MANIFEST).unlink()
        raise KeyboardInterrupt

    write_folder(tmp_path / "step_1", write_two_files, 100)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_folder(tmp_path / "step_1", "")
    assert not (tmp_path / "step_1").exists()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def thread() -> Iterator[int]:
    """The id of a thread of this process, which /proc knows too."""
    ended = threading.Event()
    waiting = threading.Thread(target=ended.wait)
    waiting.start()
    assert waiting.native_id is not None
    yield waiting.native_id
    ended.set()
    waiting.join()


def test_what_a_process_left_is_removed_though_its_pid_is_in_use_again(tmp_path: Path, thread: int) -> None:
    """In a container the trainer that starts again has the pid of the one that was killed."""
    mine, parent = os.getpid(), os.getppid()
    lives = f".step_9.partial-{parent}.{first_ticks(parent)}"
    left = [f"{mine}", f"{mine}.7", f"{mine}.{first_ticks(mine)}", f"{parent}.7", f"{thread}.7", "word"]
    for name in [*(f".step_4.partial-{owner}" for owner in left), f".step_2.replaced-{mine}.7", lives]:
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [lives, "step_2"]
    write_folder(tmp_path / "step_4", write_two_files, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == [lives, "step_2", "step_4"]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Act]]:
    """Two steps of a model, kept one at a time, and how they came to the disk."""
    trained = TrainedModel(tiny_model())
    optimizer = AdamW(trained.model.parameters())
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(Progress(1, 1, 1), trained, optimizer)
    with monkeypatch.context() as patch:
        acts = watch_disk(patch)
        checkpoints.save(Progress(2, 2, 2), trained, optimizer)
    return tmp_path, acts


def test_a_checkpoint_names_the_policy_that_it_holds_and_the_step_that_led_to_it(tmp_path: Path) -> None:
    trained = TrainedModel(tiny_model())
    optimizer = AdamW(trained.model.parameters())
    folder = Checkpoints(tmp_path, 0).save(Progress(step=3, policy_version=7, updates=2), trained, optimizer)
    assert (folder.name, read_policy_version(str(folder))) == ("step_3", 7)
    assert restore(folder, optimizer) == Progress(step=3, policy_version=7, updates=2)


def test_latest_names_a_checkpoint_that_is_on_the_disk(saved: tuple[Path, list[Act]]) -> None:
    folder, acts = saved
    _, named = expect_durable(acts, folder / "step_2")
    pointed, _ = expect_durable(acts, folder / "latest")
    assert named < pointed
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_2"]
    assert find_checkpoint("latest", folder) == folder / "step_2"


def test_the_checkpoint_before_goes_when_latest_no_longer_names_it(saved: tuple[Path, list[Act]]) -> None:
    folder, acts = saved
    _, pointed = expect_durable(acts, folder / "latest")
    assert b"step_1" in acts[pointed].content.split(b"\0")


def test_checkpoints_of_the_same_run_before_a_resume_count_and_no_other_run_s(tmp_path: Path) -> None:
    trained = TrainedModel(tiny_model())
    optimizer = AdamW(trained.model.parameters())
    for step, run in {2: "ours", 10: "ours", 12: "ours", 4: "theirs"}.items():
        Checkpoints(tmp_path, 0).save(Progress(step, step, step, run=run), trained, optimizer)
    (tmp_path / "step_6").mkdir()  # which cannot be read
    shutil.copytree(tmp_path / "step_2", tmp_path / "step_77")  # which somebody keeps
    (tmp_path / "step_8").symlink_to(tmp_path / "step_77")
    resumed = Progress(10, 10, 10, run="ours")
    written = set_later_aside(tmp_path, "step_", resumed)
    assert written == [tmp_path / "step_2", tmp_path / "step_10"]
    Checkpoints(tmp_path, 1, written).save(Progress(11, 11, 11, run="ours"), trained, optimizer)
    left = sorted(path.name.partition(".")[0] for path in tmp_path.iterdir())
    assert left == ["latest", "step_11", "step_12", "step_4", "step_6", "step_77", "step_8"]
    assert not (tmp_path / "step_12").exists()


def test_a_checkpoint_that_somebody_removed_meanwhile_does_not_end_the_run(tmp_path: Path) -> None:
    trained = TrainedModel(tiny_model())
    optimizer = AdamW(trained.model.parameters())
    checkpoints = Checkpoints(tmp_path, 1)
    shutil.rmtree(checkpoints.save(Progress(1, 1, 1), trained, optimizer))
    checkpoints.save(Progress(2, 2, 2), trained, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_2"]


def test_a_disk_that_fails_at_the_flush_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    trained = TrainedModel(tiny_model())
    optimizer = AdamW(trained.model.parameters())
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(Progress(1, 1, 1), trained, optimizer)
    with broken_disk(), pytest.raises(CheckpointError, match=r"cannot write .*step_2: .*Input/output error"):
        checkpoints.save(Progress(2, 2, 2), trained, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]
    assert find_checkpoint("latest", tmp_path) == tmp_path / "step_1"


def test_a_model_is_flushed_before_its_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that vLLM loads, and that of the end of the run."""
    acts = watch_disk(monkeypatch)
    folder = TrainedModel(tiny_model()).write(tmp_path / "served_3", 3)
    expect_durable(acts, folder)
    assert {"model.safetensors", "policy.json", MANIFEST} <= {path.name for path in folder.iterdir()}


def test_a_former_checkpoint_that_cannot_be_removed_is_named_and_the_new_one_resumes(tmp_path: Path) -> None:
    trained = TrainedModel(tiny_model())
    optimizer = AdamW(trained.model.parameters())
    checkpoints = Checkpoints(tmp_path, 1)
    former = checkpoints.save(Progress(1, 1, 1), trained, optimizer)
    former.rename(tmp_path / "away")
    former.write_text("no directory")
    with pytest.raises(CheckpointError, match=r"cannot remove .*step_1: Not a directory; .* use --resume .*step_2"):
        checkpoints.save(Progress(2, 2, 2), trained, optimizer)
    assert find_checkpoint("latest", tmp_path) == tmp_path / "step_2"


def test_two_checkpoints_of_one_step_and_second_are_both_set_aside(tmp_path: Path) -> None:
    for content in ("first", "second"):
        write_folder(tmp_path / "step_4", write_two_files, 100)
        (tmp_path / "step_4/weights").write_text(content)
        os.utime(tmp_path / "step_4", (1e9, 1e9))
        set_aside(tmp_path / "step_4", "of a later step")
    assert {path.read_text() for path in tmp_path.glob("step_4.*/weights")} == {"first", "second"}
