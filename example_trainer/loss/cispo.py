"""CISPO (MiniMax 2025, arXiv 2506.13585, equations 4 and 5): the ratio is bounded as a weight, so that no token loses
its gradient (--objective cispo).

Pure functions: values in, values out; tensors are [tokens] and float32.
"""

from torch import Tensor

from example_trainer.settings.loss import LossSettings


def token_loss(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(r, 1 - clip_eps, 1 + clip_eps_high)) A log p of each token, where sg stops the gradient."""
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - settings.clip_eps, 1 + settings.clip_high)
    clipped, capped = weight != ratio, log_ratio.detach().abs() >= settings.log_ratio_limit
    return -weight * advantages * logprobs, {
        "ratio_mean": ratio,
        "ratio_clipped_frac": clipped,
        "ratio_capped_frac": capped,
    }
