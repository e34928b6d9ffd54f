"""The clipped surrogate of PPO, which GRPO, Dr. GRPO, DAPO, GSPO and RLOO minimise here (--objective clip).

Pure functions: values in, values out; tensors are [tokens] and float32.
"""

import torch
from torch import Tensor

from example_trainer.settings.loss import LossSettings


def token_loss(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of each token, and whether the clip silenced it or a bound on the ratio capped it."""
    ratio = log_ratio.exp()
    loss, clipped = clipped_surrogate(ratio, advantages, settings.clip_eps, settings.clip_high)
    capped = log_ratio.abs() >= settings.log_ratio_limit
    if settings.dual_clip:
        loss, cut = dual_clipped(loss, advantages, settings.dual_clip)
        capped = capped | cut
    return loss, {"ratio_mean": ratio, "ratio_clipped_frac": clipped, "ratio_capped_frac": capped}


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), the pessimistic bound for either sign of A, and where the clipped side won.

    PPO's clip (Schulman et al. 2017, arXiv 1707.06347, equation 7), with an upper bound of its own as in DAPO's
    clip-higher (Yu et al. 2025, arXiv 2503.14476).
    A > 0: no gradient above 1 + clip_high. A < 0: none below 1 - clip_low; above, the token is pushed down ever harder.
    """
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, bounded), bounded < free


def dual_clipped(loss: Tensor, advantages: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The loss of a token with A < 0, at most `limit` x |A|, beyond which it has no gradient; and where that acted.

    Dual-clip PPO (Ye et al. 2020, "Mastering complex control in MOBA games with deep reinforcement learning", arXiv
    1912.09729).
    """
    most = -limit * advantages
    cut = (advantages < 0) & (loss > most)
    return torch.where(cut, most, loss), cut
