"""Offline data in a run: which examples each update trains on, and what their gradient adds to that of its rollouts.

    loss of an update  =  (1 - offline_share) x that of its rollouts  +  offline_share x that of its examples

With a share of 1 there are no rollouts (fine_tuning.py).
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atroposlib.logs import get_logger
from example_trainer.data.batching import Sequence as Tokens
from example_trainer.data.offline import Example, OfflineDataError, Sides, order_of, read_examples, tokenized
from example_trainer.loop.learner import Learner
from example_trainer.loss import dpo
from example_trainer.loss.metric import Metric, Metrics
from example_trainer.settings.config import TrainerConfig

log = get_logger(__name__)


def examples_of(config: TrainerConfig) -> list[Example]:
    """The examples of --offline-data, none without. Raises DataError or OfflineDataError."""
    examples = [] if config.offline_data is None else read_examples(config.offline_data)
    if config.offline_objective == "dpo" and examples and len(examples[0].answers) == 1:
        raise OfflineDataError(
            f"--offline-objective dpo needs pairs, and {examples[0].where} is a demonstration: write pos and neg, or"
            " use sft"
        )
    return examples


def sides_of(examples: Sequence[Example], config: TrainerConfig, tokenizer: object) -> list[Sides]:
    """The same as tokens: of pairs, the better answers alone if these are learned as demonstrations. Raises
    OfflineDataError.
    """
    if tokenizer is None:
        raise OfflineDataError(f"--offline-data: {config.model_name} has no tokenizer; give a model with one")
    found, cut, left_out = tokenized(examples, tokenizer, config.seq_len)
    if cut:
        log.warning(
            "%d of %d offline examples exceed --seq-len %d and were cut; of %d no answer remained: they are left out",
            cut,
            len(examples),
            config.seq_len,
            left_out,
        )
    return [sides[:1] for sides in found] if config.offline_objective == "sft" else found


class OfflineData:
    """The examples, and their part of each update's gradient. Make it before the first update of this process."""

    def __init__(self, learner: Learner, examples: Sequence[Sides]) -> None:
        config = learner.config
        self._learner = learner
        self._examples = examples
        self._count = config.offline_examples
        self._start: dict[int, Tensor] = {}  # of each pair, the answers' log-probabilities by the start model
        pairs = len(examples[0]) == 2
        log.info(
            "Training on %d offline %s, %d in each update", len(examples), "pairs" if pairs else "examples", self._count
        )
        if pairs:
            done, last = (steps * config.updates_per_step for steps in (learner.progress.step, config.training_steps))
            used = {index for update in range(done, last) for index in self._of(update)}
            self._start = self._ask_start_model(used) if used else {}

    def add_gradient(self, update: int) -> Metrics:
        """Add the gradient of the examples of planned update number `update` (from 0) to the parameters' `.grad`;
        `loss` is what they add to the loss.
        """
        chosen = self._of(update)
        return self._of_pairs(chosen) if self._start else self._of_demonstrations(chosen)

    def _of(self, update: int) -> list[int]:
        return order_of(update, self._count, len(self._examples), self._learner.config.seed)

    def _of_demonstrations(self, chosen: Sequence[int]) -> Metrics:
        share, sequences = self._learner.config.offline_share, [self._examples[index][0] for index in chosen]
        trained = sum(sequence.trained_tokens for sequence in sequences)
        loss = self._learner.offline_gradients(sequences, trained / share)["loss"]
        return {"loss": loss, "sft_loss": Metric("mean", loss.total / share), **_counted(sequences)}

    def _of_pairs(self, chosen: Sequence[int]) -> Metrics:
        config = self._learner.config
        sequences = [side for index in chosen for side in self._examples[index]]
        gained = _summed(self._learner.with_old_logprobs(sequences)) - torch.stack([self._start[i] for i in chosen])
        margins = gained[:, 0] - gained[:, 1]
        weights = dpo.weights_of_answers(margins, config.dpo_beta).flatten().tolist()
        weighted = [
            replace(sequence, advantages=np.full(len(sequence.tokens), weight, np.float32))
            for sequence, weight in zip(sequences, weights, strict=True)
        ]
        self._learner.offline_gradients(weighted, len(chosen) / config.offline_share)
        loss = float(dpo.pair_loss(margins, config.dpo_beta).mean())
        return {
            "loss": Metric("sum", config.offline_share * loss),
            "dpo_loss": Metric("mean", loss),
            "dpo_accuracy": Metric("mean", float((margins > 0).double().mean())),
            "dpo_margin": Metric("mean", config.dpo_beta * float(margins.mean())),
            **_counted(sequences),
        }

    def _ask_start_model(self, used: set[int]) -> dict[int, Tensor]:
        """Log-probabilities [2] of the answers of these pairs by the start model, which is then let go. Each is asked
        together with its neighbours in the first round, whichever are used: a resumed run, which uses fewer, packs it
        alike and so gets the same bits.
        """
        order = order_of(0, len(self._examples), len(self._examples), self._learner.config.seed)
        parts = [order[start : start + self._count] for start in range(0, len(order), self._count)]
        asked = [part for part in parts if used.intersection(part)]
        log.info("Asking the start model for the log-probabilities of %d pairs", sum(map(len, asked)))
        start = time.monotonic()
        sides = self._learner.with_start_logprobs(
            [[side for index in part for side in self._examples[index]] for part in asked]
        )
        log.info("Asked the start model in %.1f s", time.monotonic() - start)
        return {
            index: logprobs
            for part, of_part in zip(asked, sides, strict=True)
            for index, logprobs in zip(part, _summed(of_part), strict=True)
        }


def _counted(sequences: Sequence[Tokens]) -> Metrics:
    tokens = sum(sequence.trained_tokens for sequence in sequences)
    return {"offline_tokens": Metric("mean", tokens, over_updates="sum")}


def _summed(sequences: Sequence[Tokens]) -> Tensor:
    """The log-probability of each answer, [pairs, 2]: the sum of `old_logprobs` over its tokens."""
    sums = [
        float(logprobs[sequence.trained].sum(dtype=np.float64))
        for sequence in sequences
        if (logprobs := sequence.old_logprobs) is not None
    ]
    return torch.tensor(sums, dtype=torch.float64).view(-1, 2)
