"""Compute a step of a finished run again, from the checkpoint before it and the groups that it trained on.

    python -m example_trainer.recompute --run runs/NAME --step 7        what `atropos reproduce NAME --step 7` starts

Nothing is sampled: batches.jsonl has the groups of a run with --deterministic. Without a checkpoint right before the
step, the steps since the last one, or since the start model, are computed too. Exits 0 if the weights are those of the
run, bit for bit, 1 if not, and 2 if that cannot be said.
"""

import example_trainer.openmp  # noqa: F401  isort: skip  before torch

import time
from collections.abc import Iterator
from contextlib import closing
from itertools import takewhile
from pathlib import Path

import msgspec
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.errors import NOT_COMPARED, one_line_errors, reading
from atroposlib.files import expect_regular
from atroposlib.logs import configure_logging, get_logger, say
from atroposlib.wire.batching import ScoredData
from example_trainer.data.batching import make_batch
from example_trainer.errors import TrainerError
from example_trainer.exact.check import Served
from example_trainer.grpo import prepare_torch
from example_trainer.loop.bad_data import BadBatches
from example_trainer.loop.learner import Learner
from example_trainer.loop.offline import OfflineData, examples_of, sides_of
from example_trainer.loop.opening import requirements, resolved
from example_trainer.loop.updates import Updates, plan_of_step
from example_trainer.output.step_chain import BATCHES, RECEIPT, read_batches, read_digests
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.config import TrainerConfig

log = get_logger(__name__)

PROG = "python -m example_trainer.recompute"


class RecomputeConfig(Config):
    """Compute a step of a finished run again, bit for bit."""

    run: Path = Field(description="directory of the run")
    step: int = Field(ge=1, description="step to compute again")


def recompute(folder: Path, step: int) -> bool:
    """Compute the run's steps up to `step` again; True if the weights are equal. Raises TrainerError."""
    metrics = folder / "metrics.jsonl"
    remedy = "name the directory of a run"
    with reading(f"cannot read {metrics}", TrainerError, remedy=remedy):
        rows = read_digests(metrics)
    if step not in rows:
        raise TrainerError(f"{folder} has no step {step} of a run with --deterministic: it has {len(rows)} such steps")
    start = time.monotonic()
    config = config_of(folder, step)
    learner = Learner(config, prepare_torch(config), ALONE)
    with closing(learner):
        source = resolved(learner)
        learner.load_into(None, source or config.model_name)
        learner.begin(source)
        learner.compute_as(served_by(folder / RECEIPT))
        first = learner.progress.step + 1
        if learner.trained.digest() != rows[first].weights_before:
            raise TrainerError(
                f"{source or config.model_name} is not what the run had before step {first}: its weights differ"
            )
        examples = examples_of(learner.config)
        sides = sides_of(examples, learner.config, learner.trained.tokenizer) if examples else []
        offline = OfflineData(learner, sides) if sides else None
        updates_before = learner.progress.updates
        for number, groups in steps_of(folder / BATCHES, first, step):
            log.info("Computing step %d on %d groups", number, len(groups))
            updates_before += updated(learner, number, updates_before, groups, offline)
            if config.ema_decay and learner.trained.digest() != rows[number].weights:  # the run ended here, for a while
                learner.take_average()
        found = learner.trained.digest()
    equal = found == rows[step].weights
    say(
        f"Step {step}: {'equal' if equal else 'DIFFERENT'}, weights {found[:16]}"
        + ("" if equal else f", in the run {rows[step].weights[:16]}")
        + f" ({time.monotonic() - start:.1f} s, from {source or config.model_name})"
    )
    return equal


def served_by(path: Path) -> Served:
    """How the run's vLLM computed. Raises TrainerError."""
    remedy = "the trainer writes it when a run with --deterministic starts"
    with reading(f"cannot read {path}", TrainerError, remedy=remedy, also=(msgspec.MsgspecError, KeyError)):
        return msgspec.convert(msgspec.json.decode(expect_regular(path).read_bytes())["served"], Served)


def config_of(folder: Path, step: int) -> TrainerConfig:
    """The run's configuration, to continue from its last checkpoint before `step`."""
    config = load_config(TrainerConfig, ["--config", str(folder / "trainer.yaml")], prog=PROG)
    checkpoints = sorted(
        (int(path.name.removeprefix("step_")), path)
        for path in (folder / "checkpoints").glob("step_*")
        if path.name.removeprefix("step_").isdigit()
    )
    before = [path for number, path in checkpoints if number < step]
    return config.model_copy(
        update={"resume": str(before[-1]) if before else None, "training_steps": max(config.training_steps, step)}
    )


def steps_of(path: Path, first: int, last: int) -> Iterator[tuple[int, list[ScoredData]]]:
    """Yield the groups of each of these steps. Raises TrainerError where they are not there."""
    due = first
    with reading(
        f"cannot read {path}",
        TrainerError,
        remedy="a run with --deterministic writes it",
    ):
        for number, _, groups in takewhile(lambda each: each[0] <= last, read_batches(path)):
            if number >= first:
                if number != due:
                    raise TrainerError(f"{path} has no groups of step {due}: it was cut, or rows are missing")
                yield number, groups
                due += 1
    if due <= last:
        raise TrainerError(f"{path} has no groups of step {due}: it was cut, or rows are missing")


def updated(
    learner: Learner, step: int, updates_before: int, groups: list[ScoredData], offline: OfflineData | None
) -> int:
    """Make a step's updates, and return how many there were."""
    config = learner.config
    batch = make_batch(
        groups,
        seq_len=config.seq_len,
        loss=config,
        policy_version=step - 1,
        needs=requirements(config, learner.trained.model),
    )
    bad_batches = BadBatches(config.on_bad_batch, config.max_bad_batches)
    updates = Updates(learner, bad_batches, plan_of_step(config, step, updates_before, batch), offline)
    updates.begin(batch, lambda comparison: {})
    updates.make()
    return updates.made


def main() -> int:
    """The command line."""
    config = load_config(RecomputeConfig, prog=PROG)
    configure_logging("recompute")
    with one_line_errors(PROG, exit_status=NOT_COMPARED):
        return 0 if recompute(config.run, config.step) else 1


if __name__ == "__main__":
    raise SystemExit(main())
