"""Weights as a directory in the Hugging Face format that trainers and vLLM load: complete or absent.

    model (or adapter), tokenizer ──▶ .NAME.partial-PID.START/ ──manifest.json──flush──rename──▶ NAME/

`manifest.json` holds the size and SHA-256 of every file. A failure before the rename changes nothing. A `Form` decides
what a directory contains of the model: the whole model here, the adapter alone in example_trainer/weights/lora.py.
"""

import errno
import functools
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atroposlib.errors import MakeError, reading
from atroposlib.files import dated, sync
from atroposlib.logs import get_logger
from atroposlib.processes.identity import first_ticks, is_alive
from atroposlib.wire.bridge import Manifest, write_policy_version
from atroposlib.wire.folders import FileRecord
from example_trainer.errors import TrainerError
from example_trainer.model.files import DTYPES
from example_trainer.model.policy import Policy
from example_trainer.optim.bf16_masters import exact_value
from example_trainer.weights.flat import FlatWeights
from example_trainer.weights.manifest import weights_digest, write_manifest
from example_trainer.weights.sharded import whole_tensors
from example_trainer.weights.source import WeightSource

REMEDY = (
    "earlier checkpoints are untouched. Free space, lower --keep-checkpoints or --keep-best, or choose another"
    " --save-path"
)

log = get_logger(__name__)


class CheckpointError(TrainerError):
    """A checkpoint that cannot be written or read."""


@dataclass(frozen=True)
class Form:
    """Describes what is kept of a model: the directories' names, the writer of its files into an existing one, and
    their size.
    """

    step_prefix: str
    final: str
    best: str
    write: Callable[[Path, PreTrainedModel, PreTrainedTokenizerBase | None], None]
    nbytes: Callable[[PreTrainedModel], int]


def _write_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    model.save_pretrained(folder, state_dict=dict(whole_tensors(model)))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


WHOLE_MODEL = Form(
    "step_",
    "final_model",
    "best_model",
    _write_model,
    lambda model: sum(exact_value(parameter).nbytes for parameter in model.parameters()),
)


