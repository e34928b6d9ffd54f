"""On-policy distillation: what the two terms are estimates of, and what they teach. Their formulas are checked in
test_objective_oracle.py.
"""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from atroposlib.wire.batching import GroupRequirements
from example_trainer.data.batching import make_batch
from example_trainer.data.packing import micro_batches
from example_trainer.loss import forward_kl
from example_trainer.loss.batch_gradients import batch_gradients
from example_trainer.loss.metric import values
from example_trainer.model.packed_attention import PACKED_SDPA
from example_trainer.model.policy import Policy, of_tokens
from example_trainer.settings.loss import LossSettings
from tests.unit.trainer.fakes import VOCAB, as_records, item, tiny_model

CPU = torch.device("cpu")
Group = dict[str, Any]


@cache
def model(seed: int) -> PreTrainedModel:
    made = tiny_model(seed=seed).double()
    made.set_attn_implementation(PACKED_SDPA)
    return made


def log_distributions(policy: PreTrainedModel, sequences: list[list[int]], temperature: float = 1.0) -> Tensor:
    """At every position but the last, of the token that follows, [sequences, length, vocab]."""
    logits: Tensor = policy(input_ids=torch.tensor(sequences)).logits.double()
    return (logits / temperature).log_softmax(-1)


def gradient_of(policy: PreTrainedModel) -> Tensor:
    return torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])


def needs(settings: LossSettings) -> GroupRequirements:
    return GroupRequirements(trainable_only=True, teacher_top_k=settings.teacher_top_k)


# --- the sampled form is an estimate of the exact KL's gradient -------------------------------------------------------

PROMPT, BATCHES, ANSWERS = [5, 6, 7], 50, 16
TEMPERATURE = 0.8


def exact_gradient(student: PreTrainedModel, teacher: PreTrainedModel) -> Tensor:
    """That of the mean KL over the two positions of all answers, each as likely as the student makes it. The tokens
    before a position are as they were sampled.
    """
    policy = copy.deepcopy(student)
    second = [[*PROMPT, first] for first in range(VOCAB)]
    of_policy = log_distributions(policy, second, TEMPERATURE)[:, -2:]  # position of the first token, of the second
    with torch.no_grad():
        of_teacher = log_distributions(teacher, second)[:, -2:]
        likely = of_policy[0, 0].exp()  # of each first token
    kls = (of_policy.exp() * (of_policy - of_teacher)).sum(-1)
    ((kls[0, 0] + (likely * kls[:, 1]).sum()) / 2).backward()
    return gradient_of(policy)


def sampled_gradients() -> Tensor:
    """Of batches that the student has sampled, [batches, parameters]."""
    student, teacher = model(0), model(7)
    generator = torch.Generator().manual_seed(3)
    second = [[*PROMPT, first] for first in range(VOCAB)]
    with torch.no_grad():
        of_student = log_distributions(student, second, TEMPERATURE)[:, -2:]
        of_teacher = log_distributions(teacher, second)[:, -2:]
    settings = LossSettings(distill_coef=1.0, reward_coef=0.0)
    found = []
    for _ in range(BATCHES):
        group: Group = item([0.0] * ANSWERS)
        for name in ("tokens", "masks", "inference_logprobs", "distill_token_ids", "distill_logprobs"):
            group[name] = []
        group["generation_params"] = {"temperature": TEMPERATURE}
        for _ in range(ANSWERS):
            first = int(torch.multinomial(of_student[0, 0].exp(), 1, generator=generator))
            then = int(torch.multinomial(of_student[first, 1].exp(), 1, generator=generator))
            answer = [first, then]
            own = [of_student[0, 0, first].item(), of_student[first, 1, then].item()]
            theirs = [of_teacher[0, 0, first].item(), of_teacher[first, 1, then].item()]
            group["tokens"].append(PROMPT + answer)
            group["masks"].append([-100] * len(PROMPT) + answer)
            group["inference_logprobs"].append([1.0] * len(PROMPT) + own)
            group["distill_token_ids"].append([[]] * len(PROMPT) + [[token] for token in answer])
            group["distill_logprobs"].append([[]] * len(PROMPT) + [[each] for each in theirs])
        batch = make_batch(as_records([group]), seq_len=64, policy_version=0, loss=settings, needs=needs(settings))
        assert not batch.rejected
        policy = copy.deepcopy(student)
        batch_gradients(
            Policy(policy), micro_batches(batch.sequences, 1000, CPU), settings, loss_divisor=batch.loss_divisor
        )
        found.append(gradient_of(policy))
    return torch.stack(found)


