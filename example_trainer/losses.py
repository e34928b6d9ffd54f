"""The GRPO loss per token (Shao et al. 2024, arXiv 2402.03300, equation 3).

Pure functions: values in, values out; tensors are [tokens] and float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossSettings:
    """Clip distances below and above a ratio of 1, and the weights of the two optional terms."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


@dataclass(frozen=True)
class TokenLosses:
    """The terms of the loss of each token; `total` is what is differentiated."""

    total: Tensor
    policy: Tensor
    kl: Tensor | None
    ratio: Tensor
    clipped: Tensor  # bool: the clipped branch was taken, so the token has no policy gradient


def token_losses(
    logprobs: Tensor,
    entropy: Tensor,
    sampler: Tensor,
    advantages: Tensor,
    reference: Tensor | None,
    settings: LossSettings,
) -> TokenLosses:
    """Clipped surrogate, plus `kl_coef` times the KL to `reference`, minus `entropy_coef` times the entropy."""
    ratio = (logprobs - sampler).exp()
    policy, clipped = clipped_surrogate(ratio, advantages, settings.clip_low, settings.clip_high)
    total = policy
    kl = None
    if settings.kl_coef > 0:
        if reference is None:
            raise ValueError("kl_coef > 0 needs reference log-probabilities")
        kl = k3(logprobs, reference)
        total = total + settings.kl_coef * kl
    if settings.entropy_coef > 0:
        total = total - settings.entropy_coef * entropy
    return TokenLosses(total, policy, kl, ratio, clipped)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), the pessimistic bound for either sign of A, and where the clipped side won.

    PPO's clip (Schulman et al. 2017, arXiv 1707.06347, equation 7), with an upper bound of its own as in DAPO's
    clip-higher (Yu et al. 2025, arXiv 2503.14476).
    A > 0: no gradient above 1 + clip_high. A < 0: none below 1 - clip_low; above, the token is pushed down ever harder.
    """
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, bounded), bounded < free


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) on sampled tokens: never negative, unbiased on-policy.

    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = reference - logprobs
    return log_ratio.exp() - log_ratio - 1
