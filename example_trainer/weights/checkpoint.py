"""Checkpoints: complete or absent, and a killed run that resumes from one computes the same bits.

    SAVE_PATH/
      step_4/       config.json, model.safetensors, tokenizer files    a Hugging Face directory, to serve or to train on
                    trainer_state.pt     optimizer moments, generators, step, policy version
                    policy.json          the policy version, by which a vLLM server labels what it samples
                    manifest.json        size and SHA-256 of every file, written last
      latest        the name of the newest checkpoint directory
      .begun        beside an earlier run's checkpoints: the run that began last, which --resume auto means
      .ended        the run whose end came last, and its step, until another one begins
      served_4/     model files and policy.json, from which mode none has started vLLM
      final_model/  the Hugging Face directory alone, at the end of the run

Where the weights are spread over ranks, or large, `step_4/` has no model.safetensors: the ranks write `shards/` beside
training (loop/saves.py), from which example_trainer/weights/export.py makes a Hugging Face directory.

A directory is written completely or not at all (weights/written.py), and `latest` is replaced after that: a failure
before that leaves the previous checkpoint and `latest` unchanged. A LoRA run keeps only the adapter, as
`adapter_step_N/` and `final_adapter/`.
"""

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from atroposlib.errors import reading
from atroposlib.files import write_whole
from atroposlib.logs import get_logger
from atroposlib.wire.folders import LATEST, is_sharded
from example_trainer.model.loading import ModelError, meta_model
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.manifest import MANIFEST, expect_whole
from example_trainer.weights.optimizer_state import State, from_shards, from_whole, set_generators
from example_trainer.weights.source import shapes_of
from example_trainer.weights.written import CheckpointError, TrainedModel, remove_folder, set_aside

STATE = "trainer_state.pt"
BEGUN = ".begun"
ENDED = ".ended"
NAME = re.compile(r"\w{1,100}", re.ASCII)  # of a checkpoint that `latest` names

log = get_logger(__name__)


@dataclass
class Progress:
    """Records how far a run is: steps done, the policy version they led to, optimizer updates among them. `run`
    names it to the batching API.

    `leases` are the batches it has trained on that the API may not know to be done with. `kernels` multiply its
    matrices (model/cpu_kernels.py); a checkpoint without is older than the choice. `share_prefixes` is how it computes,
    since another way rounds differently; None in a checkpoint of before there was a choice. `chain` is that of its
    steps, where they can be repeated (output/step_chain.py). `highest` is the best held-out accuracy so far,
    `without_gain` the evaluations in a row that were no higher, `evaluated` the version of the last of them, and
    `ends_early_after` the last step of a run that was flat for so long. `mismatch` is that of exact/check.py.
    """

    step: int = 0
    policy_version: int = 0
    updates: int = 0
    run: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    leases: list[int] = field(default_factory=list, compare=False)
    kernels: str = field(default="torch", compare=False)
    share_prefixes: bool | None = field(default=None, compare=False)
    chain: str = field(default="", compare=False)
    without_gain: int = field(default=0, compare=False)
    highest: float | None = field(default=None, compare=False)
    evaluated: int | None = field(default=None, compare=False)  # None in a checkpoint of before this was kept
    ends_early_after: int | None = field(default=None, compare=False)
    mismatch: str | None = field(default="", compare=False)


