"""The average of the weights over a run's updates: what it is, where it lies, and that a run ends with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from example_trainer.optim.average import take_average
from example_trainer.optim.bf16_masters import MasteredParameter
from example_trainer.optim.optimizer import make_optimizer, update
from example_trainer.settings.config import TrainerConfig
from tests.unit.trainer.fakes import FakeApi, RecordingBridge
from tests.unit.trainer.whole_runs import feed, rows, train, weights

DECAY = 0.75
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adafactor": {"optimizer": "adafactor"},
    "moments in host memory": {"offload": "moments"},
    "bfloat16": {},
    "bfloat16 with masters": {},
}


def averaged(values: list[torch.Tensor]) -> torch.Tensor:
    """By the definition, in float64."""
    shares = torch.tensor([DECAY**age for age in reversed(range(len(values)))], dtype=torch.float64)
    column = (shares / shares.sum()).view(-1, *[1] * values[0].ndim)
    return (column * torch.stack(values).double()).sum(0)


class Two(nn.Module):
    """A parameter that every step has a gradient for, and one that no step has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        start = torch.randn(5, 7)
        if kind == "bfloat16 with masters":
            self.used: nn.Parameter = MasteredParameter.over(start.bfloat16())
        else:
            self.used = nn.Parameter(start.bfloat16() if kind == "bfloat16" else start)
        self.unused = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("kind", KINDS)
def test_late_values_count_most_and_the_first_no_more_than_its_share(kind: str) -> None:
    model, settings = Two(kind), {"model_name": "m", "lr": 0.1, "ema_decay": DECAY, **KINDS[kind]}
    optimizer = make_optimizer(model.parameters(), TrainerConfig.model_validate(settings))
    exact = model.used.master if isinstance(model.used, MasteredParameter) else model.used
    values = []
    for step in range(6):
        if step == 3:  # as a checkpoint does
            other = make_optimizer(model.parameters(), TrainerConfig.model_validate(settings))
            other.load_state_dict(optimizer.state_dict())
            optimizer = other
        exact.grad = torch.randn(5, 7, generator=torch.Generator().manual_seed(step)).to(exact.dtype)
        update(optimizer)
        values.append(exact.detach().double())
    take_average(model.parameters(), optimizer)
    assert not torch.equal(exact, values[-1].to(exact.dtype))
    torch.testing.assert_close(exact.detach(), averaged(values).to(exact.dtype), rtol=1e-6, atol=1e-6)
    assert torch.equal(model.used, exact.to(model.used.dtype))
    assert torch.equal(model.unused, torch.ones(3))


@pytest.mark.usefixtures("one_thread")
def test_a_run_ends_with_it_and_a_resumed_one_with_the_same_bits(model: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_interval": 1, "keep_checkpoints": 0}
    train(model, tmp_path / "plain", **settings)
    train(model, tmp_path / "straight", ema_decay=DECAY, **settings)
    of_steps = [weights(tmp_path / f"plain/checkpoints/step_{step}") for step in (1, 2, 3, 4)]
    final = weights(tmp_path / "straight/checkpoints/final_model")
    for name, found in final.items():
        torch.testing.assert_close(found, averaged([each[name] for each in of_steps]).float(), rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(final[name], of_steps[-1][name]) for name in final)
    for name, value in weights(tmp_path / "straight/checkpoints/step_3").items():
        assert torch.equal(value, of_steps[2][name]), "steps before the last train what an update made"

    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "resumed", bridge=RecordingBridge(fail_at=4), ema_decay=DECAY, checkpoint_interval=2)
    train(model, tmp_path / "resumed", first_step=2, resume="latest", ema_decay=DECAY, checkpoint_interval=2)
    again = weights(tmp_path / "resumed/checkpoints/final_model")
    assert all(torch.equal(again[name], final[name]) for name in final)


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_is_resumed_with_it_averages_what_it_saw(model: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_interval": 1, "keep_checkpoints": 0}
    train(model, tmp_path / "plain", **settings)
    train(model, tmp_path / "late", training_steps=1, **settings)
    train(model, tmp_path / "late", first_step=1, training_steps=3, resume="latest", ema_decay=DECAY, **settings)
    of_steps = [weights(tmp_path / f"plain/checkpoints/step_{step}") for step in (2, 3)]
    for name, found in weights(tmp_path / "late/checkpoints/final_model").items():
        torch.testing.assert_close(found, averaged([each[name] for each in of_steps]).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_is_resumed_without_it_forgets_what_was_kept(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, ema_decay=DECAY, checkpoint_interval=2, training_steps=2)
    train(model, tmp_path, first_step=2, resume="latest", checkpoint_interval=2)
    state = torch.load(tmp_path / "checkpoints/step_4/trainer_state.pt", weights_only=True)
    assert all(moments.keys() == {"step", "exp_avg", "exp_avg_sq"} for moments in state["moments"].values())


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_stops_early_ends_with_it(model: str, tmp_path: Path) -> None:
    api = FakeApi(feed)
    api.evaluations = {1: 0.5, 2: 0.25, 3: 0.25}
    train(
        model, tmp_path, api=api, ema_decay=DECAY, stop_when_flat=1, training_steps=8, checkpoint_interval=1,
        keep_checkpoints=0,
    )  # fmt: skip
    assert rows(tmp_path)[-1]["step"] == 3
    state = torch.load(tmp_path / "checkpoints/step_3/trainer_state.pt", weights_only=True)
    found = weights(tmp_path / "checkpoints/step_3").values()
    averages = [moments["average"] for moments in state["moments"].values()]
    assert all(any(torch.equal(value, average) for average in averages) for value in found)
