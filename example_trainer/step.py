"""The gradient of one batch: every micro-batch adds its share of one mean over all sampled tokens, so accumulation is
exact.

The mean is over tokens, not over sequences first: a long answer weighs more than a short one (DAPO's token-level
loss, Yu et al. 2025, arXiv 2503.14476). Groups of equal scores count in the mean, though their gradient is zero and is
never computed. A batch in which few groups still teach something therefore takes a proportionally small step, not a
full one on their noise alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from example_trainer.exactness import Comparison
from example_trainer.objectives.base import LossSettings, k3, load_loss, with_penalties
from example_trainer.packing import MicroBatch
from example_trainer.policy import accumulate_gradients, token_logprobs

StepMetrics = dict[str, float | None]


class _Sums:
    """Sums over tokens by name, kept on the device until the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._names: tuple[str, ...] = ()
        self._values: Tensor | float = 0.0
        self._largest_diff = torch.zeros((), device=device)

    def add(self, terms: dict[str, Tensor]) -> None:
        self._names = tuple(terms)
        self._values = self._values + torch.stack([term.sum().detach().float() for term in terms.values()])
        self._largest_diff = torch.maximum(self._largest_diff, terms["logprob_diff_mean"].max())

    def metrics(self, tokens: int, loss_tokens: int) -> StepMetrics:
        """`loss` and `pg_loss` are means over all sampled tokens, the others over the trained ones."""
        assert isinstance(self._values, Tensor)
        totals = zip(self._names, self._values.tolist(), strict=True)
        means: StepMetrics = {
            name: total / (loss_tokens if name in ("loss", "pg_loss") else tokens) for name, total in totals
        }
        return {"kl": None} | means | {"logprob_diff_max": self._largest_diff.item()}


def batch_gradients(
    model: PreTrainedModel,
    batches: Sequence[MicroBatch],
    settings: LossSettings,
    *,
    reference: PreTrainedModel | None = None,
    chunk_mb: int = 128,
    loss_tokens: int | None = None,
    comparison: Comparison | None = None,
) -> StepMetrics:
    """Add the gradient of the mean token loss of all `batches` to the parameters' `.grad`; nothing is updated.

    The result was measured before the update: the mean loss, KL to the reference model (None without one), entropy,
    differences from the sampler's log-probabilities, and the metrics that the loss names itself.

    `loss_tokens` is what the mean divides by: the batch's sampled tokens, by default those trained here.
    `comparison` is told every token's two log-probabilities.

    The KL term uses an item's own reference log-probabilities where it brought them, else those of `reference`.
    """
    tokens = sum(len(batch.rows) for batch in batches)
    loss_tokens = loss_tokens or tokens
    sums, token_loss = _Sums(batches[0].input_ids.device), load_loss(settings.loss)
    for batch in batches:
        known = _reference_logprobs(batch, reference, chunk_mb) if settings.kl_coef > 0 else None

        def chunk_loss(
            logprobs: Tensor, entropy: Tensor, chunk: slice, batch: MicroBatch = batch, known: Tensor | None = known
        ) -> Tensor:
            sampler = batch.sampler_logprobs[chunk]
            policy, own = token_loss(logprobs, sampler, batch.advantages[chunk], settings)
            total, kl = with_penalties(policy, logprobs, entropy, None if known is None else known[chunk], settings)
            if comparison is not None:
                comparison.add(batch.targets[chunk], sampler, logprobs)
            with torch.no_grad():
                measured = {"loss": total, "pg_loss": policy, "entropy": entropy, **own} | (
                    {} if kl is None else {"kl": kl}
                )
                differences = {"logprob_diff_mean": (logprobs - sampler).abs(), "sampler_kl": k3(sampler, logprobs)}
                sums.add(measured | differences)
            return total.sum() / loss_tokens

        accumulate_gradients(model, batch, chunk_loss, chunk_mb)
    return sums.metrics(tokens, loss_tokens)


def _reference_logprobs(batch: MicroBatch, reference: PreTrainedModel | None, chunk_mb: int) -> Tensor | None:
    """The environment's reference log-probabilities, those of `reference` where it gave none; None without either."""
    given = batch.reference_logprobs
    missing = given.isnan()
    if not missing.any():
        return given
    return None if reference is None else torch.where(missing, token_logprobs(reference, batch, chunk_mb), given)
