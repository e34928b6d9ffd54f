"""Training bfloat16 weights. A bfloat16 number has 8 significant bits: an update below 1/256 of a weight is rounded
away. At RL learning rates that is nearly every update (0.4 % of the weights ever change). `--bf16-update` has two
solutions:

    master      a float32 copy takes gradients and optimizer steps; the model computes with its cast: 4 + 4 bytes more
    stochastic  the exact new value is rounded up or down by chance, right on average; no copy, some noise
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from example_trainer.optim.adamw import MOMENTS, step_tensor


class MasteredParameter(nn.Parameter):
    """A bfloat16 parameter with a float32 `master`, to which its gradients go as soon as a backward pass has made
    them.
    """

    master: nn.Parameter

    @staticmethod
    def over(storage: Tensor) -> "MasteredParameter":
        """A parameter that is `storage`, with a master of the same values."""
        parameter = MasteredParameter(storage)
        parameter.master = nn.Parameter(storage.float())
        parameter.register_post_accumulate_grad_hook(_hand_gradient_over)
        return parameter


def _hand_gradient_over(parameter: Tensor) -> None:
    assert isinstance(parameter, MasteredParameter)
    assert parameter.grad is not None
    master = parameter.master
    master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
    parameter.grad = None


def exact_value(parameter: nn.Parameter) -> nn.Parameter:
    """Return what the optimizer steps for `parameter`: its master, or itself."""
    return parameter.master if isinstance(parameter, MasteredParameter) else parameter


@torch.no_grad()
def set_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Give `parameter`, and its master, `value`."""
    if isinstance(parameter, MasteredParameter):
        parameter.master.copy_(value)
    parameter.copy_(value)


@torch.no_grad()
def write_back(parameters: Iterable[MasteredParameter]) -> None:
    """Cast the masters into the parameters."""
    for parameter in parameters:
        parameter.copy_(parameter.master)


def stochastic_round(exact: Tensor) -> Tensor:
    """float32 -> bfloat16, up with the probability of the part that is cut off; finite numbers only."""
    bits = exact.view(torch.int32)
    return ((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(torch.float32).bfloat16()


class StochasticAdamW(Optimizer):
    """AdamW with float32 moments on bfloat16 parameters: each new value is computed in float32, one parameter at a
    time, and rounded by chance."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, object]) -> None:
        exact, state = parameter.float(), self.state[parameter]
        if not state:
            state.update(
                step=torch.zeros((), device=exact.device),
                exp_avg=torch.zeros_like(exact),
                exp_avg_sq=torch.zeros_like(exact),
            )
        moments = [state[name] for name in MOMENTS]
        step_tensor(exact, gradient.float(), moments, state["step"], group)
        parameter.copy_(stochastic_round(exact) if parameter.dtype == torch.bfloat16 else exact)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():  # PyTorch has rounded the moments to the parameter's dtype
            self.state[parameters[index]] = {
                name: value.to(parameters[index].device, copy=True) for name, value in saved.items()
            }