class Checkpoints:
    """The step directories that a run writes under `save_path`. It keeps the `keep` newest of its own (0 keeps all), of
    which `written` are there already.
    """

    def __init__(self, save_path: Path, keep: int, written: Iterable[Path] = ()) -> None:
        self._save_path = save_path
        self._keep = keep
        self._written = list(written)

    def save(
        self,
        progress: Progress,
        trained: TrainedModel,
        optimizer: Optimizer,
        moments: State | None = None,
        of_ranks: Mapping[str, list[Tensor]] | None = None,
    ) -> Path:
        """Write the directory of this step and point `latest` at it. `moments` are the optimizer's, where ranks share
        them, and `of_ranks` the generators of several. Raises CheckpointError, with nothing changed.
        """
        state = {
            **about(progress, optimizer),
            "moments": optimizer.state_dict()["state"] if moments is None else moments,
            "generators": {
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
                "of_ranks": of_ranks,
            },
        }
        target = trained.write(
            self._save_path / f"{trained.form.step_prefix}{progress.step}",
            progress.policy_version,
            also=lambda folder: torch.save(state, folder / STATE),
            also_bytes=sum(
                moment.nbytes
                for moments in optimizer.state.values()
                for moment in moments.values()
                if isinstance(moment, torch.Tensor)
            ),
        )
        self.point_to(target)
        return target

    def point_to(self, target: Path) -> None:
        """Have `latest` name a directory that is on the disk, and remove those that are one too many. Raises
        CheckpointError.
        """
        pointer = self._save_path / LATEST
        with reading(
            f"{target} is written, but {pointer} is not",
            CheckpointError,
            remedy=f"free space, then use --resume {target}",
        ):
            write_whole(pointer, f"{target.name}\n".encode())
        self._written.append(target)
        if self._keep:
            while len(self._written) > self._keep:
                remove_folder(self._written.pop(0), f"remove it by hand, then use --resume {target}")


def set_later_aside(save_path: Path, prefix: str, progress: Progress) -> list[Path]:
    """Rename the step directories under `save_path` that the run of `progress` wrote after its step, from which it now
    makes those steps again, so that neither it nor one that resumes it takes them for its own. If `latest` names one of
    them, or another run's, which whoever resumes this one would continue, it comes to name the run's checkpoint of this
    step, or nothing where that lies elsewhere or the run is fresh. Return the run's others, the oldest first; those of
    other runs are not its to remove. Raises CheckpointError.
    """
    found = _written_by(progress.run, save_path, prefix) if progress.step else {}
    later = [found[step] for step in sorted(found) if step > progress.step]
    pointer = save_path / LATEST
    with reading(f"{pointer} cannot be changed", CheckpointError, remedy="free space, then resume again"):
        if progress.step not in found and _whole(save_path):
            write_whole(save_path / BEGUN, b"" if progress.step else progress.run.encode())
        (save_path / ENDED).unlink(missing_ok=True)
        if pointer.exists() and not _names_progress(pointer, progress):
            if progress.step in found:
                write_whole(pointer, f"{found[progress.step].name}\n".encode())
            else:
                log.info("Removing %s, which names no checkpoint of this run up to step %d", pointer, progress.step)
                pointer.unlink()
    for folder in later:
        set_aside(folder, f"of a step after {progress.step}, from which this run continues")
    return [found[step] for step in sorted(found) if step <= progress.step]


def note_end(save_path: Path, progress: Progress) -> None:
    """Note that nothing is left to do for the run of `progress`. A disk without room costs a line in the log, and a
    resume the work of the run's end.
    """
    path = save_path / ENDED
    try:
        write_whole(path, _end_of(progress))
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error)


def has_ended(save_path: Path, progress: Progress) -> bool:
    """Return whether the run of `progress` noted its end at this step, and no run has begun under `save_path` since."""
    path = save_path / ENDED
    with reading(f"{path} cannot be read", CheckpointError, remedy="remove it to write the trained model again"):
        return path.is_file() and path.read_bytes() == _end_of(progress)


def _end_of(progress: Progress) -> bytes:
    return f"{progress.run} {progress.step}\n".encode()


def _names_progress(pointer: Path, progress: Progress) -> bool:
    """Return whether `latest` names a checkpoint of this run, up to its step."""
    name = pointer.read_bytes().decode(errors="replace").strip()
    if not progress.step or not NAME.fullmatch(name):
        return False
    saved = _saved(pointer.with_name(name))
    return saved is not None and saved.run == progress.run and saved.step <= progress.step


def _written_by(run: str, save_path: Path, prefix: str) -> dict[int, Path]:
    """Find the step directories under `save_path` that a run wrote, by their steps."""
    found = {}
    for folder in save_path.glob(f"{prefix}[0-9]*"):
        if folder.is_symlink():  # to what somebody moved
            continue
        saved = _saved(folder)
        if saved is not None and saved.run == run and folder.name == f"{prefix}{saved.step}":
            found[saved.step] = folder
    return found