def standard_errors_off(found: Tensor, exact: Tensor) -> Tensor:
    """How many standard errors the mean lies from the exact gradient, along it and along random directions."""
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(12, len(exact), generator=generator, dtype=torch.float64)
    directions = torch.cat([exact[None], directions * exact.abs()])  # of the parameters that matter
    along = found @ directions.T
    return torch.div(along.mean(0) - directions @ exact, along.std(0) / len(found) ** 0.5)


def test_sampled_reverse_kl_has_the_exact_kls_gradient_within_three_standard_errors() -> None:
    exact, sampled = exact_gradient(model(0), model(7)), sampled_gradients()
    off = standard_errors_off(sampled, exact)
    assert off.abs().max() < 3, off
    # the test can tell: half of it is far off, and so is its opposite
    assert standard_errors_off(0.5 * sampled, exact)[0] < -6
    assert standard_errors_off(-sampled, exact)[0] < -12


# --- what a teacher's distribution teaches ----------------------------------------------------------------------------

NAMED = 40


def taught(teacher: Tensor, group: Group) -> Group:
    """The group with a teacher of these log-probabilities, [sequences, length, vocab]."""
    ids: list[Any] = [[[]] for _ in group["tokens"]]
    logprobs: list[Any] = [[[]] for _ in group["tokens"]]
    for index, tokens in enumerate(group["tokens"]):
        for own, row in zip(tokens[1:], teacher[index], strict=False):
            named = [own, *(each for each in row.topk(NAMED).indices.tolist() if each != own)]
            ids[index].append(named)
            logprobs[index].append(row[named].tolist())
    return group | {"distill_token_ids": ids, "distill_logprobs": logprobs}


def states() -> Group:
    generator = torch.Generator().manual_seed(0)
    group = item([0.0] * 4)
    group["tokens"] = torch.randint(1, VOCAB, (4, 7), generator=generator).tolist()
    group["masks"] = [[-100] * 4 + tokens[4:] for tokens in group["tokens"]]
    group["inference_logprobs"] = [[1.0] * 4 + [-1.0] * 3] * 4
    return group


