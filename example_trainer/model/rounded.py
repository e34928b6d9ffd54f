"""A model that computes with its weights as another dtype has them, one module at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@contextmanager
def rounded_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round each module's parameters to `dtype` while its forward pass runs. Parameters of no more bits, and those that
    ranks share, are used as they are.
    """
    hooks = []
    kept: dict[nn.Parameter, Tensor] = {}
    for module in model.modules():
        coarser = [
            parameter
            for parameter in module.parameters(recurse=False)
            if parameter.dtype.itemsize > dtype.itemsize and not isinstance(parameter, DTensor)
        ]
        if not coarser:
            continue

        def begin(module: nn.Module, args: object, coarser: list[nn.Parameter] = coarser) -> None:
            for parameter in coarser:
                kept[parameter] = parameter.data
                parameter.data = parameter.data.to(dtype).to(parameter.dtype)

        def end(module: nn.Module, args: object, output: object, coarser: list[nn.Parameter] = coarser) -> None:
            for parameter in coarser:
                parameter.data = kept.pop(parameter)

        hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in kept.items():  # of a pass that failed
            parameter.data = data
