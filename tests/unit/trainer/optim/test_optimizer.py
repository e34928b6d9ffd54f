"""The one update of a step: which gradients it refuses, how far it scales them, and each update's learning rate."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from example_trainer.errors import BadBatch
from example_trainer.optim import optimizer
from example_trainer.optim.optimizer import (
    clip_gradients,
    expect_finite,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    update,
)
from example_trainer.settings.config import TrainerConfig


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(model_name="m", **changes)


def with_gradients(*gradients: list[float]) -> tuple[list[nn.Parameter], Optimizer]:
    """Parameters of zeros with these gradients, in two groups."""
    parameters = [nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters, SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=1.0)


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [
        (([1.0, math.inf], [1.0]), "inf"),
        (([1.0], [-math.inf]), "inf"),
        (([1.0], [math.nan, 2.0]), "nan"),
        (([1e30, 1e30], [1e30]), "inf"),  # finite numbers whose squares are not
    ],
)
def test_gradients_without_a_finite_norm_are_refused_before_any_weight_changes(
    gradients: tuple[list[float], ...], norm: str
) -> None:
    parameters, optimizer = with_gradients(*gradients)
    with pytest.raises(BadBatch, match=f"the gradient norm is {norm}; the weights were not changed"):
        expect_finite(clip_gradients(optimizer, 1.0))
    assert all(parameter.eq(0).all() for parameter in parameters)


def test_a_rank_whose_gradients_others_count_sums_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of adapters of key-value heads alone, some ranks hold copies only. A sum on the CPU would meet nobody."""
    held = nn.Parameter(torch.zeros(2, device="meta"))
    held.grad = torch.zeros(2, device="meta")
    sums: list[str] = []

    def summed(square: torch.Tensor, group: object) -> None:
        sums.append(square.device.type)
        raise InterruptedError

    monkeypatch.setattr(optimizer, "is_first_holder", lambda *given: False)
    monkeypatch.setattr(dist, "all_reduce", summed)
    mesh: Any = SimpleNamespace(get_group=lambda name: name)
    with pytest.raises(InterruptedError):
        optimizer._clip_over(mesh, [held], 1.0)
    assert sums == ["meta"]


@pytest.mark.parametrize(("largest", "factor"), [(1.0, 0.2), (5.0, 1.0), (10.0, 1.0)])
def test_gradients_of_all_groups_are_scaled_together_to_the_largest_norm(largest: float, factor: float) -> None:
    parameters, optimizer = with_gradients([3.0, 0.0], [4.0])
    assert clip_gradients(optimizer, largest) == 5.0
    found = [value for parameter in parameters if parameter.grad is not None for value in parameter.grad.tolist()]
    assert found == pytest.approx([3.0 * factor, 0.0, 4.0 * factor], rel=1e-5)


def rates(no_update: int = 0, **changes: Any) -> list[float]:
    """The learning rate of every step, as a part of --lr, where each step whose number `no_update` divides makes no
    update.
    """
    settings = config(lr=0.5, **changes)
    found, updates = [], 0
    for step in range(1, settings.training_steps + 1):
        found.append(learning_rate(settings, step, updates) / 0.5)
        updates += not (no_update and step % no_update == 0)
    return found


def test_the_learning_rate_rises_stays_and_falls() -> None:
    assert rates(training_steps=8) == [1.0] * 8
    assert rates(training_steps=8, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    falling = rates(training_steps=8, warmup_steps=2, lr_decay_steps=3)
    assert falling == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert rates(training_steps=9, lr_decay_steps="1/3") == rates(training_steps=9, lr_decay_steps=3)


def test_steps_without_an_update_lower_the_rate_and_do_not_warm_up() -> None:
    falling = [part / 11 for part in range(10, 0, -1)]
    assert rates(training_steps=40, lr_decay_steps=10, no_update=4) == pytest.approx([1.0] * 30 + falling)
    assert rates(training_steps=8, warmup_steps=4, no_update=2) == [0.25, 0.5, 0.5, 0.75, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("by_signal", "share", "expected"),
    [(True, 0.125, 0.125), (True, 1.0, 1.0), (True, 0.0, 0.0), (False, 0.125, 1.0)],
)
def test_the_rate_follows_the_share_of_groups_with_a_signal_where_asked(
    by_signal: bool, share: float, expected: float
) -> None:
    settings = config(lr=0.5, training_steps=4, lr_decay_steps=1, lr_by_signal=by_signal)
    assert learning_rate(settings, 3, 2, share) == pytest.approx(0.5 * expected)
    assert learning_rate(settings, 4, 3, share) == pytest.approx(0.25 * expected)  # beside the decay
    taught = settings.model_copy(update={"distill_coef": 1.0})  # every group has a teacher's
    assert learning_rate(taught, 3, 2, share) == 0.5


def test_the_next_update_has_the_rate_that_was_set() -> None:
    parameters, optimizer = with_gradients([1.0], [2.0])
    set_learning_rate(optimizer, 0.25)
    update(optimizer)
    assert [parameter.item() for parameter in parameters] == [-0.25, -0.5]


def test_an_update_steps_once_and_leaves_no_gradient_behind() -> None:
    parameters, optimizer = with_gradients([1.0], [2.0])
    update(optimizer)
    assert [parameter.item() for parameter in parameters] == [-1.0, -2.0]
    assert [parameter.grad for parameter in parameters] == [None, None]


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_optimizer_has_the_configured_settings_and_no_frozen_parameter(name: str) -> None:
    trained, frozen = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    settings = dict(optimizer=name, lr=0.125, weight_decay=0.25, adam_betas=(0.5, 0.75), adam_eps=1e-3)
    (group,) = make_optimizer([frozen, trained], config(**settings)).param_groups
    assert [parameter is trained for parameter in group["params"]] == [True]
    assert (group["lr"], group["weight_decay"]) == (0.125, 0.25)
    if name == "adamw":
        assert (group["betas"], group["eps"]) == ((0.5, 0.75), 1e-3)
