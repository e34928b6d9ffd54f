"""The policies of a run with the best held-out accuracy, on the disk.

SAVE_PATH/
  best_model_8/    the policy of version 8, to serve or to train on, with evaluation.json: its accuracy
  best_model       a link to the best of them (best_adapter with LoRA)
"""

import os
import shutil
from functools import partial
from pathlib import Path

import msgspec

from atroposlib.errors import reading
from atroposlib.files import sync, write_whole
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import write_policy_version
from atroposlib.wire.folders import MANIFEST
from atroposlib.wire.held_out import HeldOut, does_as_well
from example_trainer.output.model_card import write_model_card
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import Progress
from example_trainer.weights.written import CheckpointError, TrainedModel, remove_folder, set_aside, write_folder

EVALUATION = "evaluation.json"

log = get_logger(__name__)


class BestPolicy(msgspec.Struct, frozen=True):
    """What evaluation.json has: whose weights lie beside it, and how they did."""

    run: str
    step: int
    policy_version: int
    held_out: HeldOut


class BestPolicies:
    """Keeps the `--keep-best` policies with the highest held-out accuracy; of equal ones the later ones.

    A run that resumes knows those that it wrote up to its checkpoint. Later ones, of steps that it makes again, get
    other names, and those of other runs stay where they are. So one that is outdone stays, too, until a checkpoint has
    the step that outdid it.
    """

    def __init__(self, config: TrainerConfig, trained: TrainedModel, progress: Progress) -> None:
        self._config = config
        self._trained = trained
        self._run = progress.run
        self._link = config.save_path / trained.form.best
        ranked = sorted(self._up_to(progress.policy_version), key=_rank, reverse=True)
        keep = config.keep_best or len(ranked)  # 0 writes none, and removes none
        self._kept = ranked[:keep]  # the best first
        self._outdone = [(progress.step, each) for each in ranked[keep:]]  # at which step; still on the disk
        self._last: BestPolicy | None = None  # the newest result
        self._final: dict[int, HeldOut] = {}  # by policy version, with further questions
        self.highest = progress.highest  # of all results up to this step, kept or not
        self.without_gain = progress.without_gain  # evaluations in a row that were no higher
        if self._kept:  # a process may have ended before it did this
            self._point_to(self.folder(self._kept[0]))

    @property
    def best(self) -> BestPolicy | None:
        """The best policy that is on the disk."""
        return self._kept[0] if self._kept else None

    def folder(self, policy: BestPolicy) -> Path:
        """Return where a policy's weights are."""
        return self._link.with_name(f"{self._link.name}_{policy.policy_version}")

    def note(self, step: int, policy_version: int, held_out: HeldOut) -> None:
        """Take the result of the policy that the trainer holds, and write the policy if it is among the best. Raises
        CheckpointError.
        """
        policy = self._last = BestPolicy(self._run, step, policy_version, msgspec.structs.replace(held_out, final=None))
        self.note_final(policy_version, held_out)
        gains = self.highest is None or held_out.accuracy > self.highest
        self.without_gain = 0 if gains else self.without_gain + 1
        self.highest = held_out.accuracy if gains else self.highest
        others = [each for each in self._kept if each.policy_version != policy_version]
        ranked = sorted([policy, *others], key=_rank, reverse=True)
        kept, dropped = ranked[: self._config.keep_best], ranked[self._config.keep_best :]
        if policy in dropped:
            return
        folder = self.folder(policy)
        log.info("Writing the policy of version %d, held-out accuracy %s, to %s", policy_version, held_out, folder)
        self._trained.write(folder, policy_version, also=partial(self._describe, policy))
        self._kept = kept
        self._point_to(self.folder(kept[0]))
        self._outdone += [(step, each) for each in dropped]

    def remove_outdone(self, saved_step: int) -> None:
        """Remove those that a run which resumes from its newest checkpoint, of `saved_step`, does not need: it knows
        what outdid them, or makes them again. Raises CheckpointError.
        """
        needed = [(step, policy) for step, policy in self._outdone if policy.step <= saved_step < step]
        for step, policy in self._outdone:
            if (step, policy) not in needed:
                remove_folder(self.folder(policy), "remove it by hand, then resume the run")
        self._outdone = needed

    def note_final(self, policy_version: int, held_out: HeldOut) -> None:
        """Take what an evaluation at the end of the run found with further questions, if it asked any."""
        if held_out.final is not None:
            self._final[policy_version] = held_out.final

    @property
    def to_serve_again(self) -> BestPolicy | None:
        """The best policy, where it is not the last one, and the last one was asked further questions."""
        last, best = self._last, self.best
        if last is None or best is None or best.policy_version == last.policy_version:
            return None
        return best if last.policy_version in self._final else None

    def settle(self, final: Path) -> None:
        """Have the last policy, whose directory is `final`, be the best one, if it did as well on further questions.
        Raises CheckpointError.
        """
        last, best = self._last, self.best
        if last is None or best is None or not does_as_well(self._told(last), self._told(best)):
            return
        folder = self.folder(last)
        if last.policy_version not in [each.policy_version for each in self._kept]:
            log.info("Copying %s to %s: of further questions it answers as many as the best policy", final, folder)
            write_folder(folder, partial(self._copy, last, final), self._trained.nbytes)
        ranked = [last, *(each for each in self._kept if each.policy_version != last.policy_version)]
        self._kept, dropped = ranked[: self._config.keep_best], ranked[self._config.keep_best :]
        self._point_to(folder)
        for each in dropped:
            remove_folder(self.folder(each), "remove it by hand")

    def _told(self, policy: BestPolicy) -> HeldOut:
        return msgspec.structs.replace(policy.held_out, final=self._final.get(policy.policy_version))

    def _copy(self, policy: BestPolicy, source: Path, folder: Path) -> None:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)
        write_policy_version(folder, policy.policy_version)
        self._describe(policy, folder)

    def lines(self) -> list[str]:
        """How the last policy and the best one did, for the end of a run; nothing without evaluations."""
        named = {"Last policy": self._last, f"Best policy, in {self._link}": self.best}
        return [
            f"{name}: version {each.policy_version}, held-out accuracy"
            f" {self._final.get(each.policy_version, each.held_out)}"
            for name, each in named.items()
            if each is not None
        ]

    def _describe(self, policy: BestPolicy, folder: Path) -> None:
        write_whole(folder / EVALUATION, msgspec.json.format(msgspec.json.encode(policy)))
        write_model_card(folder, self._config)

    def _point_to(self, folder: Path) -> None:
        """Have the link name a directory that is on the disk. Raises CheckpointError."""
        new = self._link.with_name(f".{self._link.name}.partial-{os.getpid()}")
        with reading(f"{folder} is written, but {self._link} does not name it", CheckpointError, remedy="free space"):
            new.unlink(missing_ok=True)
            new.symlink_to(folder.name)
            new.replace(self._link)
            sync(self._link.parent)

    def _up_to(self, policy_version: int) -> list[BestPolicy]:
        """Return what this run wrote up to that version, and rename what it wrote after it. Raises CheckpointError."""
        written = self._written()
        for policy in written:
            folder = self.folder(policy)
            if policy.policy_version > policy_version:
                if self._link.is_symlink() and self._link.readlink().name == folder.name:
                    self._link.unlink()
                set_aside(folder, f"of a version after {policy_version}, from which this run continues")
        return [policy for policy in written if policy.policy_version <= policy_version]

    def _written(self) -> list[BestPolicy]:
        """Return the policies that this run has written, as far as they are whole."""
        policies = []
        for path in self._link.parent.glob(f"{self._link.name}_*/{EVALUATION}"):
            try:
                policy = msgspec.json.decode(path.read_bytes(), type=BestPolicy)
            except (OSError, msgspec.DecodeError) as error:
                log.warning("%s is not counted among the best policies: %s", path.parent, error)
                continue
            if policy.run == self._run and self.folder(policy) == path.parent:
                policies.append(policy)
        return policies


def _rank(policy: BestPolicy) -> tuple[float, int]:
    return policy.held_out.accuracy, policy.policy_version
