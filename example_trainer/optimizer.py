"""The optimizer, its learning-rate schedule and the one update of a step."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from example_trainer.bf16 import MasteredParameter, StochasticAdamW, exact_value, write_back
from example_trainer.config import TrainerConfig
from example_trainer.errors import BadBatch, TrainerError


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainerConfig) -> Optimizer:
    """The configured optimizer on float32 parameters, or on the masters of bfloat16 ones, which it then writes back
    after each step.

    Call it after the bridge has bound the parameters to their final storage. Raises TrainerError.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = _make_optimizer([exact_value(parameter) for parameter in trained], config)
    if mastered := [parameter for parameter in trained if isinstance(parameter, MasteredParameter)]:
        optimizer.register_step_post_hook(lambda *_: write_back(mastered))
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
    return torch.optim.AdamW(
        trained,
        lr=config.lr,
        betas=config.adam_betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def make_scheduler(optimizer: Optimizer, config: TrainerConfig, updates_done: int) -> LambdaLR:
    """Linear from lr / warmup_steps to lr over the first `warmup_steps` updates, linear to lr / (lr_decay_steps + 1)
    over the last `lr_decay_steps` of `training_steps`, constant between; goes on after `updates_done`.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]

    def factor(done: int) -> float:
        return min(
            1.0,
            (done + 1) / max(1, config.warmup_steps),
            max(1, config.training_steps - done) / (config.lr_decay_steps + 1),
        )

    return LambdaLR(optimizer, factor, last_epoch=updates_done - 1)


def clip_gradients(optimizer: Optimizer, max_grad_norm: float) -> float:
    """Scale the gradients to at most `max_grad_norm`; their L2 norm before. Raises BadBatch if it is not finite."""
    norm = torch.nn.utils.clip_grad_norm_(
        [parameter for group in optimizer.param_groups for parameter in group["params"]], max_grad_norm
    )
    if not torch.isfinite(norm):
        raise BadBatch(
            f"the gradient norm is {norm.item()}; the weights were left as they are. The sampler's log-probabilities"
            " are probably not this model's: check that vLLM serves the same model and that logprob_diff_max of"
            " earlier steps is small"
        )
    return float(norm)


def update(optimizer: Optimizer, scheduler: LambdaLR) -> None:
    """Step once on the clipped gradients, and clear them. The one place where weights change."""
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