def _saved(folder: Path) -> Progress | None:
    """Return how far the run of a checkpoint was; None for one that is damaged."""
    try:
        state: Any = _state(folder, mapped=True)
        with _expecting_ours(folder):
            return _progress(state)
    except CheckpointError as error:
        log.warning("%s is not counted among the checkpoints of this run: %s", folder, error)
        return None


def _whole(save_path: Path) -> list[Path]:
    return sorted(path.parent for path in save_path.glob(f"*step_[0-9]*/{MANIFEST}"))


def about(progress: Progress, optimizer: Optimizer) -> dict[str, Any]:
    """Return what trainer_state.pt records about a checkpoint, beside moments and generators."""
    return {"progress": vars(progress), "optimizer": type(optimizer).__name__, "shapes": _shapes(optimizer)}


def find_checkpoint(resume: str | None, save_path: Path) -> Path | None:
    """The directory `--resume` means, verified against its manifest; None for a fresh start. Raises CheckpointError."""
    if resume is None:
        return None
    folder = _latest(resume, save_path) if resume in ("latest", "auto") else Path(resume)
    if folder is not None:
        verify(folder)
    return folder


def _latest(resume: str, save_path: Path) -> Path | None:
    pointer = save_path / LATEST
    steps = _whole(save_path)
    remedy = (
        f"name one to resume from, such as --resume {max(steps, key=_step_of)}"
        if steps
        else "choose another --save-path"
    )
    if not pointer.exists():
        if own := _of_run_that_began(save_path, steps):  # killed before `latest` named its first one
            return own[-1]
        if resume == "auto" and (own is not None or not steps):
            if steps:
                log.warning("Starting afresh: the run that began last in %s kept no checkpoint; %s", save_path, remedy)
            return None
        if steps:
            raise CheckpointError(
                f"--resume {resume}: {save_path} has {len(steps)} checkpoints but no {LATEST}; {remedy}, "
                "or start afresh with another --save-path"
            )
        raise CheckpointError(
            f"--resume latest: {pointer} does not exist; use --resume auto to start afresh, or name a checkpoint "
            "directory"
        )
    with reading(f"{pointer} cannot be read", CheckpointError, remedy=remedy):
        name = pointer.read_bytes().decode().strip()
    if not NAME.fullmatch(name):
        raise CheckpointError(f"{pointer} is damaged: {name[:80]!a} is not the name of a checkpoint; {remedy}")
    return save_path / name


def _of_run_that_began(save_path: Path, steps: Sequence[Path]) -> list[Path] | None:
    """Return those of the directories that the run wrote which began there last, the oldest first; None where it is not
    known, or it continues a checkpoint that lies elsewhere.
    """
    saved = {each: _saved(each) for each in steps if _step_of(each) >= 0}
    begun = save_path / BEGUN
    if not begun.is_file():
        return [*saved] if len(steps) == len(saved) == 1 and all(saved.values()) else None
    run = begun.read_bytes().decode(errors="replace")
    own = [each for each, progress in saved.items() if progress is not None and progress.run == run]
    return sorted(own, key=_step_of) if run else None


