"""Checkpoints that are whole or absent, and that a killed run resumes from to the same bits.

    SAVE_PATH/
      step_4/       config.json, model.safetensors, tokenizer files    a Hugging Face folder, to be served or trained on
                    trainer_state.pt     optimizer moments, generators, step, policy version
                    policy.json          the policy version, by which a vLLM server labels what it samples
                    manifest.json        size and SHA-256 of every file, written last
      latest        the name of the newest checkpoint folder
      served_4/     model files and policy.json, from which mode none has started vLLM
      final_model/  the Hugging Face folder alone, at the end of the run

A checkpoint is written to a hidden folder beside its place, flushed to the disk, and renamed; `latest` is replaced
after that. Whatever fails before leaves the previous checkpoint and `latest` as they were. What a folder holds of
the model, and its name, is a `Form`: the whole model here, the adapter alone (`adapter_step_N/`, `final_adapter/`)
in example_trainer/adapters.py.
"""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atroposlib.files import sync, write_whole
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import write_policy_version
from example_trainer.bf16 import exact_value
from example_trainer.errors import TrainerError
from example_trainer.weights.sharded import whole_parameters

MANIFEST = "manifest.json"
STATE = "trainer_state.pt"
LATEST = "latest"

log = get_logger(__name__)


class CheckpointError(TrainerError):
    """A checkpoint that cannot be written or read."""


@dataclass
class Progress:
    """How far a run is: steps done, the policy version they led to, optimizer updates among them. `run` names it to
    the batching API.

    `leases` are the batches it has trained on that the API may not know to be done with.
    """

    step: int = 0
    policy_version: int = 0
    updates: int = 0
    run: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    leases: list[int] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class Form:
    """What is kept of a model: the folders' names, the writer of its files into an existing folder, and their size."""

    step_prefix: str
    final: str
    write: Callable[[Path, PreTrainedModel, PreTrainedTokenizerBase | None], None]
    nbytes: Callable[[PreTrainedModel], int]


class FileRecord(msgspec.Struct):
    """What the manifest says of a file."""

    bytes: int
    sha256: str


class Checkpoints:
    """The step folders one process writes under `save_path`; of its own, it keeps the `keep` newest (0 keeps all)."""

    def __init__(self, save_path: Path, keep: int, form: Form) -> None:
        self._save_path = save_path
        self._keep = keep
        self._form = form
        self._written: list[Path] = []

    def save(
        self,
        progress: Progress,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        optimizer: Optimizer,
    ) -> Path:
        """Write the folder of this step and point `latest` at it. Raises CheckpointError, with nothing changed."""
        state = {
            "progress": vars(progress),
            "optimizer": type(optimizer).__name__,
            "shapes": _shapes(optimizer),
            "moments": optimizer.state_dict()["state"],
            "generators": _generator_states(),
        }

        def write(folder: Path) -> None:
            self._form.write(folder, model, tokenizer)
            write_policy_version(folder, progress.policy_version)
            torch.save(state, folder / STATE)

        moments = [
            value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)
        ]
        target = self._save_path / f"{self._form.step_prefix}{progress.step}"
        write_folder(target, write, self._form.nbytes(model) + sum(moment.nbytes for moment in moments))
        self._point_at(target)
        self._written.append(target)
        if self._keep:
            for old in self._written[: -self._keep]:
                shutil.rmtree(old)
            self._written = self._written[-self._keep :]
        return target

    def _point_at(self, target: Path) -> None:
        pointer = self._save_path / LATEST
        try:
            write_whole(pointer, f"{target.name}\n".encode())
        except OSError as error:
            raise CheckpointError(
                f"{target} is written, but {pointer} is not: {error}; free space, then use --resume {target}"
            ) from error


def save_served_model(
    save_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, policy_version: int, form: Form
) -> Path:
    """Write `save_path/served_N/`, from which a vLLM server serves policy version N. Raises CheckpointError."""
    target = save_path / f"served_{policy_version}"

    def write(folder: Path) -> None:
        form.write(folder, model, tokenizer)
        write_policy_version(folder, policy_version)

    write_folder(target, write, form.nbytes(model))
    return target


def save_final_model(
    save_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, form: Form
) -> Path:
    """Write `save_path/final_model/` (or what `form` calls it): the model without the trainer's state. Raises
    CheckpointError.
    """
    target = save_path / form.final
    write_folder(target, lambda folder: form.write(folder, model, tokenizer), form.nbytes(model))
    return target


def find_checkpoint(resume: str | None, save_path: Path) -> Path | None:
    """The folder `--resume` means, verified against its manifest; None for a fresh start. Raises CheckpointError."""
    if resume is None:
        return None
    folder = _latest(resume, save_path) if resume in ("latest", "auto") else Path(resume)
    if folder is not None:
        verify(folder)
    return folder


