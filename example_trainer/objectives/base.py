"""What every loss is made of. Pure functions: values in, values out; tensors are [tokens] and float32."""

import importlib
from typing import Protocol, cast

from torch import Tensor

from example_trainer.config import LossSettings
from example_trainer.objectives import Loss


class TokenLoss(Protocol):
    """A loss per token, of which a step differentiates the sum over the batch's sampled tokens."""

    def __call__(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings, /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token under the current policy's `logprobs`, and the loss's own metrics by their names in
        metrics.jsonl, whose means over the trained tokens are reported. `old` are the log-probabilities that ratios
        are against (--old-logprobs): of the policy that sampled the tokens, or of the one before the first update.
        """


def load_loss(name: Loss) -> TokenLoss:
    """The loss of that name (objectives/NAME.py)."""
    return cast(TokenLoss, importlib.import_module(f"example_trainer.objectives.{name}").token_loss)


def with_penalties(
    policy: Tensor, logprobs: Tensor, entropy: Tensor, reference: Tensor | None, settings: LossSettings
) -> tuple[Tensor, Tensor | None]:
    """The loss plus `kl_coef` times the KL to `reference`, minus `entropy_coef` times the entropy; and that KL."""
    total, kl = policy, None
    if settings.kl_coef > 0:
        if reference is None:
            raise ValueError("kl_coef > 0 needs reference log-probabilities")
        kl = k3(logprobs, reference)
        total = total + settings.kl_coef * kl
    if settings.entropy_coef > 0:
        total = total - settings.entropy_coef * entropy
    return total, kl


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) on sampled tokens: never negative, unbiased on-policy.

    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = reference - logprobs
    return log_ratio.exp() - log_ratio - 1