def _step_of(folder: Path) -> int:
    digits = folder.name.rpartition("_")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() else -1


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file of the manifest is there with its size and digest."""
    if STATE not in expect_whole(folder, CheckpointError):
        raise CheckpointError(
            f"{folder} has a model without {STATE}; pass it as --model-name, or give a step_N directory to --resume"
        )


def expect_same_model(folder: Path, config: TrainerConfig) -> None:
    """Raise CheckpointError, before anything is loaded, if `folder` holds another model than --model-name. A model
    that is no longer there is compared with nothing, and an adapter knows its own.
    """
    if config.bridge.trains_adapter:
        return
    with suppress(ModelError):
        given, saved = shapes_of(meta_model(config.model_name)), shapes_of(meta_model(str(folder)))
        if other := [name for name in given.keys() | saved.keys() if given.get(name) != saved.get(name)]:
            name = min(other)
            found, wanted = (list(shapes[name]) if name in shapes else "nothing" for shapes in (saved, given))
            raise CheckpointError(
                f"{folder} is a checkpoint of another model: it has {found} for {name}, but --model-name "
                f"{config.model_name} has {wanted}; give the same --model-name, or another --resume"
            )


def resumed(config: TrainerConfig, folder: Path) -> TrainerConfig:
    """Return the configuration of a run that continues `folder`: it shares prefixes as the run of this checkpoint did.
    Raises CheckpointError if the flags ask for the other way. A checkpoint that does not tell computed every sequence
    whole, and continues as configured.
    """
    with _expecting_ours(folder):
        shared = _progress(_state(folder, mapped=True)).share_prefixes
    if shared is None:
        log.warning("%s is older than shared prefixes; this run rounds differently where it shares them", folder)
        return config
    if config.share_prefixes not in (None, shared):
        then, now = (
            "--share-prefixes" if share else "--no-share-prefixes" for share in (shared, config.share_prefixes)
        )
        raise CheckpointError(
            f"{folder} was computed with {then}, and this run has {now}, which rounds differently: leave out {now}, "
            "or start a new run with the checkpoint as --model-name"
        )
    return config.model_copy(update={"share_prefixes": shared})


def restore(folder: Path, optimizer: Optimizer, model: nn.Module | None = None, rank: int = 0) -> Progress:
    """Load this rank's part of the optimizer's moments, and its generators, from a verified checkpoint; rates and other
    settings stay as configured now. One in shards needs the `model` that the optimizer steps.

    Raises CheckpointError if the moments are another optimizer's or another model's, or cannot be loaded.
    """
    sharded = any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])
    state = _state(folder, mapped=sharded)  # each rank reads its own rows alone
    with _expecting_ours(folder):
        return _restored(state, folder, optimizer, model, rank)


def _state(folder: Path, mapped: bool) -> object:
    """Load what trainer_state.pt has, or map it."""
    try:
        return torch.load(folder / STATE, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        # torch's own text tells how to load a pickle that runs code
        raise CheckpointError(
            f"{folder / STATE} cannot be loaded ({type(error).__name__}); resume from another step_N directory"
        ) from error


@contextmanager
def _expecting_ours(folder: Path) -> Iterator[None]:
    """Raise CheckpointError where the contents of a state are not what this trainer writes."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(
            f"{folder / STATE} is not what this trainer writes ({type(error).__name__}: {error}); resume from another"
            " step_N directory"
        ) from error


def _restored(state: Any, folder: Path, optimizer: Optimizer, model: nn.Module | None, rank: int) -> Progress:
    """Restore as `restore` does, from what its file has; raises whatever Python does for other contents."""
    if state["optimizer"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{folder / STATE} contains the moments of {state['optimizer']}, but this run uses "
            f"{type(optimizer).__name__}: "
            "give the same --optimizer"
        )
    if state.get("shapes") != _shapes(optimizer):
        raise CheckpointError(
            f"{folder / STATE} contains the moments of other parameters than this run's {len(_shapes(optimizer))}: "
            "give the same model and, where weights are shared with vLLM, the same --tensor-parallel-size; "
            "or start a new run with the checkpoint as --model-name"
        )
    if is_sharded(folder):
        assert model is not None
        moments = from_shards(folder, state["rest"], model, optimizer)
        set_generators(folder, rank)
    else:
        moments = from_whole(state["moments"], optimizer)
        _set_generators(state["generators"], rank)
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return _progress(state)


def _set_generators(saved: Any, rank: int) -> None:
    """Set the random generators to those of `rank`; of rank 0 where there were fewer."""
    of_ranks = saved.get("of_ranks")
    own = {name: states[rank if rank < len(states) else 0] for name, states in (of_ranks or {}).items()}
    torch.set_rng_state(own.get("cpu", saved["torch"]))
    if torch.cuda.is_available():
        if "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"])
        elif saved["cuda"]:  # the process that wrote it may have seen more GPUs
            torch.cuda.set_rng_state_all(saved["cuda"][: torch.cuda.device_count()])


def _progress(state: Any) -> Progress:
    return msgspec.convert(state["progress"], Progress)


def _shapes(optimizer: Optimizer) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]
