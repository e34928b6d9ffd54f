"""The gradient of one batch: every micro-batch adds its share of one mean over all sampled tokens, so accumulation is
exact.

The mean is over tokens, not over sequences first: a long answer weighs more than a short one (DAPO's token-level
loss, Yu et al. 2025, arXiv 2503.14476). Groups of equal scores count in the mean, though their gradient is zero and is
never computed. A batch in which few groups still teach something therefore takes a proportionally small step, not a
full one on their noise alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from example_trainer.exactness import Comparison
from example_trainer.losses import LossSettings, k3, token_losses
from example_trainer.packing import MicroBatch
from example_trainer.policy import accumulate_gradients, token_logprobs


@dataclass(frozen=True)
class StepFigures:
    """Figures from before the update: `loss` and `pg_loss` are means over all sampled tokens, the others over the
    trained ones.

    `kl` is to the reference model, None without one.
    """

    loss: float
    pg_loss: float
    kl: float | None
    entropy: float
    ratio_mean: float
    ratio_clipped_frac: float
    logprob_diff_mean: float
    logprob_diff_max: float
    sampler_kl: float


class _Sums:
    """Sums over tokens, kept on the device until the step is over."""

    NAMES = ("loss", "pg_loss", "kl", "entropy", "ratio", "clipped", "logprob_diff", "sampler_kl")

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(self.NAMES), device=device)
        self.largest_diff = torch.zeros((), device=device)

    def add(self, sums: Sequence[Tensor], diff: Tensor) -> None:
        self.values += torch.stack([value.detach().float() for value in sums])
        self.largest_diff = torch.maximum(self.largest_diff, diff.max())

    def figures(self, tokens: int, loss_tokens: int, with_kl: bool) -> StepFigures:
        total = dict(zip(self.NAMES, self.values.tolist(), strict=True))
        mean = {name: value / tokens for name, value in total.items()}
        return StepFigures(
            loss=total["loss"] / loss_tokens,
            pg_loss=total["pg_loss"] / loss_tokens,
            kl=mean["kl"] if with_kl else None,
            entropy=mean["entropy"],
            ratio_mean=mean["ratio"],
            ratio_clipped_frac=mean["clipped"],
            logprob_diff_mean=mean["logprob_diff"],
            logprob_diff_max=self.largest_diff.item(),
            sampler_kl=mean["sampler_kl"],
        )


def batch_gradients(
    model: PreTrainedModel,
    batches: Sequence[MicroBatch],
    settings: LossSettings,
    *,
    reference: PreTrainedModel | None = None,
    chunk_mb: int = 128,
    loss_tokens: int | None = None,
    comparison: Comparison | None = None,
) -> StepFigures:
    """Add the gradient of the mean token loss of all `batches` to the parameters' `.grad`; nothing is updated.

    `loss_tokens` is what the mean divides by: the batch's sampled tokens, by default those trained here.
    `comparison` is told every token's two log-probabilities.

    The KL term uses an item's own reference log-probabilities where it brought them, else those of `reference`.
    """
    tokens = sum(len(batch.rows) for batch in batches)
    loss_tokens = loss_tokens or tokens
    sums = _Sums(batches[0].input_ids.device)
    for batch in batches:
        known = _reference_logprobs(batch, reference, chunk_mb) if settings.kl_coef > 0 else None

        def chunk_loss(
            logprobs: Tensor, entropy: Tensor, chunk: slice, batch: MicroBatch = batch, known: Tensor | None = known
        ) -> Tensor:
            sampler = batch.sampler_logprobs[chunk]
            of_chunk = None if known is None else known[chunk]
            losses = token_losses(logprobs, entropy, sampler, batch.advantages[chunk], of_chunk, settings)
            if comparison is not None:
                comparison.add(batch.targets[chunk], sampler, logprobs)
            with torch.no_grad():
                diff = (logprobs - sampler).abs()
                kl = torch.zeros_like(diff) if losses.kl is None else losses.kl
                terms = (
                    losses.total,
                    losses.policy,
                    kl,
                    entropy,
                    losses.ratio,
                    losses.clipped,
                    diff,
                    k3(sampler, logprobs),
                )
                sums.add([term.sum() for term in terms], diff)
            return losses.total.sum() / loss_tokens

        accumulate_gradients(model, batch, chunk_loss, chunk_mb)
    return sums.figures(tokens, loss_tokens, with_kl=settings.kl_coef > 0)


def _reference_logprobs(batch: MicroBatch, reference: PreTrainedModel | None, chunk_mb: int) -> Tensor | None:
    """The environment's reference log-probabilities, those of `reference` where it gave none; None without either."""
    given = batch.reference_logprobs
    missing = given.isnan()
    if not missing.any():
        return given
    return None if reference is None else torch.where(missing, token_logprobs(reference, batch, chunk_mb), given)
