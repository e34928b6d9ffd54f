"""The checkpoints of a run as its loop uses them: it begins one, and later learns that it is on the disk.

    save ──▶ whole: written here, at once (checkpoint.py)
         ──▶ sharded: every rank copies its rows, training continues ··▶ all ranks' files are flushed
                                                                       ──▶ manifest ──rename──▶ `latest`
    step_4/   config.json, tokenizer files, README.md
              shards/rank_R.safetensors   rank R's rows of weights and moments, and its generators (weights/shards.py)
              trainer_state.pt            progress, and the optimizer's name, shapes and counts of steps
              policy.json, manifest.json

A batch may be acknowledged once `saved_leases` has its lease, that is, after `latest` names a checkpoint that contains
its step. Until then the step is only in memory, and the batching API would deliver the batch again.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch

from atroposlib.logs import get_logger, say
from atroposlib.wire.bridge import write_policy_version
from atroposlib.wire.folders import SHARDS, FileRecord
from example_trainer.errors import TrainerError
from example_trainer.loop.learner import Learner
from example_trainer.model.loading import expect_rebuildable, is_rebuildable
from example_trainer.output.model_card import write_model_card
from example_trainer.ranks.ranks import RanksLost
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import STATE, Checkpoints, Progress, about, set_later_aside
from example_trainer.weights.gathered import write_about_model
from example_trainer.weights.optimizer_state import rest
from example_trainer.weights.written import CheckpointError, make_partial, put_in_place, writing

LARGE_PARAMETERS = 3_000_000_000  # from here on training does not wait until a checkpoint is written
POLL_S = 0.5
STALLED_S = 1800.0  # in which no rank writes a byte: flushing what the kernel has not written yet may take minutes

log = get_logger(__name__)


@dataclass(frozen=True)
class Save:
    """A checkpoint that the ranks write."""

    progress: Progress
    partial: Path
    target: Path
    started: float


class Saves:
    """Writes the checkpoints of one run, on rank 0. At most one is being written: the next one, and the run's end,
    wait for it.

    `pause` is how to wait for a while.
    """

    def __init__(self, config: TrainerConfig, learner: Learner, pause: Callable[[float], None]) -> None:
        self.saved_leases: list[int] = []  # of the batches that checkpoints on the disk contain
        self.saved_step = learner.progress.step  # of the last of them
        self.sharded = writes_shards(config, learner)
        self._config = config
        self._learner = learner
        self._pause = pause
        written = set_later_aside(config.save_path, learner.trained.form.step_prefix, learner.progress)
        # where the trainer starts vLLM, it may have to start it again from the one that the run continues
        former = written[:-1] if config.bridge.owns_vllm else written
        self._checkpoints = Checkpoints(config.save_path, config.keep_checkpoints, former)
        self._current: Save | None = None
        self._looked = 0.0
        self._nbytes = 0  # written so far

    def save(self, progress: Progress) -> None:
        """Begin the checkpoint of this step, after the previous one. Raises CheckpointError."""
        self.complete()
        learner, trained = self._learner, self._learner.trained
        target = self._config.save_path / f"{trained.form.step_prefix}{progress.step}"
        log.info("Writing checkpoint %s", target)
        if self.sharded:
            self._begin(progress, target)
            return
        shared = learner.ranks.mesh is not None
        moments = learner.whole_moments() if shared else None
        of_ranks = learner.generators() if learner.ranks.size > 1 else None
        self._checkpoints.save(progress, trained, learner.optimizer, moments, of_ranks)
        self._note(progress)

    def check(self) -> None:
        """`advance`, now and then."""
        if time.monotonic() - self._looked > POLL_S:
            self.advance()

    def advance(self) -> bool:
        """Return whether no checkpoint is being written; one that has just been written has got its name. Never
        waits. Raises CheckpointError.
        """
        self._looked = time.monotonic()
        return self._current is None or self._publish_if_written(self._current)

    def complete(self) -> None:
        """Return when no checkpoint is being written. Raises CheckpointError."""
        if self.advance():
            return
        log.info("Waiting for the previous checkpoint to be on the disk, %.0f s after the last byte", STALLED_S)
        start = last = time.monotonic()
        nbytes = self._nbytes
        while not self.advance():
            if self._nbytes > nbytes:
                nbytes, last = self._nbytes, time.monotonic()
            elif time.monotonic() - last > STALLED_S:
                self._give_up(nbytes)
            self._pause(0.05)
        log.info("Waited %.1f s for the checkpoint", time.monotonic() - start)

    def write_final(self) -> Path:
        """Write the trained model, with its card, and return its directory. Raises CheckpointError, for a checkpoint
        that was being written and failed once the model is on the disk.
        """
        try:
            self.complete()
        except CheckpointError:
            self._write_final()
            raise
        return self._write_final()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The run ends. A checkpoint that is being written is completed if the ranks can, and removed if not, or if
        somebody ends the run.
        """
        if isinstance(error, TrainerError) and not isinstance(error, RanksLost | CheckpointError):
            try:
                self.complete()
            except TrainerError as failed:
                log.warning("%s", failed)
        self._learner.close()
        if self._current is not None:
            log.warning("Removed checkpoint %s, which was incomplete", self._current.target)
            self._drop(self._current)

    def _write_final(self) -> Path:
        trained = self._learner.trained
        final = self._config.save_path / trained.form.final
        log.info("Writing the trained model to %s", final)
        trained.write(final, also=partial(write_model_card, config=self._config))
        say(f"Trained model: {final}")
        return final

    def _begin(self, progress: Progress, target: Path) -> None:
        learner, started = self._learner, time.monotonic()
        model, optimizer = learner.trained.model, learner.optimizer
        nbytes = sum(4 * parameter.numel() * (1 + 2 * parameter.requires_grad) for parameter in model.parameters())
        with writing(target):
            save = Save(progress, make_partial(target, nbytes), target, started)
            try:
                (save.partial / SHARDS).mkdir()
                write_about_model(save.partial, model, learner.trained.tokenizer)
                write_model_card(save.partial, self._config)
                torch.save({**about(progress, optimizer), "rest": rest(optimizer)}, save.partial / STATE)
                write_policy_version(save.partial, progress.policy_version)
                learner.begin_save(str(save.partial))
            except BaseException:
                self._drop(save)
                raise
        self._current = save
        log.info(
            "Checkpoint %s, %.1f GB: training continues after %.2f s",
            target.name,
            nbytes / 1e9,
            time.monotonic() - started,
        )

    def _publish_if_written(self, save: Save) -> bool:
        """Return whether every rank's part is on the disk; the checkpoint has its name then."""
        written = self._learner.saved()
        self._nbytes = sum(each.bytes for each in written)
        failed = [each.failed for each in written if each.failed]
        if not failed and not all(each.name for each in written):
            return False
        self._current = None
        with writing(save.target):
            try:
                if failed:
                    raise OSError(failed[0])
                records = {f"{SHARDS}/{each.name}": FileRecord(each.bytes, each.sha256) for each in written}
                put_in_place(save.partial, save.target, records)
            except BaseException:
                self._drop(save)
                raise
        self._checkpoints.point_to(save.target)
        self._note(save.progress)
        log.info("Checkpoint %s is on the disk %.1f s after its step", save.target, time.monotonic() - save.started)
        return True

    def _note(self, progress: Progress) -> None:
        self.saved_leases += progress.leases
        self.saved_step = progress.step

    def _give_up(self, nbytes: int) -> NoReturn:
        """Leave a checkpoint as it is on a disk that hangs, where removing it would hang, too."""
        save, self._current = self._current, None
        self._learner.close()
        assert save is not None
        raise CheckpointError(
            f"{save.partial} has {nbytes / 1e9:.1f} GB, and no rank has written to it for {STALLED_S:.0f} s: the disk"
            " hangs; see to it, then resume the run from the checkpoint before"
        )

    def _drop(self, save: Save) -> None:
        self._current = None
        self._learner.close()
        shutil.rmtree(save.partial, ignore_errors=True)


def writes_shards(config: TrainerConfig, learner: Learner) -> bool:
    """Return whether this run's checkpoints are in shards. Raises CheckpointError, or ModelError for a model that could
    not be loaded from them, where they are asked for and cannot be.
    """
    if config.checkpoint_format == "hf":
        return False
    shared = learner.ranks.mesh is not None
    splits = config.optimizer == "adamw" and not learner.in_shared_memory and not config.bridge.trains_adapter
    if config.checkpoint_format == "sharded" and not splits:
        why = (
            f"--optimizer {config.optimizer}"
            if config.optimizer != "adamw"
            else f"--weight-bridge-mode {config.bridge.typed}"
        )
        raise CheckpointError(
            f"--checkpoint-format sharded splits weights and AdamW's moments by rows, which {why} does not keep so:"
            " drop the flag"
        )
    model = learner.trained.model
    if shared:
        return splits  # it was loaded from parts, and can be again
    if config.checkpoint_format == "sharded":
        expect_rebuildable(model)
        return True
    large = sum(each.numel() for each in model.parameters()) >= LARGE_PARAMETERS
    return splits and large and is_rebuildable(model)