def _latest(resume: str, save_path: Path) -> Path | None:
    """The directory that `latest` names; None where there is neither it nor a checkpoint, and `resume` is auto. Raises
    CheckpointError.
    """
    pointer = save_path / LATEST
    steps = sorted(path.parent for path in save_path.glob(f"*step_[0-9]*/{MANIFEST}"))
    remedy = (
        f"name one to resume from, such as --resume {max(steps, key=_step_of)}"
        if steps
        else "choose another --save-path"
    )
    try:
        name = pointer.read_bytes().decode().strip()
    except FileNotFoundError:
        if steps:
            raise CheckpointError(
                f"--resume {resume}: {save_path} holds {len(steps)} checkpoints but no {LATEST}; {remedy}, "
                "or start afresh with another --save-path"
            ) from None
        if resume == "auto":
            return None
        raise CheckpointError(
            f"--resume latest: {pointer} does not exist; --resume auto starts afresh then, or name a checkpoint folder"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{pointer} cannot be read ({error}); {remedy}") from None
    if not re.fullmatch(r"\w{1,100}", name, re.ASCII):
        raise CheckpointError(f"{pointer} is damaged: {name[:80]!a} is not the name of a checkpoint; {remedy}")
    return save_path / name


def _step_of(folder: Path) -> int:
    digits = folder.name.rpartition("_")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() else -1


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file of the manifest is there with its size and digest."""
    try:
        _compare_with_manifest(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error}); resume from another step_N folder") from None


def _compare_with_manifest(folder: Path) -> None:
    manifest_path = folder / MANIFEST
    if not manifest_path.is_file():
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST}; give another folder to --resume"
        )
    try:
        manifest = msgspec.json.decode(manifest_path.read_bytes(), type=dict[str, FileRecord])
    except (UnicodeDecodeError, RecursionError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{manifest_path} is damaged ({error}); resume from another step_N folder") from None
    for name, expected in manifest.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{path} {found}, the checkpoint was written with {expected.bytes}; resume from another step_N folder"
            )
        if _digest(path) != expected.sha256:
            raise CheckpointError(
                f"{path} has its size but other contents than were written (SHA-256 differs); resume from another"
                " step_N folder"
            )
    if STATE not in manifest:
        raise CheckpointError(
            f"{folder} holds a model without {STATE}; pass it as --model-name, or give a step_N folder to --resume"
        )


def restore(folder: Path, optimizer: Optimizer) -> Progress:
    """Load the optimizer's moments and the generators from a verified checkpoint; rates and other settings stay as
    configured now.

    Raises CheckpointError if the moments are another optimizer's or another model's, or cannot be loaded.
    """
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        # torch's own text tells how to load a pickle that runs code
        problem = f"{folder / STATE} cannot be loaded ({type(error).__name__})"
        raise CheckpointError(f"{problem}; resume from another step_N folder") from error
    if state["optimizer"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{folder / STATE} holds the moments of {state['optimizer']}, this run uses {type(optimizer).__name__}: "
            "give the same --optimizer"
        )
    if state.get("shapes") != _shapes(optimizer):
        raise CheckpointError(
            f"{folder / STATE} holds the moments of other parameters than this run's {len(_shapes(optimizer))}: "
            "give the same model and, where weights are shared with vLLM, the same --tensor-parallel-size; "
            "or start anew with the checkpoint as --model-name"
        )
    optimizer.load_state_dict({"state": state["moments"], "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(state["generators"]["torch"])
    if torch.cuda.is_available() and state["generators"]["cuda"]:
        torch.cuda.set_rng_state_all(state["generators"]["cuda"])
    return Progress(**state["progress"])


def remove_leftovers(save_path: Path) -> None:
    """Remove half-written folders of processes that no longer run."""
    for folder in save_path.glob(".*.partial-*"):
        if not Path(f"/proc/{folder.name.rpartition('-')[2]}").exists():
            log.info("Removing %s, left half-written by a process that has ended", folder)
            shutil.rmtree(folder)


def _shapes(optimizer: Optimizer) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(exact_value(parameter).nbytes for parameter in model.parameters())


def _generator_states() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _write_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    model.save_pretrained(folder, state_dict=dict(whole_parameters(model)))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


WHOLE_MODEL = Form("step_", "final_model", _write_model, _weight_bytes)


def write_folder(target: Path, write: Callable[[Path], None], expected_bytes: int) -> None:
    """Make `target` from what `write` puts into an empty folder, all or nothing. Raises CheckpointError."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < expected_bytes:
            raise OSError(f"about {expected_bytes / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free")
        partial.mkdir()
        write(partial)
        _write_manifest(partial)
        _sync_folder(partial)
        _replace_folder(partial, target)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write {target}: {_first_line(error)}; earlier checkpoints are untouched. "
            "Free space, lower --keep-checkpoints, or choose another --save-path"
        ) from error


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {str(path.relative_to(folder)): FileRecord(path.stat().st_size, _digest(path)) for path in files}
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def _replace_folder(partial: Path, target: Path) -> None:
    """Rename `partial` to `target`; a folder already there, from an earlier run, steps aside first and is removed
    after.
    """
    aside = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    sync(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
