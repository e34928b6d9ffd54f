"""The GRPO loss per token (Shao et al. 2024, arXiv 2402.03300, equation 3).

Pure functions: values in, values out; tensors are [tokens] and float32.
"""

import torch
from torch import Tensor

from example_trainer.config import LossSettings


def token_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of each token; its metrics are the probability ratio and whether the clip silenced it."""
    ratio = (logprobs - old).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, settings.clip_eps, settings.clip_high)
    return loss, {"ratio_mean": ratio, "ratio_clipped_frac": clipped}


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), the pessimistic bound for either sign of A, and where the clipped side won.

    PPO's clip (Schulman et al. 2017, arXiv 1707.06347, equation 7), with an upper bound of its own as in DAPO's
    clip-higher (Yu et al. 2025, arXiv 2503.14476).
    A > 0: no gradient above 1 + clip_high. A < 0: none below 1 - clip_low; above, the token is pushed down ever harder.
    """
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, bounded), bounded < free
