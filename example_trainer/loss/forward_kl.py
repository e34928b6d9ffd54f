"""On-policy distillation by the teacher's likeliest tokens (--distill forward_kl): KL(teacher || policy) as a loss.

    loss_t  =  sum over k of p_T (log p_T - log p)  +  r_T (log r_T - log r),    r = 1 - sum over k of p

A teacher names k of its tokens at a position, and the sampled one. All the others are one more category, whose mass is
`r`: so this is the KL of two distributions over k + 1 categories, never negative, 0 only where the policy gives each
named token what the teacher gives it, and at most the KL over the whole vocabulary (Cover and Thomas 2006, section
2.8, the data-processing inequality). Without that category the sum would be no KL: it falls below 0 where the policy
gives the named tokens too much, and nothing would hold their total.

The gradient passes through every named token. As a reward of the sampled token alone, the same sum would only say how
far a position is from its teacher, not in which direction.

Pure functions: values in, values out.
"""

import torch
from torch import Tensor


def token_loss(named: Tensor, rest: Tensor, teacher: Tensor) -> Tensor:
    """The KL at each position, [tokens]. `named` and `teacher` [tokens, k] are the two log-probabilities of the tokens
    that the teacher names, and `rest` [tokens] is the log of the policy's mass of all others.
    """
    given = teacher.exp()
    left = (1 - given.sum(-1)).clamp(min=0)  # rounding may bring the named ones above 1
    return (given * (teacher - named)).sum(-1) + torch.xlogy(left, left) - left * rest
