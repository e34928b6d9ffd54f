"""Which tokens top-k and top-p keep, without sorting the vocabulary where the likeliest tokens decide it."""

import torch
from torch import Tensor

CANDIDATES = (128, 2048)  # likeliest tokens of a row among which the last that is kept is looked for, before all
LEAST_SHARE = 1e-300  # in place of a top-p that is 0 in float32: the likeliest token is kept


def without_excluded(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return `logits` [rows, vocabulary] with -inf at the tokens that top-k and then top-p exclude.

    `top_k` [rows] keeps each row's k likeliest tokens, and what equals the last of them; the vocabulary or more keeps
    all. `top_p` [rows] keeps, of those, the likeliest until their share reaches p; 1 keeps all. A row's result does not
    depend on other rows.
    """
    first, *more = CANDIDATES
    result, told = _of_candidates(logits, top_k, top_p, first)
    for count in (*more, logits.shape[1]):
        rest = (~told).nonzero().flatten()
        if len(rest):
            result[rest], told[rest] = _of_candidates(logits[rest], top_k[rest], top_p[rest], count)
    return result


def _of_candidates(logits: Tensor, top_k: Tensor, top_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The result as the `count` likeliest tokens of each row tell it, and whether they do [rows]."""
    vocabulary, count = logits.shape[1], min(count, logits.shape[1])
    values, order = logits.topk(count)
    limited = (top_k < vocabulary)[:, None]
    least = values.gather(1, (top_k.clamp(max=count) - 1)[:, None].long())
    counts = ~limited | (values >= least)
    shares = torch.where(counts, logits.softmax(-1).gather(1, order).double(), 0.0)
    found = shares.sum(-1, keepdim=True)
    share = torch.where(top_p < 1, top_p.double().clamp(min=LEAST_SHARE), torch.inf)[:, None]
    needed = share * torch.where(limited, found, 1.0)
    kept = counts & (shares.cumsum(-1) - shares < needed)
    result = torch.full_like(logits, -torch.inf).scatter_(1, order, torch.where(kept, values, -torch.inf))
    whole = ~limited & (top_p >= 1)[:, None]
    # more tokens than the candidates may equal the last of top-k
    told = whole | torch.where(limited, least > values[:, -1:], found >= needed) | (count == vocabulary)
    return torch.where(whole, logits, result), told.flatten()
