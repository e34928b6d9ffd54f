"""What happens to tokens that the sampler and the trainer, or the trainer long ago and now, see differently. Pure
functions without gradients: values in, values out; tensors are [tokens].

    old log-probabilities   importance w                  what the bounds do to a token's loss
    recomputed              exp(old - sampler)            multiplied by min(w, high); by w within the bounds, else 0
    the sampler's           exp(now - sampler)            multiplied by min(w, high) / w, as the loss has w already
                                                          (config.py refuses the rest); kept within the bounds, else 0
"""

import torch
from torch import Tensor

from example_trainer.settings.loss import LossSettings


def importance_weights(log_weights: Tensor, in_loss: bool, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Compute what each token's loss is multiplied by, and where a bound acted. `in_loss`: the loss has these ratios
    already.

    truncate   min(w, high): truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
               brings you off-policy RL training", https://fengyao.notion.site/off-policy-rl; Ionides 2008, "Truncated
               importance sampling"). A lower bound would make tokens count more than their importance, so only `mask`
               has one.
    mask       w within the bounds, else 0: IcePop (Ling team 2025, arXiv 2510.18855), and masked importance
               sampling (Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the
               training-inference mismatch")
    """
    lowest, highest = settings.importance_bounds
    weights = log_weights.clamp(-settings.log_ratio_limit, settings.log_ratio_limit).exp()
    if settings.importance == "truncate":
        bounded, acted = weights.clamp(max=highest), weights > highest
        return bounded / weights if in_loss else bounded, acted
    acted = (weights < lowest) | (weights > highest)
    return torch.where(acted, 0.0, 1.0 if in_loss else weights), acted


def too_far_off_policy(advantages: Tensor, lost: Tensor, limit: float) -> Tensor:
    """Mark the tokens that are dropped: those with A < 0 of a sequence that has lost more than `limit` nats a token
    since it was sampled. `lost` is the sequence's mean of sampler's less current log-probability.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556): pushing down what the policy would
    hardly say any more teaches little, and unsettles much.
    """
    return (advantages < 0) & (lost > limit)
