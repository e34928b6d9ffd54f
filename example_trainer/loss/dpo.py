"""Direct preference optimisation (--offline-objective dpo; Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    h     =  (log p(pos) - log p_start(pos)) - (log p(neg) - log p_start(neg))       sums over an answer's tokens
    loss  =  -log sigmoid(beta h)
    d loss / d log p(pos)  =  -beta sigmoid(-beta h)  =  -(d loss / d log p(neg))

The derivative is a number per pair. So the gradient is that of `sft.token_loss` with this weight, positive for the
tokens of the better answer and negative for those of the worse one, once a pass without gradient has found h. No
micro-batch needs to hold both answers.

Pure functions: values in, values out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pair_loss(margins: Tensor, beta: float) -> Tensor:
    """The loss of each pair, [pairs]; `margins` are the h, [pairs]."""
    return -F.logsigmoid(beta * margins)


def weights_of_answers(margins: Tensor, beta: float) -> Tensor:
    """How much the log-probability of each answer counts, [pairs, 2]: that of the better one, and of the worse."""
    slope = beta * torch.sigmoid(-beta * margins)
    return torch.stack([slope, -slope], 1)
