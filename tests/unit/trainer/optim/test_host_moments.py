"""AdamW with its moments in host memory: the same bits, and checkpoints that fit AdamW's."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from example_trainer.optim.optimizer import make_optimizer, update
from example_trainer.settings.config import TrainerConfig


def optimizer_of(weights: list[nn.Parameter], offload: str) -> Optimizer:
    return make_optimizer(
        weights, TrainerConfig.model_validate({"model_name": "m", "offload": offload, "weight_decay": 0.1, "lr": 1e-2})
    )


def trained(steps: int, offload: str, also: Callable[[int, Optimizer], Optimizer] | None = None) -> list[nn.Parameter]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (11,), (0, 3))]
    optimizer = optimizer_of(weights, offload)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        if also:
            optimizer = also(step, optimizer)
        for weight in weights[: 3 if step else 2]:
            weight.grad = torch.randn(weight.shape, generator=generator)
        update(optimizer)
    return weights


def equal(some: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_moments_in_host_memory_give_the_same_bits() -> None:
    assert equal(trained(20, "moments"), trained(20, "none"))


def test_a_run_goes_on_with_the_other_setting() -> None:
    def swap(step: int, optimizer: Optimizer) -> Optimizer:
        if step != 7:
            return optimizer
        other = optimizer_of(optimizer.param_groups[0]["params"], "moments" if type(optimizer) is plain else "none")
        other.load_state_dict(optimizer.state_dict())
        assert type(other).__name__ == type(optimizer).__name__  # by which a checkpoint knows its optimizer
        return other

    plain = torch.optim.AdamW
    assert equal(trained(20, "moments", swap), trained(20, "none"))
    assert equal(trained(20, "none", swap), trained(20, "none"))
