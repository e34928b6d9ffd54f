"""Stacked experts read from files that have them apart; both ends of the bridge read so."""

from collections.abc import Callable

import torch
from torch import Tensor

from atroposlib.wire.published import InFiles


def read_experts(held: InFiles, read: Callable[[str], Tensor], start: int, length: int) -> Tensor:
    """`length` experts from `start` of a stacked tensor [experts, rows, columns]; `read` gives a tensor of the files by
    name.
    """
    experts = [torch.cat([read(part) for part in parts]) for parts in held.experts[start : start + length]]
    return torch.stack(experts) if experts else torch.empty(0, *held.shape[1:])
