"""What --resume makes of a damaged `latest` or manifest.json: one line with the remedy, and never a fresh start beside
old steps.
"""

import io
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from example_trainer.weights.checkpoint import STATE, Progress, about, find_checkpoint, restore, verify
from example_trainer.weights.written import CheckpointError, write_folder


def write_state(content: bytes, folder: Path) -> None:
    (folder / STATE).write_bytes(content)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with two whole checkpoints, of which `latest` names the second."""
    for step in (2, 10):
        write_folder(tmp_path / f"step_{step}", partial(write_state, b"moments"), 100)
    (tmp_path / "latest").write_text("step_10\n")
    return tmp_path


POINTERS = [b"", b"\xff\xfe", b"../../etc", b"/etc", b"..", b"step_10\nstep_2", b"step 10", b"\x1b[2J", b"s" * 300]


@pytest.mark.parametrize("content", POINTERS)
def test_a_damaged_pointer_is_one_line_that_names_a_checkpoint(saved: Path, content: bytes) -> None:
    (saved / "latest").write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        find_checkpoint("auto", saved)
    line = str(refused.value)
    assert line.isprintable(), line
    assert f"--resume {saved / 'step_10'}" in line or "is not a complete checkpoint" in line, line


def test_a_model_without_the_trainer_s_state_is_no_checkpoint(tmp_path: Path) -> None:
    write_folder(tmp_path / "final_model", lambda folder: (folder / "model").touch(), 100)
    with pytest.raises(CheckpointError, match=r"has a model without trainer_state.pt; pass it as --model-name"):
        find_checkpoint(str(tmp_path / "final_model"), tmp_path)


MANIFESTS = {
    "empty": b"",
    "garbage": b"\x00\xff",
    "cut": b'{"trainer_state.pt": {"by',
    "list": b"[]",
    "number": b"7",
    "deep": b"[" * 200_000,
    "entry without a size": b'{"trainer_state.pt": {"sha256": ""}}',
    "entry of another kind": b'{"trainer_state.pt": 7}',
    "size as text": b'{"trainer_state.pt": {"bytes": "7", "sha256": ""}}',
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_damaged_manifest_is_one_line(saved: Path, damage: str) -> None:
    (saved / "step_10/manifest.json").write_bytes(MANIFESTS[damage])
    with pytest.raises(
        CheckpointError, match=r"step_10/manifest.json is damaged \(.*\); resume from another step_N directory"
    ) as refused:
        find_checkpoint("latest", saved)
    assert str(refused.value).isprintable()


def test_a_manifest_of_impossible_names_is_one_line(saved: Path) -> None:
    (saved / "step_10/manifest.json").write_text(json.dumps({"n" * 300: {"bytes": 7, "sha256": ""}}))
    with pytest.raises(CheckpointError, match=r"step_10 cannot be read \(.*; resume from another step_N directory"):
        find_checkpoint("latest", saved)


STATES = [b"", b"garbage", pickle.dumps(Path("/tmp"), protocol=2), b"PK\x03\x04" + bytes(100)]


@pytest.mark.parametrize("content", STATES, ids=["empty", "garbage", "pickle", "archive"])
def test_a_state_that_is_as_the_manifest_says_but_cannot_be_loaded_is_one_line(tmp_path: Path, content: bytes) -> None:
    write_folder(tmp_path / "step_1", partial(write_state, content), 100)
    verify(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match=r"trainer_state.pt cannot be loaded \(.*; resume from") as refused:
        restore(tmp_path / "step_1", AdamW([torch.nn.Parameter(torch.zeros(2))]))
    assert str(refused.value).isprintable()


CONTENTS: dict[str, Any] = {
    "not a mapping": [1],
    "no generators": {"generators": {}},
    "a step as text": {"progress": {"step": "3"}},
    "kernels that are a list": {"progress": {"kernels": ["onednn"]}},
    "no progress": {"progress": None},
}


@pytest.mark.parametrize("changes", CONTENTS.values(), ids=CONTENTS)
def test_a_state_with_other_contents_is_one_line(tmp_path: Path, changes: Any) -> None:
    optimizer, state = AdamW([torch.nn.Parameter(torch.zeros(2))]), io.BytesIO()
    whole = {**about(Progress(), optimizer), "moments": {}, "generators": {"torch": torch.get_rng_state(), "cuda": []}}
    torch.save(whole | changes if isinstance(changes, dict) else changes, state)
    write_folder(tmp_path / "step_1", partial(write_state, state.getvalue()), 100)
    with pytest.raises(
        CheckpointError, match=r"trainer_state.pt is not what this trainer writes \(.*; resume from"
    ) as no:
        restore(tmp_path / "step_1", optimizer)
    assert str(no.value).isprintable()


def test_a_state_of_a_later_release_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    optimizer, state = AdamW([torch.nn.Parameter(torch.zeros(2))]), io.BytesIO()
    whole = {**about(Progress(step=3), optimizer), "moments": {}}
    whole["progress"]["later"] = 1
    torch.save({**whole, "generators": {"torch": torch.get_rng_state(), "cuda": []}}, state)
    write_folder(tmp_path / "step_1", partial(write_state, state.getvalue()), 100)
    assert restore(tmp_path / "step_1", optimizer).step == 3


def test_a_state_of_a_process_with_more_gpus_is_read_as_far_as_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, state, generators = AdamW([torch.nn.Parameter(torch.zeros(2))]), io.BytesIO(), [torch.get_rng_state()]
    now: list[torch.Tensor] = [torch.zeros(1)]  # by GPU, of which there is one here

    def set_state(value: torch.Tensor, device: int) -> None:
        now[device] = value

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(now))
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", set_state)
    whole = {**about(Progress(step=3), optimizer), "moments": {}}
    torch.save({**whole, "generators": {"torch": generators[0], "cuda": generators * 2}}, state)
    write_folder(tmp_path / "step_1", partial(write_state, state.getvalue()), 100)
    assert restore(tmp_path / "step_1", optimizer).step == 3
    assert torch.equal(now[0], generators[0])


@pytest.mark.parametrize("resume", ["auto", "latest"])
def test_steps_without_a_pointer_are_no_fresh_start(saved: Path, resume: str) -> None:
    (saved / "latest").unlink()
    remedy = f"has 2 checkpoints but no latest; name one to resume from, such as --resume {saved}/step_10"
    with pytest.raises(CheckpointError, match=remedy):
        find_checkpoint(resume, saved)
    assert find_checkpoint(f"{saved}/step_10", saved) == saved / "step_10"


def test_adapters_without_a_pointer_are_no_fresh_start_either(tmp_path: Path) -> None:
    write_folder(tmp_path / "adapter_step_3", partial(write_state, b"moments"), 100)
    with pytest.raises(CheckpointError, match="adapter_step_3"):
        find_checkpoint("auto", tmp_path)


def test_whole_checkpoints_are_found_as_before(saved: Path) -> None:
    assert find_checkpoint("auto", saved) == find_checkpoint("latest", saved) == saved / "step_10"
    assert json.loads((saved / "step_10/manifest.json").read_bytes())[STATE]["bytes"] == len(b"moments")
