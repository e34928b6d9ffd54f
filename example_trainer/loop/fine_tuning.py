"""A run on offline data alone (--offline-share 1): the same updates, checkpoints and metrics, and nothing is sampled.

FILE ──examples──▶ gradient ──▶ update ──▶ metrics.jsonl ──▶ checkpoint        neither batching API nor vLLM
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from atroposlib.logs import get_logger, say
from example_trainer.data.batching import make_batch
from example_trainer.loop.bad_data import BadBatches
from example_trainer.loop.learner import Learner
from example_trainer.loop.offline import OfflineData, examples_of, sides_of
from example_trainer.loop.opening import expect_steps_left, resolved, sleep_beside
from example_trainer.loop.saves import Saves
from example_trainer.loop.updates import Plan, Updates
from example_trainer.optim.optimizer import learning_rate
from example_trainer.output.metrics import Row, open_metrics
from example_trainer.output.model_card import write_model_card

log = get_logger(__name__)

NOTHING_SAMPLED = make_batch([], seq_len=1, policy_version=0)


def fine_tune(learner: Learner) -> None:
    """Train on --offline-data to --training-steps, and write the trained model. Raises TrainerError or DataError."""
    examples = examples_of(learner.config)
    resumed = resolved(learner)
    config = learner.config
    source = resumed or config.model_name
    log.info("Loading %s on %s", source, learner.device)
    learner.load_into(None, source)
    learner.begin(resumed)
    expect_steps_left(learner, resumed)
    progress, watched = learner.progress, [learner.ranks]
    with ExitStack() as resources:
        metrics = open_metrics(config, progress.step + 1, resources, progress.kernels)
        saves = Saves(config, learner, partial(sleep_beside, watched))
        resources.push(saves.leave)
        offline = OfflineData(learner, sides_of(examples, config, learner.trained.tokenizer))
        bad_batches = BadBatches(config.on_bad_batch, config.max_bad_batches)
        for step in range(progress.step + 1, config.training_steps + 1):
            learner.ranks.check()
            start = time.perf_counter()
            rate = learning_rate(config, step, progress.updates)
            plan = Plan(
                config.updates_per_batch,
                config.epochs,
                step=step,
                rate=rate,
                offline_share=config.offline_share,
                updates_before=progress.updates,
            )
            updates = Updates(learner, bad_batches, plan, offline)
            updates.begin(NOTHING_SAMPLED, lambda comparison: {})
            updates.make()
            progress = replace(progress, step=step, policy_version=step, updates=progress.updates + updates.made)
            seconds = time.perf_counter() - start
            row = {
                "step": step,
                "policy_version": step,
                **updates.row(),
                "step_s": seconds,
                "train_s": seconds,
                "updates": progress.updates,
                "bad_batches": bad_batches.total,
            }
            for sink in metrics:
                sink.write(row)
            say(step_line(row, config.training_steps))
            if config.checkpoint_interval and step % config.checkpoint_interval == 0:
                saves.save(progress)
            saves.advance()
        saves.complete()
        final = config.save_path / learner.trained.form.final
        log.info("Writing the trained model to %s", final)
        learner.trained.write(final, also=partial(write_model_card, config=config))
    say(f"Trained model: {final}")


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
