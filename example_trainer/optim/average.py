"""The exponential moving average of the weights over a run's updates (--ema-decay), with which the run ends.

    update t ──▶ weights w_t ──▶ average of w_1 ... w_t, in which w_i counts decay^(t - i)      in the optimizer's state
    last step ────────────────▶ weights = average

The weights of a late step wander with the few groups that it trained on; their average wanders less (Polyak and
Juditsky 1992, https://doi.org/10.1137/0330046). Its bias towards the first value is corrected as that of Adam's moments
is (Kingma and Ba 2015, arXiv 1412.6980, section 3): without that, w_1 would be an eighth of it after 20 updates at 0.9.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from example_trainer.optim.bf16_masters import MasteredParameter, exact_value, write_back
from example_trainer.ranks.partition import local

AVERAGE = "average"  # of a parameter, in its optimizer's state; float32
AVERAGED = "averaged"  # of how many values it is; fewer than the steps where a run was resumed with --ema-decay


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Have `optimizer` add what each step made of a parameter to its average, which begins with the first step
    that it sees. It lies where the moments do.
    """

    @torch.no_grad()
    def follow(*_: object) -> None:
        for parameter, state in optimizer.state.items():
            if AVERAGE in state:
                average = local(state[AVERAGE])
                count = int(state.get(AVERAGED, state["step"] - 1)) + 1  # checkpoints did not always have it
                average.lerp_(local(parameter).to(average), (1 - decay) / (1 - decay**count))
            else:
                count = 1
                state[AVERAGE] = _beside(state.get("exp_avg", parameter))
                local(state[AVERAGE]).copy_(local(parameter))
            state[AVERAGED] = torch.tensor(float(count))

    optimizer.register_step_post_hook(follow)


def drop_average(optimizer: Optimizer) -> None:
    """Forget the average that a checkpoint had."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
        state.pop(AVERAGED, None)


def _beside(moment: Tensor) -> Tensor:
    return torch.empty_like(moment, dtype=torch.float32, pin_memory=local(moment).is_pinned(), requires_grad=False)


@torch.no_grad()
def take_average(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """Give the parameters, and their masters, the values of their averages; those never stepped stay."""
    for parameter in parameters:
        exact = exact_value(parameter)
        if (average := optimizer.state.get(exact, {}).get(AVERAGE)) is not None:
            local(exact).copy_(local(average))
        if isinstance(parameter, MasteredParameter):
            write_back([parameter])
