"""One tensor's step of AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), by PyTorch's fused kernel.

Optimizers that keep weights or moments elsewhere step tensor by tensor.
"""

from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


def step_tensor(
    parameter: Tensor, gradient: Tensor, moments: list[Tensor], count: Tensor, group: dict[str, Any]
) -> None:
    """Step `parameter` in place, with the settings of its parameter `group`. `moments` are in the order of MOMENTS, and
    `count` the steps done; both change, too.
    """
    beta1, beta2 = group["betas"]
    adamw(
        [parameter],
        [gradient],
        moments[:1],
        moments[1:],
        [],
        [count],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        fused=True,
    )
