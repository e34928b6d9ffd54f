"""The gradient of one batch: every micro-batch adds its share of one weighted mean over all sampled tokens, so
accumulation is exact.

What each token counts is decided with the batch (data/loss_weights.py). Groups of equal scores count in the divisor.
Their policy gradient is zero, so they are not computed unless the loss has a KL or entropy term. A batch in which few
groups still teach something therefore has a proportionally small gradient. AdamW does not depend on the gradient's
scale, so its step is hardly smaller (docs/trainer.md).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from example_trainer.data.packing import MicroBatch
from example_trainer.exact.check import Comparison
from example_trainer.loss.base import LARGEST, kl_estimate, load_objective
from example_trainer.loss.terms import TokenTerms
from example_trainer.model.policy import Policy, accumulate_gradients, token_logprobs
from example_trainer.ranks.ranks import ALONE, Ranks
from example_trainer.settings.config import LossSettings

StepMetrics = dict[str, float | None]
OF_BATCH = ("loss", "pg_loss")  # weighted means of the batch; others are means over its trained tokens
OF_SAMPLER = ("logprob_diff_mean", "logprob_diff_max", "sampler_kl")  # of tokens whose sampler's are known
ROUTING = "routing_disagreement"  # share of (token, layer) whose experts are not the sampler's


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
) -> StepMetrics:
    """Add the gradient of the weighted token losses of all `batches`, over `loss_divisor`, to the parameters' `.grad`;
    nothing is updated.

    The result was measured before the update: the loss, KL to the reference model (None without one), entropy,
    differences from the sampler's log-probabilities (None where no token has them), and the metrics that the objective
    names itself.

    `loss_divisor` is that of the batch (data/loss_weights.py), by default the tokens trained here.
    `comparison` is told every token's two log-probabilities.

    With several `ranks` the batches are this rank's share, and the result is of all; every rank calls this, with as
    many batches. `before_pass` is told before each whether it is the last.

    The KL term uses an item's own reference log-probabilities where it brought them, else those of `reference`.
    """
    counted = [batch for batch in batches if batch.counted]
    trained = sum(len(batch.rows) for batch in counted)
    of_sampler = sum(len(batch.rows) if batch.compared is None else int(batch.compared.sum()) for batch in counted)
    tokens, compared = map(int, ranks.sum(torch.tensor([trained, of_sampler])))
    loss_divisor = loss_divisor or tokens
    token_loss = load_objective(settings.objective)
    if policy.routing is not None:
        policy.routing.take_counts()  # of passes before this one
    sums: dict[str, Tensor] = {}  # over tokens by metric, kept on the device until the step is over
    largest: dict[str, Tensor] = {}
    # a forward pass of the reference is every rank's, or nobody's
    asks = settings.kl_coef > 0 and bool(ranks.largest(torch.tensor(any(_unknown(batch) for batch in batches))))
    for index, batch in enumerate(batches):
        before_pass(index == len(batches) - 1)
        known = None
        if settings.kl_coef > 0:
            known = _reference_logprobs(batch, reference, chunk_mb, asks and (ranks.size > 1 or _unknown(batch)))
        terms = TokenTerms(batch, known, token_loss, settings)

        def chunk_loss(
            logprobs: Tensor, entropy: Tensor, chunk: slice, batch: MicroBatch = batch, terms: TokenTerms = terms
        ) -> Tensor:
            sampler, weights = batch.sampler_logprobs[chunk], batch.weights[chunk]
            total, of_policy, own = terms(logprobs, entropy, chunk)
            total = total * weights
            if comparison is not None and batch.counted:
                comparison.add(batch.targets[chunk], sampler, logprobs)
            with torch.no_grad():
                difference = (logprobs - sampler).abs()
                measured = {
                    "loss": total,
                    "pg_loss": of_policy * weights,
                    "entropy": entropy,
                    **own,
                    "logprob_diff_mean": difference,
                    "logprob_diff_max": difference,
                    "sampler_kl": kl_estimate(sampler, logprobs, "k3", settings.log_ratio_limit),
                }
                if batch.compared is not None:
                    here = batch.compared[chunk]
                    measured |= {name: torch.where(here, measured[name], 0.0) for name in OF_SAMPLER}
                for name, term in measured.items():
                    if name.endswith(LARGEST):
                        found = term.max() if batch.counted else term.new_full((), -torch.inf)
                        largest[name] = torch.maximum(largest[name], found) if name in largest else found
                    else:
                        found = (term if batch.counted else torch.zeros_like(term)).sum().float()
                        sums[name] = sums.get(name, 0.0) + found
            return total.sum() / loss_divisor if batch.counted else 0 * logprobs.sum()

        accumulate_gradients(
            policy, batch, chunk_loss, chunk_mb, see=terms.see if settings.needs_whole_sequences else None
        )
    divisors = {**dict.fromkeys(OF_BATCH, loss_divisor), **dict.fromkeys(OF_SAMPLER, max(1, compared))}
    means: StepMetrics = {
        name: total / divisors.get(name, tokens)
        for name, total in zip(sums, ranks.sum(torch.stack(list(sums.values()))).tolist(), strict=True)
    }
    highest = dict(zip(largest, ranks.largest(torch.stack(list(largest.values()))).tolist(), strict=True))
    if policy.routing is not None:
        different, pairs = map(int, ranks.sum(torch.tensor(policy.routing.take_counts())))
        means[ROUTING] = different / pairs if pairs else None
    return {"kl": None} | means | highest | ({} if compared else dict.fromkeys(OF_SAMPLER))


def _unknown(batch: MicroBatch) -> bool:
    return bool(batch.reference_logprobs.isnan().any())


def _reference_logprobs(batch: MicroBatch, reference: Policy | None, chunk_mb: int, asks: bool) -> Tensor | None:
    given = batch.reference_logprobs
    if not asks:
        return given
    if reference is None:
        return None
    return torch.where(given.isnan(), token_logprobs(reference, batch, chunk_mb), given)
