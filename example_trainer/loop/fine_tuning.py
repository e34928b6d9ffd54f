"""A run on offline data alone (--offline-share 1): the same updates, checkpoints and metrics, and nothing is sampled.

FILE ──examples──▶ gradient ──▶ update ──▶ metrics.jsonl ──▶ checkpoint        neither batching API nor vLLM
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from atroposlib.logs import get_logger, say
from example_trainer.data.batching import make_batch
from example_trainer.errors import TrainerError
from example_trainer.loop.bad_data import BadBatches
from example_trainer.loop.learner import Learner
from example_trainer.loop.offline import OfflineData, examples_of, sides_of
from example_trainer.loop.opening import expect_work_left, resolved, sleep_beside, the_only_trainer
from example_trainer.loop.saves import Saves
from example_trainer.loop.updates import Plan, Updates
from example_trainer.optim.optimizer import learning_rate
from example_trainer.output.metrics import Row, Sink, open_metrics
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import note_end

log = get_logger(__name__)

NOTHING_SAMPLED = make_batch([], seq_len=1, policy_version=0)


def fine_tune(learner: Learner) -> None:
    """Train on --offline-data to --training-steps, and write the trained model. Raises TrainerError or DataError."""
    expect_no_penalties(learner.config)
    with ExitStack() as resources:
        resources.enter_context(the_only_trainer(learner.config))
        examples = examples_of(learner.config)
        resumed = resolved(learner)
        source = resumed or learner.config.model_name
        log.info("Loading %s on %s", source, learner.device)
        learner.load_into(None, source)
        learner.begin(resumed)
        expect_work_left(learner, resumed)
        config, first = learner.config, learner.progress.step + 1
        metrics = open_metrics(config, first, resources, learner.progress.kernels)
        saves = Saves(config, learner, partial(sleep_beside, [learner.ranks]))
        resources.push(saves.leave)
        offline = OfflineData(learner, sides_of(examples, config, learner.trained.tokenizer))
        tuning = FineTuning(learner, offline, saves, metrics)
        for step in range(first, config.training_steps + 1):
            tuning.step(step)
        saves.write_final()
        note_end(config.save_path, tuning.progress)


def expect_no_penalties(config: TrainerConfig) -> None:
    """Raise TrainerError for terms of the loss that only rollouts have. Not the configuration's check: a launcher whose
    recipe has them names the other command first.
    """
    for flag, given in {"--kl-coef": config.kl_coef, "--entropy-coef": config.entropy_coef}.items():
        if given:
            raise TrainerError(f"{flag} {given:g} acts on rollouts, and --offline-share 1 has none; drop it")


class FineTuning:
    """The steps of a run on offline data. `fine_tune` opens and closes what it holds."""

    def __init__(self, learner: Learner, offline: OfflineData, saves: Saves, metrics: Sequence[Sink]) -> None:
        self._learner = learner
        self._offline = offline
        self._saves = saves
        self._metrics = metrics
        self._config = learner.config
        self.progress = learner.progress
        self._bad_batches = BadBatches(self._config.on_bad_batch, self._config.max_bad_batches)

    def step(self, step: int) -> None:
        """Make the updates of a step, write its row, and save what is due. Raises TrainerError."""
        self._learner.ranks.check()
        start = time.perf_counter()
        updates = self._updated(step)
        seconds = time.perf_counter() - start
        row = {
            "step": step,
            "policy_version": step,
            **updates.row(),
            "step_s": seconds,
            "train_s": seconds,
            "updates": self.progress.updates,
            "bad_batches": self._bad_batches.total,
        }
        for sink in self._metrics:
            sink.write(row)
        say(step_line(row, self._config.training_steps))
        if self._config.checkpoint_interval and step % self._config.checkpoint_interval == 0:
            self._saves.save(self.progress)
        self._saves.advance()

    def _updated(self, step: int) -> Updates:
        config, done = self._config, self.progress
        plan = Plan(
            config.updates_per_batch,
            config.epochs,
            step=step,
            rate=lambda made: learning_rate(config, step, done.updates + made),
            offline_share=config.offline_share,
        )
        updates = Updates(self._learner, self._bad_batches, plan, self._offline)
        updates.begin(NOTHING_SAMPLED, lambda comparison: {})
        updates.make()
        if config.ema_decay and step == config.training_steps:
            self._learner.take_average()
        self.progress = replace(done, step=step, policy_version=step, updates=done.updates + updates.made)
        return updates


def step_line(row: Row, steps: int) -> str:
    """A row on the console; what was not measured is left out."""
    sft, dpo, right, tokens = (row.get(key) for key in ("sft_loss", "dpo_loss", "dpo_accuracy", "offline_tokens"))
    parts = [
        f"Step {row['step']}/{steps}",
        None if sft is None else f"sft loss {sft:.4f}",
        None if dpo is None else f"dpo loss {dpo:.4f}",
        None if right is None else f"better answers gained more in {100 * right:.0f} % of pairs",
        "no update" if tokens is None else f"{tokens / (row['step_s'] or 1):.0f} tokens/s",
        f"step {row['step_s']:.1f} s",
    ]
    return " | ".join(part for part in parts if part is not None)
