"""On-policy distillation by the sampled tokens (--distill reverse_kl): KL(policy || teacher) as a per-token advantage.

    A_t  +=  distill_coef x (log p_teacher(t) - log p_old(t))

The expectation of the policy gradient with this advantage is minus the gradient of the KL at each position, with the
tokens before it as they were sampled: what a token does to later positions is not counted, as in Thinking Machines Lab
2025, "On-Policy Distillation" (a discount of 0). It is unbiased for one token per position, without the teacher's other
probabilities (Agarwal et al. 2024, arXiv 2306.13649, section 3, has the exact form).

Pure functions: values in, values out; tensors are [tokens] and float32.
"""

from torch import Tensor

from example_trainer.loss.base import kl_estimate


def estimate(old: Tensor, teacher: Tensor, limit: float) -> Tensor:
    """How much likelier the old policy found each token than the teacher does, within ± `limit` nats: on the tokens
    that it sampled, an unbiased estimate of KL(policy || teacher). `distill_coef` times it is taken from the advantage.

    The old policy's is the log-probability of what was sampled from, under its temperature, top-p and top-k; the
    teacher's is that of the model as it is. So the policy as it is sampled learns to be the teacher at temperature 1.
    """
    return kl_estimate(old, teacher, "k1", limit)
