"""AdamW that steps tensor by tensor: with its moments in host memory (--offload moments), from where they move to the
device and back; or with parameters that are spread over ranks in several ways, which PyTorch does not step together.

    host (pinned)  exp_avg, exp_avg_sq ──▶ device ──fused step──▶ new values ──▶ host
                                           of one tensor at a time

AdamW is elementwise: a tensor gets the same bits whether it is stepped alone or with all others. So neither changes
what a run computes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from example_trainer.optim.adamw import MOMENTS, step_tensor
from example_trainer.ranks.partition import local


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with its name and its state, but for where that lies: checkpoints fit the one and the other."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, on_host: bool = True, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self._on_host = on_host

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        if any(parameter.is_cuda for group in self.param_groups for parameter in group["params"]):
            torch.cuda.synchronize()  # the moments are on their way to the host

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, object]) -> None:
        state = self.state[parameter]
        device = local(parameter).device
        if not state:
            state["step"] = torch.zeros((), device=device)
            for name in MOMENTS:
                state[name] = self._zeros_like(parameter)
        moments = [local(state[name]).to(device, non_blocking=True) for name in MOMENTS]
        step_tensor(local(parameter), local(gradient), moments, state["step"], group)
        for name, moment in zip(MOMENTS, moments, strict=True):
            host = local(state[name])
            if host.data_ptr() != moment.data_ptr():  # else they are one
                host.copy_(moment, non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch would bring all moments to the device at once
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            state = self.state[parameter]
            for name, value in saved.items():
                if value.ndim == 0:  # a count
                    state[name] = value.to(local(parameter).device, copy=True)
                else:
                    state[name] = self._zeros_like(parameter)
                    local(state[name]).copy_(local(value))

    def _zeros_like(self, parameter: Tensor) -> Tensor:
        """In host memory page-locked if `parameter` is on a GPU, which then copies at full speed."""
        if not self._on_host:
            return torch.zeros_like(parameter, requires_grad=False)
        return torch.zeros_like(parameter, device="cpu", pin_memory=local(parameter).is_cuda, requires_grad=False)
