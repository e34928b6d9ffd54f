"""The optimizer updates of one step: each epoch splits the batch into mini-batches, and each mini-batch makes an
update.

    --updates-per-batch 2 --epochs 2

    rollouts a..f ──deal──▶ [a c f] [b d e]   [b c e] [a d f]
                               │       │         │       │
                               ▼       ▼         ▼       ▼
                            update  update    update  update ──▶ one sync, one policy version

Each update may also have examples of offline data (offline.py), whose gradient is added to that of its mini-batch.

`begin` computes the first gradient while vLLM generates. `make` is what the bridge runs where weights may change: with
a single copy, while generation is paused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from example_trainer.data.batching import Batch, Sequence
from example_trainer.errors import BadBatch
from example_trainer.exact.check import Comparison
from example_trainer.loop.bad_data import BadBatches
from example_trainer.loop.learner import Learner
from example_trainer.loop.offline import OfflineData
from example_trainer.loop.overlap import EarlyGradients, Part, together
from example_trainer.loss.metric import Metric, Metrics, added, of_updates, values
from example_trainer.optim.optimizer import expect_finite, learning_rate
from example_trainer.output.metrics import Row
from example_trainer.output.trained_rows import Logprobs
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.objectives import LossMean


@dataclass(frozen=True)
class Plan:
    """Describes how a step updates. The seed and the step decide how the batch is dealt."""

    updates_per_batch: int = 1
    epochs: int = 1
    recomputed: bool = False  # old log-probabilities
    loss_mean: LossMean = "token"
    seed: int = 0
    step: int = 1
    rate: Callable[[int], float] = lambda made: 0.0  # of the next update, after those that the step has made
    offline_share: float = 0.0  # of each update's loss

    @property
    def planned_before(self) -> int:
        """Return how many updates earlier steps planned, whether they were made or not: a bad one must not be given
        its offline examples again.
        """
        return (self.step - 1) * self.updates_per_batch * self.epochs


def plan_of_step(config: TrainerConfig, step: int, updates_before: int, batch: Batch) -> Plan:
    """Plan the updates of a step on `batch`, before which `updates_before` were made."""
    return Plan(
        config.updates_per_batch,
        config.epochs,
        recomputed=config.old_logprobs == "recomputed",
        loss_mean=config.loss_mean,
        seed=config.seed,
        step=step,
        rate=lambda made: learning_rate(config, step, updates_before + made, batch.signal_share),
        offline_share=config.offline_share,
    )


@dataclass(frozen=True)
class MiniBatch:
    """Holds what one update trains on. `loss_divisor` is what its mean divides by."""

    sequences: list[Sequence]
    loss_divisor: float


def deal_updates(batch: Batch, plan: Plan) -> list[MiniBatch]:
    """The mini-batches of a step in their order, none of them empty. Sequences of one rollout stay together.

    Each divides by its own part of the batch's divisor. What is not computed, of groups without a signal, is spread
    over the mini-batches in proportion: together it counts as in one update. Where offline data has a share of each
    update's loss, the rollouts have the rest; if no sequence is computed, the updates are of offline data alone.
    """
    if not batch.sequences:
        return [MiniBatch([], 1.0)] * (plan.updates_per_batch * plan.epochs) if plan.offline_share else []
    counts = 1 - plan.offline_share
    if plan.updates_per_batch == 1:
        return [MiniBatch(batch.sequences, batch.loss_divisor / counts)] * plan.epochs
    rollouts = sorted({sequence.rollout for sequence in batch.sequences})
    dealt = []
    for epoch in range(plan.epochs):
        order = np.random.default_rng((plan.seed, plan.step, epoch)).permutation(rollouts)
        for part in np.array_split(order, min(plan.updates_per_batch, len(rollouts))):
            members = set(part.tolist())
            sequences = [sequence for sequence in batch.sequences if sequence.rollout in members]
            trained = sum(sequence.trained_tokens for sequence in sequences)
            by_tokens = plan.loss_mean == "token"
            own, whole = (trained, batch.trained_tokens) if by_tokens else (len(members), len(rollouts))
            dealt.append(MiniBatch(sequences, own * batch.loss_divisor / whole / counts))
    return dealt


class Updates:
    """The updates of one step: call `begin`, then `make`. A bad mini-batch makes none, the others still do.

    `judge` says what the comparison with the sampler, before any update, means for the whole batch; it raises BadBatch
    for one that must not be trained on.
    """

    def __init__(
        self, learner: Learner, bad_batches: BadBatches, plan: Plan, offline: OfflineData | None = None
    ) -> None:
        self._learner = learner
        self._offline = offline
        self._bad_batches = bad_batches
        self._plan = plan
        self._mini_batches: list[MiniBatch] = []
        self._first_is_accepted = False
        self._checked: Row = {}
        self._measured: list[Metrics] = []  # of each update
        self._bad: BadBatch | None = None  # the last mini-batch that made no update
        self.made = 0
        self._sequences: list[Sequence] = []
        self._compared: list[tuple[list[Sequence], Comparison]] = []

    def begin(self, batch: Batch, judge: Callable[[Comparison], Row], early: EarlyGradients | None = None) -> None:
        """Judge the batch and compute the first gradient, or the rest of it. Raises BadBatch or NotExact where the
        configuration says to stop.
        """
        learner = self._learner
        if batch.sequences and self._plan.recomputed:
            batch = replace(batch, sequences=learner.with_old_logprobs(batch.sequences))
            self._compared = [(batch.sequences, learner.comparison)]
        mini_batches = deal_updates(batch, self._plan)
        measured = None
        if mini_batches:
            parts = self._first_gradient(mini_batches[0], early)
            measured = parts[0].measured if early is None else together(parts, mini_batches[0].loss_divisor)
            self._compared = self._compared or [(part.sequences, part.comparison) for part in parts]
        self._sequences = batch.sequences
        try:
            self._checked = judge(Comparison.joined(comparison for _, comparison in self._compared))
        except BadBatch as error:
            self._bad = error
            self._bad_batches.note(error, self._name(0, 1))
            learner.discard()
            return
        self._mini_batches = mini_batches
        self._first_is_accepted = measured is not None and self._accepted(self._with_offline(measured, 0), 0)

    def make(self) -> None:
        """Make the updates. Raises BadBatch where the configuration says to stop."""
        for place, mini_batch in enumerate(self._mini_batches):
            if self._first_is_accepted if place == 0 else self._accepted(self._gradients(mini_batch, place), place):
                self._learner.update(self._plan.rate(self.made))
                self.made += 1

    @property
    def logprobs(self) -> Logprobs:
        """Return the log-probabilities that the trainer gave the trained tokens of each of the batch's sequences
        before any update; None for a sequence that only a later update computes.
        """
        by_identity: dict[int, NDArray[np.float32]] = {}
        for sequences, comparison in self._compared:
            columns = self._learner.by_sequence(sequences, comparison)
            by_identity |= zip((sequence.identity for sequence in sequences), columns, strict=True)
        return [by_identity.get(sequence.identity) for sequence in self._sequences]

    @property
    def left_out(self) -> str | None:
        """Explain why the batch made no update, once `make` has run; None if it made one, or has nothing to train
        on.
        """
        return str(self._bad) if self._bad is not None and not self.made else None

    def row(self) -> Row:
        """Return what was measured: metrics of the updates' losses and gradients only if one was made."""
        return {**values(of_updates(self._measured)), **self._checked}

    def _first_gradient(self, mini_batch: MiniBatch, early: EarlyGradients | None) -> list[Part]:
        """Compute the gradient of the first mini-batch, and return its parts; without `early` there is one."""
        if not mini_batch.sequences:
            return [Part([], {}, Comparison())]
        if early is None:
            return [Part(mini_batch.sequences, self._of_rollouts(mini_batch), self._learner.comparison)]
        parts = list(early.parts)
        if left := early.left(mini_batch.sequences):
            parts.append(Part(left, self._learner.gradients(left, 1.0), self._learner.comparison))
        self._learner.divide(mini_batch.loss_divisor)
        return parts

    def _gradients(self, mini_batch: MiniBatch, place: int) -> Metrics:
        """Compute the gradient of the mini-batch of this place, and of the offline examples of its update."""
        return self._with_offline(self._of_rollouts(mini_batch) if mini_batch.sequences else {}, place)

    def _of_rollouts(self, mini_batch: MiniBatch) -> Metrics:
        return self._learner.gradients(mini_batch.sequences, mini_batch.loss_divisor)

    def _with_offline(self, measured: Metrics, place: int) -> Metrics:
        """Add the gradient of the update's offline examples, and what was measured of them."""
        if self._offline is None:
            return measured
        return added((measured, self._offline.add_gradient(self._plan.planned_before + place)))

    def _accepted(self, measured: Metrics, place: int) -> bool:
        """Clip the gradient, and return True; drop it, and note why, where it cannot be stepped on."""
        try:
            grad_norm = self._learner.clip()
            expect_finite(grad_norm)
            loss = measured["loss"].value
            if loss is None or not math.isfinite(loss):
                raise BadBatch(
                    f"the loss is {loss}; the weights were not changed. "
                    "Check the sampler's log-probabilities and the advantages of the environments"
                )
        except BadBatch as error:
            self._bad = error
            self._bad_batches.note(error, self._name(place, len(self._mini_batches)))
            self._learner.discard()
            return False
        self._bad_batches.note_update()
        own = {
            "grad_norm": Metric("mean", grad_norm),
            "grad_norm_max": Metric("max", grad_norm, over_updates="max"),
            "lr": Metric("mean", self._plan.rate(self.made)),
        }
        self._measured.append({**measured, **own})
        return True

    def _name(self, place: int, count: int) -> str:
        return f"Step {self._plan.step}" + (f", update {place + 1} of {count}," if count > 1 else "")
