"""Root mean square norms in one kernel each way, on GPUs, where transformers takes one for each operation.

The normed value is multiplied with the weight before it is rounded, instead of after.
"""

from functools import cache, partial
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fuse_norms(model: nn.Module) -> int:
    """Give each of `plain_norms` PyTorch's fused forward. Returns how many there are."""
    norms = plain_norms(model)
    for norm in norms:
        norm.forward = partial(_fused, norm)
    return len(norms)


def plain_norms(model: nn.Module) -> list[Any]:
    """The norms that compute weight * x / rms(x)."""
    return [module for module in model.modules() if _is_plain(cast(Any, type(module)))]


@cache
def _is_plain(kind: Any) -> bool:
    """Return whether modules of this class are such norms, by what one computes: Gemma's, for one, add 1 to the
    weight.
    """
    if not kind.__name__.endswith("RMSNorm") or list(signature(kind).parameters)[1:] != ["eps"]:
        return False
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = kind(8, eps=1e-5)
        if not hasattr(norm, "variance_epsilon") or getattr(norm, "weight", torch.empty(0)).shape != (8,):
            return False
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        states = torch.randn(3, 8)
        return torch.allclose(norm(states), _fused(norm, states), rtol=1e-4)


def _fused(norm: Any, hidden_states: Tensor) -> Tensor:
    # the last norm's weight is in float32, as the head's is
    states, width = hidden_states.to(norm.weight.dtype), list(hidden_states.shape[-1:])
    return F.rms_norm(states, width, norm.weight, norm.variance_epsilon)
