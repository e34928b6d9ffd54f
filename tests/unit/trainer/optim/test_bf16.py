"""bfloat16 weights at RL learning rates: stepped in place they do not change; through a master, or rounded by chance,
they learn.
"""

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from example_trainer.errors import TrainerError
from example_trainer.optim.bf16_masters import MasteredParameter, StochasticAdamW, stochastic_round
from example_trainer.optim.optimizer import clip_gradients, make_optimizer
from example_trainer.settings.bridges import SingleCopy
from example_trainer.settings.config import TrainerConfig

LR, STEPS = 1e-6, 100


def start() -> torch.Tensor:
    return torch.randn(4096, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()


def travelled(parameter: nn.Parameter, optimizer: Optimizer) -> torch.Tensor:
    """How far each stored weight came in STEPS steps of a constant gradient, as a part of the LR * STEPS that AdamW
    intends.
    """
    for _ in range(STEPS):
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (start().double() - parameter.detach().double()) / (LR * STEPS)


def test_plain_bfloat16_steps_are_lost() -> None:
    parameter = nn.Parameter(start())
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=0, fused=True)
    assert travelled(parameter, optimizer).mean().item() < 0.05


def test_a_master_keeps_every_step() -> None:
    parameter = MasteredParameter.over(start())
    optimizer = make_optimizer([parameter], TrainerConfig.model_validate({"model_name": "m", "lr": LR}))
    stored = travelled(parameter, optimizer)
    assert (start().double() - parameter.master.detach().double()).mean().item() == pytest.approx(LR * STEPS, rel=0.01)
    assert torch.equal(parameter, parameter.master.bfloat16())
    assert stored.mean().item() > 0.1  # the cast shows what exceeds bfloat16's steps; the rest waits in the master


def test_stochastic_rounding_is_right_on_average() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(start())
    optimizer = make_optimizer(
        [parameter], TrainerConfig(model_name="m", lr=LR, bridge=SingleCopy(bf16_update="stochastic"))
    )
    assert isinstance(optimizer, StochasticAdamW)
    assert travelled(parameter, optimizer).mean().item() == pytest.approx(1, abs=0.1)


def test_stochastic_round_takes_a_neighbour_with_the_right_chance() -> None:
    torch.manual_seed(0)
    for value in (1 + 2**-10, -(1 + 2**-10), 3.0e-5, 0.0):
        exact = torch.full((200_000,), value)
        rounded = stochastic_round(exact)
        assert rounded.dtype == torch.bfloat16
        assert len(rounded.unique()) <= 2
        assert rounded.double().mean().item() == pytest.approx(exact[0].item(), rel=2e-4)
    exactly = start()
    assert torch.equal(stochastic_round(exactly.float()), exactly)


def test_gradients_of_many_micro_batches_add_up_in_float32() -> None:
    parameter = MasteredParameter.over(torch.zeros(3, dtype=torch.bfloat16))
    for _ in range(1000):
        (parameter * 1.0).sum().backward()  # in bfloat16 the sum would stop at 256
    assert parameter.grad is None
    assert parameter.master.grad is not None
    assert parameter.master.grad.tolist() == [1000.0] * 3
    optimizer = make_optimizer([parameter], TrainerConfig.model_validate({"model_name": "m"}))
    assert clip_gradients(optimizer, 1.0) == pytest.approx(1000 * 3**0.5)


def test_moments_of_the_stochastic_optimizer_resume_to_the_same_bits() -> None:
    def optimizer_of(parameter: nn.Parameter) -> Optimizer:
        return StochasticAdamW([parameter], 1e-3, (0.9, 0.999), 1e-8, 0.0)

    parameter = nn.Parameter(start())
    optimizer = optimizer_of(parameter)
    (parameter * torch.linspace(0.1, 1, 4096)).sum().backward()
    optimizer.step()
    again = nn.Parameter(parameter.detach().clone())
    resumed = optimizer_of(again)
    resumed.load_state_dict(optimizer.state_dict())
    for name, value in optimizer.state[parameter].items():
        assert value.dtype == torch.float32, name
        assert torch.equal(resumed.state[again][name], value), name


def test_what_stochastic_rounding_cannot_do_is_refused() -> None:
    config = TrainerConfig(model_name="m", bridge=SingleCopy(bf16_update="stochastic"), optimizer="adafactor")
    with pytest.raises(TrainerError, match="use adamw, or --bf16-update master"):
        make_optimizer([nn.Parameter(start())], config)


def test_plain_steps_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match=r"nearly all of each update is rounded away; choose master"):
        SingleCopy(bf16_update="plain")