@dataclass(frozen=True)
class TrainedModel:
    """Holds what a run trains, and how it is written: `form`, with the tokenizer where there is one (training never
    uses text).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    form: Form = WHOLE_MODEL

    @functools.cached_property
    def policy(self) -> Policy:
        """Return what computes with the model."""
        return Policy(self.model)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in a directory."""
        return self.form.nbytes(self.model)

    def digest(self) -> str:
        """Compute the SHA-256 of the weights, as `digest_of_files` does of a directory that has them."""
        return weights_digest(
            (name, DTYPES[tensor.dtype], tensor.shape, tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
            for name, tensor in whole_tensors(self.model)
        )

    def source(self, manifest: Manifest) -> WeightSource:
        """The weights as a bridge sends them. Parameters may move in memory: call it before there is an optimizer."""
        return FlatWeights(manifest, dict(self.model.named_parameters()))

    @torch.no_grad()
    def prompt_logprobs(self, tokens: list[int]) -> Tensor:
        """Log-probabilities of all tokens but the first, [n - 1], float64, on the CPU."""
        ids = torch.tensor([tokens], device=self.model.device)
        was_training = self.model.training
        self.model.eval()  # no dropout of an adapter, as in vLLM
        logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        self.model.train(was_training)
        # not by log_softmax, in whose place a batch-invariant run on a GPU puts a kernel for float32 alone
        logprobs: Tensor = (logits.gather(1, ids[0, 1:, None])[:, 0] - logits.logsumexp(-1)).cpu()
        return logprobs

    def write(
        self,
        target: Path,
        policy_version: int | None = None,
        also: Callable[[Path], None] = lambda folder: None,
        also_bytes: int = 0,
    ) -> Path:
        """Make the directory `target`, labelled with `policy_version` and with the files that `also` adds. Raises
        CheckpointError, with what was there untouched.
        """

        def write(folder: Path) -> None:
            self.form.write(folder, self.model, self.tokenizer)
            if policy_version is not None:
                write_policy_version(folder, policy_version)
            also(folder)

        write_folder(target, write, self.nbytes + also_bytes)
        return target


def write_folder(target: Path, write: Callable[[Path], None], expected_bytes: int, remedy: str = REMEDY) -> None:
    """Make `target` from what `write` puts into an empty directory, all or nothing. Raises CheckpointError."""
    with ExitStack() as cleanup:
        cleanup.enter_context(writing(target, remedy))
        partial = make_partial(target, expected_bytes)
        cleanup.callback(shutil.rmtree, partial, ignore_errors=True)  # after the rename there is nothing left of it
        write(partial)
        put_in_place(partial, target)


def writing(target: Path, remedy: str = REMEDY) -> AbstractContextManager[None]:
    """Turns what fails in making the directory `target` into a CheckpointError of one line."""
    return reading(f"cannot write {target}", CheckpointError, remedy=remedy, also=(RuntimeError, SafetensorError))


def make_partial(target: Path, expected_bytes: int) -> Path:
    """An empty directory beside `target`, to become it. Raises OSError if there is no space for `expected_bytes`."""
    partial = target.with_name(f".{target.name}.partial-{_owner()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < expected_bytes:
        raise OSError(f"about {expected_bytes / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free")
    partial.mkdir()
    return partial


def put_in_place(partial: Path, target: Path, on_disk: Mapping[str, FileRecord] | None = None) -> None:
    """Give a finished directory its manifest, bring it to the disk and call it `target`. The files `on_disk` are there
    already. Raises OSError.
    """
    known = on_disk or {}
    write_manifest(partial, known)
    for path in (*partial.rglob("*"), partial):
        if str(path.relative_to(partial)) not in known:
            sync(path)
    # a directory already there, from an earlier run, steps aside first and is removed after
    aside = target.with_name(f".{target.name}.replaced-{_owner()}")
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    sync(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def remove_leftovers(save_path: Path) -> None:
    """Remove half-written directories and files (`latest`) of processes that no longer run. A directory that had
    stepped aside for another, which has not come, gets its name again. Call it before this process writes there.
    """
    remedy = "remove it by hand, then start the trainer again"
    for folder in [*save_path.glob(".*.partial-*"), *save_path.glob(".*.replaced-*")]:
        name, _, owner = folder.name[1:].rpartition("-")
        if _still_runs(owner):
            continue
        target = folder.with_name(name.rpartition(".")[0])
        if name.endswith(".replaced") and not target.exists():
            log.info("Restoring the name of %s: a process ended while it replaced that directory", target)
            with reading(f"cannot rename {folder}", CheckpointError, remedy=f"rename it to {target.name} by hand"):
                folder.rename(target)
        else:
            log.info("Removing %s, left by a process that has ended", folder)
            with reading(f"cannot remove {folder}", CheckpointError, remedy=remedy):
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder)
                else:
                    folder.unlink()


def _owner() -> str:
    """Return this process as names have it: pid and start, in ticks. In a container the next trainer has the same pid,
    and a thread may have it.
    """
    return f"{os.getpid()}.{first_ticks(os.getpid()) or 0}"


def _still_runs(owner: str) -> bool:
    """Return whether the owner in a name is another process that runs. The name of a file has its pid alone."""
    pid, _, start = owner.partition(".")
    if not pid.isdecimal() or int(pid) == os.getpid():
        return False
    return is_alive(int(pid), int(start) if start.isdecimal() else None)


def set_aside(folder: Path, why: str) -> None:
    """Give a directory a name that nobody takes for one of a run's, with the time at which it was written. Raises
    CheckpointError.
    """
    with reading(f"cannot rename {folder}", CheckpointError, remedy="move it away by hand, then resume again"):
        aside = folder.rename(dated(folder))
        sync(folder.parent)
    log.info("Moved %s, %s, to %s", folder, why, aside)


def remove_folder(folder: Path, remedy: str, raises: MakeError = CheckpointError) -> None:
    """Remove a directory that is needed no more. It loses its name first, so that nobody takes what a killed process
    leaves of it for the whole. One that somebody has removed is no error. Raises `raises`, in one line with `remedy`.
    """
    if not os.path.lexists(folder):
        return
    with reading(f"cannot remove {folder}", raises, remedy=remedy):
        if folder.is_symlink() or not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        unnamed = folder.rename(folder.with_name(f".{folder.name}.partial-{_owner()}"))
    with reading(f"cannot remove {unnamed}, which was {folder.name}", raises, remedy=remedy):
        shutil.rmtree(unnamed)
