"""The optimizer, the learning rate of each update and the update itself."""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from example_trainer.errors import BadBatch, TrainerError
from example_trainer.optim import offloaded_adamw
from example_trainer.optim.average import keep_average
from example_trainer.optim.bf16_masters import MasteredParameter, StochasticAdamW, exact_value, write_back
from example_trainer.ranks.partition import REPLICATE, SHARD, TP, has_tp, is_first_holder, local
from example_trainer.settings.config import TrainerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainerConfig) -> Optimizer:
    """The configured optimizer on float32 parameters, or on the masters of bfloat16 ones, which it then writes back
    after each step.

    Call it after the bridge has bound the parameters to their final storage. Raises TrainerError.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = _make_optimizer([exact_value(parameter) for parameter in trained], config)
    if mastered := [parameter for parameter in trained if isinstance(parameter, MasteredParameter)]:
        optimizer.register_step_post_hook(lambda *_: write_back(mastered))
    if config.ema_decay:
        keep_average(optimizer, config.ema_decay)
    return optimizer


def _make_optimizer(trained: list[nn.Parameter], config: TrainerConfig) -> Optimizer:
    if any(parameter.dtype == torch.bfloat16 for parameter in trained):
        if config.optimizer != "adamw":
            raise TrainerError(
                f"--bf16-update stochastic has its own AdamW, not {config.optimizer}: use adamw, or --bf16-update"
                " master"
            )
        return StochasticAdamW(trained, config.lr, config.adam_betas, config.adam_eps, config.weight_decay)
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(trained, lr=config.lr, weight_decay=config.weight_decay)
    if config.optimizer == "adamw_8bit":
        if not all(parameter.is_cuda for parameter in trained):
            raise TrainerError(
                "--optimizer adamw_8bit runs on CUDA devices only; use adamw or adafactor on this device"
            )
        import bitsandbytes

        return cast(
            Optimizer,
            bitsandbytes.optim.AdamW8bit(
                trained, lr=config.lr, betas=config.adam_betas, eps=config.adam_eps, weight_decay=config.weight_decay
            ),
        )
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.adam_betas,
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    if config.offload == "moments" or config.tp_size > 1:
        return offloaded_adamw.AdamW(trained, on_host=config.offload == "moments", **settings)
    return torch.optim.AdamW(trained, **settings)


def learning_rate(config: TrainerConfig, step: int, updates: int, signal_share: float = 1.0) -> float:
    """Return the rate of an update of training step `step`, counted from 1, before which `updates` were made;
    `signal_share` (0 to 1) is the share of the step's groups with a signal, which counts with --lr-by-signal.

    It rises linearly from lr / warmup_steps to lr over the first `warmup_steps` updates, because the optimizer's
    moments settle by updates. It falls linearly to lr / (lr_decay_steps + 1) over the last `lr_decay_steps` steps,
    whether they update or not, so that a run always ends at the lowest rate.
    """
    scheduled = config.lr * min(
        1.0,
        (updates + 1) / max(1, config.warmup_steps),
        (config.training_steps - step + 1) / (config.lr_decay_steps + 1),
    )
    if config.distill_coef > 0 or config.offline_share > 0:  # a teacher's signal is in every group, or in the file
        signal_share = 1.0
    return scheduled * signal_share if config.lr_by_signal else scheduled


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """The rate of the next update, for every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(optimizer: Optimizer, max_grad_norm: float, mesh: DeviceMesh | None = None) -> float:
    """Scale the gradients to at most `max_grad_norm`; their L2 norm before, over all ranks. They are spoilt where it is
    not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if mesh is not None and has_tp(mesh):
        return _clip_over(mesh, parameters, max_grad_norm)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


@torch.no_grad()
def _clip_over(mesh: DeviceMesh, parameters: list[nn.Parameter], max_grad_norm: float) -> float:
    """The same for parameters that are spread over the dimensions of `mesh` in different ways: each value counts once,
    on the first rank that holds it.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [local(cast(Tensor, parameter.grad)) for parameter in held]
    first = [is_first_holder(parameter, mesh, REPLICATE) for parameter in held]
    counted = [gradient for gradient, counts in zip(gradients, first, strict=True) if counts]
    norms = torch.nn.utils.get_total_norm(counted)
    if gradients:  # of nothing it is on the CPU, where the other ranks do not sum
        norms = norms.to(gradients[0].device)
    square = norms.double() ** 2
    for name in (SHARD, TP):
        dist.all_reduce(square, group=mesh.get_group(name))
    norm = square.sqrt().float()
    torch._foreach_mul_(gradients, torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0))
    return norm.item()


def divide_gradients(optimizer: Optimizer, divisor: float) -> None:
    """Divide every gradient, in place."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)


def expect_finite(grad_norm: float) -> None:
    """Raise BadBatch for a gradient that cannot be stepped on."""
    if not math.isfinite(grad_norm):
        raise BadBatch(
            f"the gradient norm is {grad_norm}; the weights were not changed. The sampler's log-probabilities"
            " are probably not this model's: check that vLLM serves the same model and that logprob_diff_max of"
            " earlier steps is small"
        )


def update(optimizer: Optimizer) -> None:
    """Step once on the clipped gradients, and clear them. The one place where weights change."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
