"""Tokens of rows of probabilities, by inverse transform sampling."""

import torch
from torch import Tensor

BLOCK = 128  # tokens whose probabilities are summed before each of them is looked at


def draw_tokens(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token of each row of `probabilities` [rows, vocabulary] by inverse transform sampling: the first whose
    cumulated probability exceeds the row's share, `uniform` [rows] in [0, 1) and float64, of their sum.

    Sums of blocks are cumulated, and then one block of each row. A row's token does not depend on other rows. A row
    with NaN gives a token, too, for the engine to go on; its log-probability tells.
    """
    rows, vocabulary = probabilities.shape
    whole, rest = probabilities.split([vocabulary - vocabulary % BLOCK, vocabulary % BLOCK], -1)
    blocks = torch.cat([whole.unflatten(-1, (-1, BLOCK)).sum(-1), rest.sum(-1, keepdim=True)], -1)
    cumulated = blocks.double().cumsum(-1)
    target = uniform[:, None] * cumulated[:, -1:]
    block = torch.searchsorted(cumulated, target, right=True).clamp_(max=blocks.shape[-1] - 1)
    before = torch.where(block > 0, cumulated.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    tokens = block * BLOCK + torch.arange(BLOCK)
    inside = torch.where(tokens < vocabulary, probabilities.gather(-1, tokens.clamp(max=vocabulary - 1)), 0.0)
    inside = inside.double().cumsum(-1)
    below_all = inside[:, -1:].nextafter(inside.new_zeros(()))  # the sums of a block round differently
    place = torch.searchsorted(inside, torch.minimum(target - before, below_all), right=True)
    return (block * BLOCK + place).clamp_(max=vocabulary - 1).view(rows)
