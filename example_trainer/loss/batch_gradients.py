"""The gradient of one batch: every micro-batch adds its share of one weighted mean over all sampled tokens, so
accumulation is exact.

What each token counts is decided with the batch (data/loss_weights.py). Groups of equal scores count in the divisor.
Their policy gradient is zero, so they are not computed unless the loss has a teacher, a KL or entropy term. A batch in
which few groups still teach something therefore has a smaller gradient. AdamW does not depend on the gradient's scale,
so its step is not smaller in proportion (benchmarks/few_groups.py, docs/trainer.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from example_trainer.data.packing import MicroBatch
from example_trainer.exact.check import Comparison
from example_trainer.loss.base import kl_estimate, load_objective
from example_trainer.loss.metric import Metric, added, divided, over_ranks
from example_trainer.loss.terms import TokenTerms
from example_trainer.model.policy import Named, Policy, accumulate_gradients, token_logprobs
from example_trainer.ranks.ranks import ALONE, Ranks
from example_trainer.settings.loss import LossSettings


def batch_gradients(
    policy: Policy,
    batches: Sequence[MicroBatch],
    settings: LossSettings,
    *,
    reference: Policy | None = None,
    chunk_mb: int = 128,
    loss_divisor: float | None = None,
    comparison: Comparison | None = None,
    ranks: Ranks = ALONE,
    before_pass: Callable[[bool], None] = lambda is_last: None,
) -> dict[str, Metric]:
    """Add the gradient of the weighted token losses of all `batches`, over `loss_divisor`, to the parameters' `.grad`;
    nothing is updated.

    The result was measured before the update: the loss, KL to the reference model (no value without one), entropy,
    differences from the sampler's log-probabilities (no value where no token has them), and the metrics that the
    objective names itself.

    `loss_divisor` is that of the batch (data/loss_weights.py), by default the tokens trained here.
    `comparison` is told every token's two log-probabilities.

    With several `ranks` the batches are this rank's share, and the result is of all; every rank calls this, with as
    many batches. `before_pass` is told before each whether it is the last.

    The KL term uses an item's own reference log-probabilities where it brought them, else those of `reference`.
    """
    loss_divisor = loss_divisor or _trained_tokens(batches, ranks)
    token_loss = load_objective(settings.objective)
    if policy.routing is not None:
        policy.routing.take_counts()  # of passes before this one
    loss = _Loss(settings, loss_divisor, comparison)
    # a forward pass of the reference is every rank's, or nobody's
    asks = settings.kl_coef > 0 and bool(ranks.largest(torch.tensor(any(_unknown(batch) for batch in batches))))
    for index, batch in enumerate(batches):
        before_pass(index == len(batches) - 1)
        known = None
        if settings.kl_coef > 0:
            known = _reference_logprobs(batch, reference, chunk_mb, asks and (ranks.size > 1 or _unknown(batch)))
        terms = TokenTerms(batch, known, token_loss, settings)
        accumulate_gradients(
            policy,
            batch,
            partial(loss.of_chunk, batch, terms),
            chunk_mb,
            see=terms.see if settings.needs_whole_sequences else None,
        )
    measured = loss.measured
    if policy.routing is not None:
        different, compared = policy.routing.take_counts()
        measured["routing_disagreement"] = Metric("mean", different, compared, over_updates="first")
    return divided(over_ranks(measured, ranks), loss_divisor)


@dataclass
class _Loss:
    """The loss of each chunk of a batch's tokens over `divisor`, and what was measured of all chunks so far."""

    settings: LossSettings
    divisor: float
    comparison: Comparison | None
    measured: dict[str, Metric] = field(default_factory=dict)  # kept on the device until the batch is over

    def of_chunk(
        self,
        batch: MicroBatch,
        terms: TokenTerms,
        logprobs: Tensor,
        entropy: Tensor,
        chunk: slice,
        named: Named | None = None,
    ) -> Tensor:
        """Return the loss of the chunk's tokens, none in a batch that does not count, and measure those that do."""
        sampler, weights = batch.sampler_logprobs[chunk], batch.weights[chunk]
        total, of_policy, own = terms(logprobs, entropy, chunk, named)
        total = total * weights
        if self.comparison is not None and batch.counted:
            self.comparison.add(batch.targets[chunk], sampler, logprobs)
        with torch.no_grad():
            metrics = {
                "loss": Metric.sum(total),
                "pg_loss": Metric.sum(of_policy * weights),
                "entropy": Metric.mean(entropy),
                **own,
                **self._disagreement(logprobs, sampler, None if batch.compared is None else batch.compared[chunk]),
            }
            if not batch.counted:
                metrics = {name: metric.nothing() for name, metric in metrics.items()}
            self.measured = added((self.measured, metrics))
        return total.sum() / self.divisor if batch.counted else 0 * logprobs.sum()

    def _disagreement(self, logprobs: Tensor, sampler: Tensor, known: Tensor | None) -> dict[str, Metric]:
        """Compare with the sampler, where its log-probabilities are `known`; a later update of the step would count
        what the earlier ones changed.
        """
        difference = (logprobs - sampler).abs()
        kl = kl_estimate(sampler, logprobs, "k3", self.settings.log_ratio_limit)
        return {
            "logprob_diff_mean": Metric.mean(difference, known, over_updates="first"),
            "logprob_diff_max": Metric.max(difference, known, over_updates="first"),
            "sampler_kl": Metric.mean(kl, known, over_updates="first"),
        }


def _trained_tokens(batches: Sequence[MicroBatch], ranks: Ranks) -> int:
    return int(ranks.sum(torch.tensor(sum(len(batch.rows) for batch in batches if batch.counted))))


def _unknown(batch: MicroBatch) -> bool:
    return bool(batch.reference_logprobs.isnan().any())


def _reference_logprobs(batch: MicroBatch, reference: Policy | None, chunk_mb: int, asks: bool) -> Tensor | None:
    given = batch.reference_logprobs
    if not asks:
        return given
    if reference is None:
        return None
    return torch.where(given.isnan(), token_logprobs(reference, batch, chunk_mb), given)
