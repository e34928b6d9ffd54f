"""Offline data against a float64 computation that shares no code with it: one answer at a time, and autograd through
the formula as the paper has it.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from example_trainer.data.offline import Sides
from example_trainer.data.packing import micro_batches
from example_trainer.loop.learner import Learner
from example_trainer.loop.offline import OfflineData
from example_trainer.loss.metric import values
from example_trainer.loss.offline_gradients import offline_gradients
from example_trainer.model.packed_attention import PACKED_SDPA
from example_trainer.model.policy import Policy
from example_trainer.ranks.ranks import Ranks
from tests.unit.trainer.fakes import made_up_answers, model_folder, tiny_model
from tests.unit.trainer.whole_runs import config

CPU = torch.device("cpu")
SHARE, BETA, EXAMPLES = 0.25, 0.3, 6
TOLERANCE = 2e-5  # relative, of a float32 model to a float64 one
MODEL: dict[str, Any] = {"initializer_range": 0.2}
PACKED: dict[str, dict[str, Any]] = {
    "packed": {"share_prefixes": False},
    "one a pass": {"micro_batch_tokens": 1, "share_prefixes": False},
    "prefixes once": {},
    "small chunks": {"logits_chunk_mb": 1},
}


def learner_of(folder: Path, **settings: Any) -> Learner:
    given = {"offline_data": folder / "config.json", "offline_share": SHARE, "dpo_beta": BETA, "batch_size": 18}
    learner = Learner(config(str(folder), folder, "http://localhost", **given, **settings), CPU, Ranks())
    learner.resolve("")
    learner.load_into(None, str(folder))
    learner.begin("")
    return learner


def logprob(policy: PreTrainedModel, tokens: Sequence[int], trained: Sequence[bool]) -> Tensor:
    """Of the trained tokens of one answer, float64."""
    logits = policy(input_ids=torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1)
    places = [place for place, counts in enumerate(trained) if counts]
    return torch.stack([logits[place - 1, tokens[place]] for place in places])


def sft(policy: PreTrainedModel, start: PreTrainedModel, examples: list[Sides]) -> Tensor:
    return -torch.cat([logprob(policy, side.tokens.tolist(), side.trained.tolist()) for (side,) in examples]).mean()


def dpo(policy: PreTrainedModel, start: PreTrainedModel, examples: list[Sides]) -> Tensor:
    losses = []
    for sides in examples:
        good, bad = (
            logprob(policy, side.tokens.tolist(), side.trained.tolist()).sum()
            - logprob(start, side.tokens.tolist(), side.trained.tolist()).sum().detach()
            for side in sides
        )
        losses.append(-F.logsigmoid(BETA * (good - bad)))
    return torch.stack(losses).mean()


def gradient(model: PreTrainedModel) -> Tensor:
    return torch.cat([each.grad.double().flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize(("naive", "sides"), [(sft, 1), (dpo, 2)])
def test_loss_and_gradient_of_an_update_are_those_of_the_formula(
    tmp_path: Path, naive: Callable[..., Tensor], sides: int, how: str
) -> None:
    """The second update's, whose policy is not the start model any more."""
    learner = learner_of(Path(model_folder(tmp_path / "model", **MODEL)), **PACKED[how])
    examples = made_up_answers(EXAMPLES, sides)
    data = OfflineData(learner, examples)
    assert learner.config.offline_examples == EXAMPLES  # all of them in each update
    data.add_gradient(0)
    learner.clip()
    learner.update(1e-2)
    policy = copy.deepcopy(learner.trained.model).double()
    start = tiny_model(**MODEL).double()
    measured = values(data.add_gradient(1))
    policy.zero_grad(set_to_none=True)
    loss = naive(policy, start, examples)
    (SHARE * loss).backward()
    name = "sft_loss" if sides == 1 else "dpo_loss"
    assert measured[name] == pytest.approx(loss.item(), rel=TOLERANCE)
    assert measured["loss"] == pytest.approx(SHARE * loss.item(), rel=TOLERANCE)
    assert measured["offline_tokens"] == sum(side.trained_tokens for sides in examples for side in sides)
    expected, found = gradient(policy), gradient(learner.trained.model)
    assert (found - expected).norm() <= TOLERANCE * expected.norm()
    assert expected.norm() > 1e-3


def test_a_resumed_run_asks_the_start_model_again(tmp_path: Path) -> None:
    """Its first update compares with the model that the run began with, not with the checkpoint's."""
    folder = Path(model_folder(tmp_path / "model", **MODEL))
    examples = made_up_answers(EXAMPLES, 2)
    learner = learner_of(folder)
    data = OfflineData(learner, examples)
    for update in range(2):
        data.add_gradient(update)
        learner.clip()
        learner.update(1e-2)
    learner.progress.updates = 2
    again = OfflineData(learner, examples)
    assert values(again.add_gradient(2))["dpo_margin"] == pytest.approx(values(data.add_gradient(2))["dpo_margin"])
    assert abs(values(again.add_gradient(2))["dpo_margin"] or 0) > 0.1


def test_the_first_update_of_pairs_is_on_the_way_of_neither(tmp_path: Path) -> None:
    learner = learner_of(Path(model_folder(tmp_path / "model", **MODEL)))
    measured = values(OfflineData(learner, made_up_answers(EXAMPLES, 2)).add_gradient(0))
    assert measured["dpo_loss"] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-6)
    assert measured["dpo_margin"] == pytest.approx(0, abs=1e-6)


def test_what_a_rank_computes_only_to_keep_step_adds_nothing() -> None:
    """Of one sequence and two ranks, the second one's pass is a copy."""
    gradients = []
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        policy = Policy(tiny_model(**MODEL))
        policy.model.set_attn_implementation(PACKED_SDPA)
        batches = micro_batches([made_up_answers(1, 1)[0][0]], 64, CPU, rank, ranks)
        offline_gradients(policy, batches, 2.0)
        gradients.append(gradient(policy.model))
    assert torch.equal(gradients[0], gradients[1])
    assert not gradients[2].any()
