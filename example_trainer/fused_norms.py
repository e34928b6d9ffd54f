"""Root mean square norms in one kernel each way, on GPUs, where transformers takes one for each operation.

The normed value is multiplied with the weight before it is rounded, instead of after.
"""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

# of transformers: weight * (x / rms(x)), without an offset
NORMS = {f"{family}RMSNorm" for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")}


def fuse_norms(model: nn.Module) -> int:
    """Give each norm of a known family PyTorch's fused forward. Returns how many there are."""
    norms: list[Any] = [module for module in model.modules() if type(module).__name__ in NORMS]
    for norm in norms:
        norm.forward = partial(_fused, norm)
    return len(norms)


def _fused(norm: Any, hidden_states: Tensor) -> Tensor:
    # the last norm's weight is in float32, as the head's is
    states, width = hidden_states.to(norm.weight.dtype), list(hidden_states.shape[-1:])
    return F.rms_norm(states, width, norm.weight, norm.variance_epsilon)