def entropy_of(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


def after_lessons(flatter: float, lessons: int = 80) -> tuple[Tensor, Tensor, Tensor, list[float], float]:
    """Distributions at the trained positions of a student before and after, and of its teacher, which is the student
    with logits divided by `flatter`; the KL to it in each step, and the norm of the first gradient.
    """
    group, student = states(), copy.deepcopy(model(0)).float()
    with torch.no_grad():
        before = log_distributions(student, group["tokens"])[:, 3:-1]
        teacher = log_distributions(student, group["tokens"], flatter)
    settings = LossSettings(distill_coef=1.0, reward_coef=0.0, distill="forward_kl", distill_top_k=NAMED)
    batch = make_batch(
        as_records([taught(teacher, group)]), seq_len=64, policy_version=0, loss=settings, needs=needs(settings)
    )
    optimizer, kls, norm = torch.optim.SGD(student.parameters(), lr=0.3, momentum=0.9), [], 0.0
    for _ in range(lessons):
        rows = micro_batches(batch.sequences, 1000, CPU)
        measured = values(batch_gradients(Policy(student), rows, settings, loss_divisor=batch.loss_divisor))
        norm = norm or gradient_of(student).norm().item()
        optimizer.step()
        optimizer.zero_grad()
        assert measured["loss"] == pytest.approx(measured["teacher_kl"])
        kls.append(measured["teacher_kl"] or 0.0)
    with torch.no_grad():
        return before, log_distributions(student, group["tokens"])[:, 3:-1], teacher[:, 3:-1], kls, norm


@pytest.mark.parametrize("flatter", [1.5, 0.7], ids=["a teacher that only raises entropy", "one that only lowers it"])
def test_the_teachers_entropy_is_learned_and_nothing_else(flatter: float) -> None:
    """A sum over the teacher's tokens as a reward of the sampled one would raise entropy, whatever the teacher says."""
    before, after, teacher, kls, _ = after_lessons(flatter)
    gap = (entropy_of(teacher) - entropy_of(before)).mean()
    learned = (entropy_of(after) - entropy_of(before)).mean()
    assert (gap > 0) == (flatter > 1)
    assert 0.95 < learned / gap < 1.05
    assert kls[-1] < 0.05 * kls[0]
    assert min(kls) >= 0
    assert (after.argmax(-1) == before.argmax(-1)).all()  # what the student says stays
    distance = [(teacher.exp() * (teacher - each)).sum(-1).mean() for each in (after, before)]
    assert distance[0] < 0.15 * distance[1]  # over the whole vocabulary, the tokens that it does not name included


def test_a_student_equal_to_its_teacher_learns_nothing() -> None:
    *_, kls, norm = after_lessons(1.0, lessons=1)
    assert abs(kls[0]) < 1e-6
    assert norm < 1e-4 * after_lessons(1.5, lessons=1)[-1]


# --- what the policy gives the named tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 12.0], ids=["broad", "so peaked that the rest is rounding"])
@pytest.mark.parametrize("truncated", [False, True], ids=["every token", "top-k and top-p"])
def test_forward_kl_of_logits_has_the_gradient_of_its_formula(scale: float, truncated: bool) -> None:
    torch.manual_seed(0)
    logits = scale * torch.randn(5, 11)
    targets, temperatures = torch.tensor([1, 0, 10, 4, 4]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7])
    truncation = (torch.tensor([3, 0, 0, 5, 0]), torch.tensor([1.0, 0.9, 1.0, 0.8, 1.0])) if truncated else None
    named = torch.stack([targets, (targets + 3) % 11, (targets + 4) % 11, targets], 1)  # the last one fills the row
    teacher = torch.randn(5, 11).log_softmax(-1).gather(1, named)
    teacher[:, 3] = -1e4
    weights = torch.rand(3, 5)

    ours = logits.clone().requires_grad_()
    logprobs, entropy, of_named = of_tokens(ours * 1, targets, temperatures, truncation, named)
    assert of_named is not None
    kl = forward_kl.token_loss(*of_named, teacher)
    (weights[0] * kl + weights[1] * logprobs + weights[2] * entropy).sum().backward()

    alone = logits.clone().requires_grad_()
    plain = of_tokens(alone * 1, targets, temperatures, truncation)
    (weights[1] * plain[0] + weights[2] * plain[1]).sum().backward()
    exact = logits.double().requires_grad_()
    all_logprobs = (exact / temperatures[:, None]).log_softmax(-1)
    of_three = named[:, :3]
    others = torch.ones(5, 11, dtype=torch.bool).scatter_(1, of_three, False)
    rest = torch.stack([row[each].logsumexp(0) for row, each in zip(all_logprobs, others, strict=True)])
    expected = forward_kl.token_loss(all_logprobs.gather(1, of_three), rest, teacher[:, :3].double())
    (weights[0] * expected).sum().backward()

    assert torch.equal(logprobs, plain[0])
    assert torch.equal(entropy, plain[1])
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-5)
    assert ours.grad is not None
    assert alone.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close((ours.grad - alone.grad).double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_a_teacher_that_names_the_whole_vocabulary_gives_the_whole_kl() -> None:
    torch.manual_seed(0)
    logits, teacher = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6).log_softmax(-1)
    named = torch.arange(6).expand(4, 6)
    _, _, of_named = of_tokens(logits, named[:, 0], torch.ones(4), None, named)
    assert of_named is not None
    loss = forward_kl.token_loss(*of_named, teacher)
    loss.sum().backward()
    now = logits.detach().log_softmax(-1)
    torch.testing.assert_close(loss.detach(), (teacher.exp() * (teacher - now)).sum(-1))
    torch.testing.assert_close(logits.grad, now.exp() - teacher.exp(), rtol=1e-4, atol=1e-5)


def test_forward_kl_is_never_negative_and_zero_for_equal_policies() -> None:
    torch.manual_seed(0)
    logits, teacher = 3 * torch.randn(200, 50), 3 * torch.randn(200, 50)
    named = teacher.topk(5).indices
    for of_teacher, least in ((teacher, 0.01), (logits, -1e-6)):
        _, _, of_named = of_tokens(logits, named[:, 0], torch.ones(200), None, named)
        assert of_named is not None
        kl = forward_kl.token_loss(*of_named, of_teacher.log_softmax(-1).gather(1, named))
        assert kl.min() >= least
        assert kl.max() < 1e-5 or least > 0
