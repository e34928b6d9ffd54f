"""The gradient of one batch: every micro-batch adds its share of one mean over all sampled tokens, so accumulation is
exact.

The mean is over tokens, not over sequences first: a long answer weighs more than a short one (DAPO's token-level
loss, Yu et al. 2025, arXiv 2503.14476). Groups of equal scores count in the mean. Their policy gradient is zero, so
they are not computed unless the loss has a KL or entropy term. A batch in which few groups still teach something
therefore takes a proportionally small step, not a full one on their noise alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from example_trainer.config import LossSettings
from example_trainer.exactness import Comparison
from example_trainer.objectives.base import k3, load_loss, with_penalties
from example_trainer.packing import MicroBatch
from example_trainer.parallel import ALONE, Ranks
from example_trainer.policy import Policy, accumulate_gradients, token_logprobs

StepMetrics = dict[str, float | None]


def batch_gradients(
    policy: Policy,
    batches: Sequence[MicroBatch],
    settings: LossSettings,
    *,
    reference: Policy | None = None,
    chunk_mb: int = 128,
    loss_tokens: int | None = None,
    comparison: Comparison | None = None,
    ranks: Ranks = ALONE,
    before_pass: Callable[[bool], None] = lambda is_last: None,
) -> StepMetrics:
    """Add the gradient of the mean token loss of all `batches` to the parameters' `.grad`; nothing is updated.

    The result was measured before the update: the mean loss, KL to the reference model (None without one), entropy,
    differences from the sampler's log-probabilities, and the metrics that the loss names itself.

    `loss_tokens` is what the mean divides by: the batch's sampled tokens, by default those trained here.
    `comparison` is told every token's two log-probabilities.

    With several `ranks` the batches are this rank's share, and the result is of all; every rank calls this, with as
    many batches. `before_pass` is told before each whether it is the last.

    The KL term uses an item's own reference log-probabilities where it brought them, else those of `reference`.
    """
    tokens = int(ranks.sum(torch.tensor(sum(len(batch.rows) for batch in batches if batch.counted))))
    loss_tokens = loss_tokens or tokens
    token_loss = load_loss(settings.loss)
    sums: dict[str, Tensor] = {}  # over tokens by metric, kept on the device until the step is over
    largest = torch.zeros((), device=batches[0].input_ids.device)  # difference of two log-probabilities
    # a forward pass of the reference is every rank's, or nobody's
    asks = settings.kl_coef > 0 and bool(ranks.largest(torch.tensor(any(_unknown(batch) for batch in batches))))
    for index, batch in enumerate(batches):
        before_pass(index == len(batches) - 1)
        known = None
        if settings.kl_coef > 0:
            known = _reference_logprobs(batch, reference, chunk_mb, asks and (ranks.size > 1 or _unknown(batch)))

        def chunk_loss(
            logprobs: Tensor, entropy: Tensor, chunk: slice, batch: MicroBatch = batch, known: Tensor | None = known
        ) -> Tensor:
            sampler = batch.sampler_logprobs[chunk]
            of_policy, own = token_loss(logprobs, batch.old_logprobs[chunk], batch.advantages[chunk], settings)
            total, kl = with_penalties(of_policy, logprobs, entropy, None if known is None else known[chunk], settings)
            if comparison is not None and batch.counted:
                comparison.add(batch.targets[chunk], sampler, logprobs)
            with torch.no_grad():
                measured = {"loss": total, "pg_loss": of_policy, "entropy": entropy, **own}
                if kl is not None:
                    measured["kl"] = kl
                difference = (logprobs - sampler).abs()
                measured |= {"logprob_diff_mean": difference, "sampler_kl": k3(sampler, logprobs)}
                for name, term in measured.items():
                    sums[name] = sums.get(name, 0.0) + (term if batch.counted else torch.zeros_like(term)).sum().float()
                if batch.counted:
                    torch.maximum(largest, difference.max(), out=largest)
            return total.sum() / loss_tokens if batch.counted else 0 * logprobs.sum()

        accumulate_gradients(policy, batch, chunk_loss, chunk_mb)
    # `loss` and `pg_loss` are means over all sampled tokens, the others over the trained ones
    means: StepMetrics = {
        name: total / (loss_tokens if name in ("loss", "pg_loss") else tokens)
        for name, total in zip(sums, ranks.sum(torch.stack(list(sums.values()))).tolist(), strict=True)
    }
    return {"kl": None} | means | {"logprob_diff_max": ranks.largest(largest).item()}


def _unknown(batch: MicroBatch) -> bool:
    return bool(batch.reference_logprobs.isnan().any())


def _reference_logprobs(batch: MicroBatch, reference: Policy | None, chunk_mb: int, asks: bool) -> Tensor | None:
    given = batch.reference_logprobs
    if not asks:
        return given
    if reference is None:
        return None
    return torch.where(given.isnan(), token_logprobs(reference, batch, chunk_mb), given)
