"""Every objective and correction against a float64 computation that shares no code with it: one sequence, one token at
a time, and autograd through the formula as the paper has it.

The model computes in float64 here, so that only the trainer's own arithmetic, in float32, is in the difference.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from atroposlib.wire.batching import GroupRequirements
from example_trainer.data.batching import Batch, make_batch
from example_trainer.data.packing import micro_batches
from example_trainer.loss.batch_gradients import batch_gradients
from example_trainer.loss.metric import values
from example_trainer.model.packed_attention import PACKED_SDPA
from example_trainer.model.policy import Policy
from example_trainer.settings.loss import LossSettings
from example_trainer.settings.objectives import PRESETS, Algorithm
from tests.unit.trainer.fakes import as_records, item, tiny_model

CPU = torch.device("cpu")
ORACLE = 1e-5  # relative, of float32 losses to float64 ones
INVARIANT = 1e-6
SEQ_LEN = 40
NUMBERS = {"llama": 0, "reference": 9, "teacher": 7}
NAMED = 5  # tokens that the teacher names at each position, beside the sampled one

Group = dict[str, Any]
Figures = dict[str, float]
Rows = list[Tensor]  # of each sequence, a value for each of its sampled tokens

CORRECTED: dict[str, dict[str, Any]] = {
    "truncated": {"importance": "truncate", "importance_bounds": (0.5, 1.2)},
    "masked": {"importance": "mask", "importance_bounds": (0.8, 1.2)},
    "sequences truncated": {
        "ratio": "sequence_sum",  # the one in the loss, which is bounded
        "importance": "truncate",
        "importance_level": "sequence",
        "importance_bounds": (0.1, 1.5),
    },
    "sequences masked": {"importance": "mask", "importance_level": "sequence", "importance_bounds": (0.6, 1.8)},
    "off-policy sequences masked": {"off_policy_mask": 0.05},
    "both masks": {"importance": "mask", "importance_bounds": (0.8, 1.2), "off_policy_mask": 0.05},
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in PRESETS},
    "a constant of its own": {"algorithm": "dr_grpo", "loss_constant": 7},
    "sum, mean over sequences": {"ratio": "sequence_sum", "loss_mean": "sequence"},
    "sum, mean over tokens": {"ratio": "sequence_sum", "clip_eps_high": 0.5},
    "mean, mean over tokens": {"ratio": "sequence_mean", "clip_eps": 0.05},
    "sum, cispo": {"ratio": "sequence_sum", "objective": "cispo"},
    "narrow dual clip": {"dual_clip": 1.3, "clip_eps": 0.1},
    "narrow log-ratios": {"log_ratio_limit": 0.3, "clip_eps": 0.5, "dual_clip": 0},
    "cispo, clipped below": {"algorithm": "cispo", "clip_eps": 0.1, "clip_eps_high": 0.15},
    **{
        f"{kind} in the {place}": {"kl": kind, "kl_in": place, "kl_coef": 0.1}
        for kind in ("k1", "k2", "k3")
        for place in ("loss", "reward")
    },
    "entropy": {"entropy_coef": 0.01, "loss_mean": "sequence"},
    "teacher, sampled tokens": {"distill_coef": 0.3},
    "teacher's tokens alone": {"distill_coef": 0.3, "reward_coef": 0.0, "loss_mean": "sequence"},
    "teacher in cispo, less reward": {"algorithm": "cispo", "distill_coef": 1.0, "reward_coef": 0.5},
    "teacher in gspo": {"algorithm": "gspo", "distill_coef": 0.3},
    "teacher, near": {"distill_coef": 0.3, "log_ratio_limit": 0.5, "dual_clip": 0, "clip_eps": 0.5},
    "teacher, masked": {"distill_coef": 0.3, "importance": "mask", "importance_bounds": (0.8, 1.2)},
    "teacher's distribution": {"distill_coef": 0.3, "distill": "forward_kl", "distill_top_k": NAMED},
    "teacher's distribution alone": {
        "distill_coef": 2.0,
        "distill": "forward_kl",
        "distill_top_k": NAMED,
        "reward_coef": 0.0,
        "kl_coef": 0.1,
    },
    "teacher's distribution, dr_grpo": {
        "algorithm": "dr_grpo",
        "distill_coef": 1.0,
        "distill": "forward_kl",
        "distill_top_k": NAMED,
    },
    **CORRECTED,
    "gspo, sequences masked": {"algorithm": "gspo"} | CORRECTED["sequences masked"],
}
RECOMPUTED = {f"recomputed, {name}": settings for name, settings in CORRECTED.items()}


@cache
def model(name: str = "llama", family: str = "llama") -> PreTrainedModel:
    made = tiny_model(family, seed=NUMBERS[name]).double()
    made.set_attn_implementation(PACKED_SDPA)
    return made


def naive_logprobs(policy: PreTrainedModel, group: Group, entropies: Rows | None = None) -> Rows:
    rows = []
    for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
        logits = policy(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        places = [place for place, target in enumerate(mask) if target != -100]
        rows.append(torch.stack([logits[place - 1, tokens[place]] for place in places]))
        if entropies is not None:
            entropies.append(torch.stack([-(logits[place - 1].exp() * logits[place - 1]).sum() for place in places]))
    return rows


@cache
def groups() -> list[Group]:
    """Answers whose sampler is near the policy, and one token each that it found much likelier and much less likely.
    The second group's first two sequences are one rollout; the third has no signal. The fourth's first
    tokens are sampled from a prompt of one.
    """
    made = [
        item([1.0, 0.0, 0.0, 0.25], seed=1),
        item([2.0, 2.0, -1.0, 0.5], seed=3, rollouts=[0, 0, 1, 2]),
        item([0.5, 0.5], seed=2),
        item([1.0, 0.0], seed=4, prompt=1, overrides=[{"set_advantage_to_zero": True}, {}]),
    ]
    generator = np.random.default_rng(5)
    for group in made:
        with torch.no_grad():
            now = naive_logprobs(model(), group)
        for index, row in enumerate(now):
            drift = generator.normal(0, 0.25, len(row))
            drift[:1] = {0: 2.0, 1: -2.0, 2: 3.0}.get(index, 0.1)
            drift[1:2] = 0.22 if index == 0 else drift[1:2]  # between the upper clips of grpo and dapo
            near = np.minimum(row.numpy() - drift, 0.0)
            sampled = [place for place, target in enumerate(group["masks"][index]) if target != -100]
            for place, value in zip(sampled, near, strict=True):
                group["inference_logprobs"][index][place] = float(np.float32(value))
    return made


def log_distributions(policy: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Log-probabilities of all tokens at each position but the first, [length - 1, vocab]."""
    with torch.no_grad():
        logits: Tensor = policy(input_ids=torch.tensor([tokens])).logits[0, :-1]
    return logits.double().log_softmax(-1)


def with_teacher(group: Group, teacher: PreTrainedModel, top_k: int) -> Group:
    """The group with the likeliest tokens of a teacher at each position, the position's own first."""
    ids: list[Any] = []
    logprobs: list[Any] = []
    for tokens in group["tokens"]:
        ids.append([[]])
        logprobs.append([[]])
        for own, row in zip(tokens[1:], log_distributions(teacher, tokens), strict=True):
            likeliest = row.topk(top_k).indices.tolist() if top_k else []
            named = [own, *(each for each in likeliest if each != own)]
            ids[-1].append(named)
            logprobs[-1].append([float(np.float32(row[each])) for each in named])
    return group | {"distill_token_ids": ids, "distill_logprobs": logprobs}


@cache
def taught_groups(top_k: int) -> list[Group]:
    return [with_teacher(group, model("teacher"), top_k) for group in groups()]


def batch_of(settings: LossSettings, recomputed: bool) -> Batch:
    needs = GroupRequirements(trainable_only=True, teacher_top_k=settings.teacher_top_k)
    of_run = groups() if needs.teacher_top_k is None else taught_groups(needs.teacher_top_k)
    batch = make_batch(as_records(of_run), seq_len=SEQ_LEN, loss=settings, policy_version=0, needs=needs)
    if not recomputed:
        return batch
    sequences = [
        replace(each, old_logprobs=each.sampler_logprobs + old_drift(len(each.tokens))) for each in batch.sequences
    ]
    return replace(batch, sequences=sequences)


def old_drift(length: int) -> Any:
    """Recomputed less sampler's log-probabilities of a sequence of that length; large, so that bounds act."""
    return np.float32(0.4) * np.sin(np.arange(length, dtype=np.float32) + length)


# --- the oracle -------------------------------------------------------------------------------------------------------


def naive_advantages(group: Group, how: str) -> list[float]:
    rollouts = group.get("rollouts") or list(range(len(group["scores"])))
    scores = dict(zip(rollouts, group["scores"], strict=True))
    values = list(scores.values())
    mean = sum(values) / len(values)
    found = {}
    for rollout, score in scores.items():
        if how == "rloo":
            found[rollout] = score - (sum(values) - score) / (len(values) - 1)
        else:
            deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) + 1e-4
            found[rollout] = (score - mean) / (deviation if how == "group_std" else 1.0)
    silenced = [bool(each.get("set_advantage_to_zero")) for each in group["overrides"] or [{}] * len(rollouts)]
    return [0.0 if silent else found[rollout] for rollout, silent in zip(rollouts, silenced, strict=True)]


def naive_token_loss(ratio: Tensor, logprob: Tensor, advantage: float, s: LossSettings) -> Tensor:
    low, high = 1 - s.clip_eps, 1 + (s.clip_eps if s.clip_eps_high is None else s.clip_eps_high)
    clipped = min(max(ratio.item(), low), high)
    if s.objective == "cispo":
        return -clipped * advantage * logprob
    constant = torch.tensor(clipped * advantage, dtype=torch.float64)
    surrogate = ratio * advantage if ratio.item() * advantage <= clipped * advantage else constant
    if s.dual_clip and advantage < 0 and surrogate.item() < s.dual_clip * advantage:
        surrogate = torch.tensor(s.dual_clip * advantage, dtype=torch.float64)
    return -surrogate


def naive_kl(logprob: Tensor, reference: Tensor, kind: str) -> Tensor:
    gap = reference - logprob
    return {"k1": -gap, "k2": 0.5 * gap**2, "k3": gap.exp() - gap - 1}[kind]


def naive_from_teacher(tokens: list[int], place: int, old: Tensor, s: LossSettings) -> float:
    """What the teacher adds to the advantage of the token at `place`."""
    if not s.distill_coef or s.distill != "reverse_kl":
        return 0.0
    likely = log_distributions(model("teacher"), tokens)[place - 1, tokens[place]]
    return s.distill_coef * limited(likely - old, s.log_ratio_limit).item()


def naive_forward_kl(policy: PreTrainedModel, tokens: list[int], place: int, s: LossSettings) -> Tensor:
    """The KL of the two distributions over each of the named tokens, and all others together, times the weight."""
    if not s.distill_coef or s.distill != "forward_kl":
        return torch.zeros(())
    teacher = log_distributions(model("teacher"), tokens)[place - 1]
    now = policy(input_ids=torch.tensor([tokens])).logits[0, place - 1].double().log_softmax(-1)
    named = {tokens[place], *teacher.topk(NAMED).indices.tolist()}
    others = [each for each in range(len(now)) if each not in named]
    of_teacher = [*(teacher[each].exp() for each in named), teacher[others].exp().sum()]
    of_policy = [*(now[each].exp() for each in named), now[others].exp().sum()]
    kl = torch.stack([p * (p / q).log() for p, q in zip(of_teacher, of_policy, strict=True)]).sum()
    return s.distill_coef * kl


def limited(value: Tensor, limit: float) -> Tensor:
    return value if abs(value.item()) <= limit else torch.tensor(math.copysign(limit, value.item())).double()


def naive_loss(policy: PreTrainedModel, s: LossSettings, recomputed: bool) -> Tensor:
    """The loss of the batch, from the formulas of docs/trainer.md."""
    rollouts = 0
    tokens = sum(target != -100 for group in groups() for mask in group["masks"] for target in mask)
    total = torch.zeros((), dtype=torch.float64)
    for group in groups():
        ids = group.get("rollouts") or list(range(len(group["scores"])))
        rollouts += len(set(ids))
        entropies: Rows = []
        now_rows = naive_logprobs(policy, group, entropies)
        with torch.no_grad():
            reference_rows = naive_logprobs(model("reference"), group)
        sizes = {each: sum(len(row) for row, of in zip(now_rows, ids, strict=True) if of == each) for each in ids}
        for index, (now, reference) in enumerate(zip(now_rows, reference_rows, strict=True)):
            mask = group["masks"][index]
            places = [place for place, target in enumerate(mask) if target != -100]
            sampler = torch.tensor([group["inference_logprobs"][index][place] for place in places]).double()
            drift = torch.tensor(old_drift(len(mask))[places]).double()
            old = sampler + drift if recomputed else sampler
            advantage = naive_advantages(group, s.advantage)[index]
            gone = (sampler - now).mean().item()
            of_sequence = {
                "token": None,
                "sequence_mean": (now - old).mean(),
                "sequence_sum": (now - old).sum(),
            }[s.ratio]
            for t in range(len(now)):
                log_ratio = now[t] - old[t] if of_sequence is None else of_sequence
                if s.distill_coef and of_sequence is not None:  # GSPO-token, for advantages of tokens
                    log_ratio = of_sequence.detach() + now[t] - now[t].detach()
                earned = s.reward_coef * advantage
                earned += naive_from_teacher(group["tokens"][index], places[t], old[t], s)
                if s.kl_coef and s.kl_in == "reward":
                    earned -= s.kl_coef * naive_kl(old[t], reference[t], s.kl).item()
                loss = naive_token_loss(limited(log_ratio, s.log_ratio_limit).exp(), now[t], earned, s)
                weigh = (old - sampler) if recomputed else (now - sampler).detach()
                weight = math.exp(weigh[t].item() if s.importance_level == "token" else weigh.sum().item())
                low, high = s.importance_bounds
                if s.importance == "truncate":
                    loss = loss * (min(weight, high) if recomputed else min(weight, high) / weight)
                if s.importance == "mask":
                    loss = loss * ((weight if recomputed else 1.0) if low <= weight <= high else 0.0)
                if s.off_policy_mask and advantage < 0 and gone > s.off_policy_mask:
                    loss = loss * 0.0
                if s.kl_coef and s.kl_in == "loss":
                    loss = loss + s.kl_coef * naive_kl(now[t], reference[t], s.kl)
                loss = loss + naive_forward_kl(policy, group["tokens"][index], places[t], s)
                loss = loss - s.entropy_coef * entropies[index][t]
                total = total + loss / (sizes[ids[index]] if s.loss_mean == "sequence" else 1)
    constant = rollouts * (s.loss_constant or SEQ_LEN)
    return torch.div(total, {"token": tokens, "sequence": rollouts, "constant": constant}[s.loss_mean])


# --- against it -------------------------------------------------------------------------------------------------------


def gradient_of(policy: PreTrainedModel) -> Tensor:
    return torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])


def ours(
    settings: LossSettings, recomputed: bool = False, budget: int = 30, share: bool = False
) -> tuple[Figures, Tensor]:
    policy = copy.deepcopy(model())
    batch = batch_of(settings, recomputed)
    reference = Policy(model("reference")) if settings.kl_coef else None
    figures = values(
        batch_gradients(
            Policy(policy),
            micro_batches(batch.sequences, budget, CPU, share=share),
            settings,
            reference=reference,
            loss_divisor=batch.loss_divisor,
        )
    )
    return {key: value for key, value in figures.items() if value is not None}, gradient_of(policy)


@pytest.mark.parametrize("share", [False, True], ids=["alone", "shared prefixes"])
@pytest.mark.parametrize("name", [*CASES, *RECOMPUTED])
def test_loss_and_gradient_are_those_of_the_formulas(name: str, share: bool) -> None:
    recomputed, settings = name in RECOMPUTED, LossSettings(**(CASES | RECOMPUTED)[name])
    figures, gradient = ours(settings, recomputed, share=share)
    twin = copy.deepcopy(model())
    expected = naive_loss(twin, settings, recomputed)
    expected.backward()
    # of the losses, not of their sum, which may be near zero
    assert figures["loss"] == pytest.approx(expected.item(), rel=ORACLE, abs=ORACLE / 10)
    wanted = gradient_of(twin)
    assert wanted.norm() > 1e-3
    assert (gradient - wanted).norm() <= ORACLE * wanted.norm()
    plain = gradient_of_the_default()
    assert name == "grpo" or (gradient - plain).norm() > 100 * ORACLE * plain.norm()  # else it tests nothing


@cache
def gradient_of_the_default() -> Tensor:
    return ours(LossSettings())[1]


def of_three_rows(rows: int, head: Any, chunk_mb: int) -> Iterator[slice]:
    return (slice(start, min(start + 3, rows)) for start in range(0, rows, 3))


@pytest.mark.parametrize("name", CASES)
def test_packing_and_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LossSettings(**CASES[name])
    whole, whole_gradient = ours(settings, budget=10_000)
    monkeypatch.setattr("example_trainer.model.policy._chunks", of_three_rows)
    parts, gradient = ours(settings, budget=30)
    assert parts == pytest.approx(whole, rel=INVARIANT, abs=INVARIANT)
    assert (gradient - whole_gradient).norm() <= INVARIANT * whole_gradient.norm()


def tell_sampler(group: Group, rows: Rows) -> None:
    """Let the sampler's log-probabilities be these."""
    for row, mask, into in zip(rows, group["masks"], group["inference_logprobs"], strict=True):
        places = [place for place, target in enumerate(mask) if target != -100]
        for place, value in zip(places, row.tolist(), strict=True):
            into[place] = value


# --- what bounds are for ----------------------------------------------------------------------------------------------


def planted(nats: float, **settings: Any) -> tuple[Figures, Tensor]:
    """A sampler that is this very policy, but finds one token with a negative advantage `nats` less likely."""
    made = [item([1.0, 0.0, 0.0, 1.0], seed=seed, longest=40) for seed in range(8)]
    policy = copy.deepcopy(model())
    for group in made:
        with torch.no_grad():
            rows = naive_logprobs(policy, group)
        tell_sampler(group, rows)
    made[3]["inference_logprobs"][1][4] -= nats
    loss = LossSettings(**settings)
    needs = GroupRequirements(trainable_only=True, teacher_top_k=loss.teacher_top_k)
    if needs.teacher_top_k is not None:
        made = [with_teacher(group, model("teacher"), needs.teacher_top_k) for group in made]
        made[5]["distill_logprobs"][1][4][0] = -1e4  # impossible, to the teacher
    batch = make_batch(as_records(made), seq_len=64, loss=loss, policy_version=0, needs=needs)
    assert batch.trained_tokens > 500
    figures = values(batch_gradients(Policy(policy), micro_batches(batch.sequences, 200, CPU), loss))
    return {key: value for key, value in figures.items() if value is not None}, gradient_of(policy)


@cache
def clean_gradient() -> Tensor:
    return planted(0.0)[1]


@pytest.mark.parametrize("changes", [{}, *({"algorithm": name} for name in ("dr_grpo", "dapo", "rloo"))], ids=str)
@pytest.mark.parametrize("nats", [5.0, 10.0, 100.0])
def test_a_token_that_the_sampler_saw_differently_does_not_turn_the_gradient(
    nats: float, changes: dict[str, Any]
) -> None:
    figures, gradient = planted(nats, **changes)
    assert torch.nn.functional.cosine_similarity(gradient, clean_gradient(), dim=0) >= 0.99
    assert figures["ratio_capped_frac"] > 0
    assert figures["ratio_max"] == pytest.approx(math.exp(min(nats, 20.0)), rel=1e-4)


def test_without_bounds_it_does() -> None:
    gradient = planted(10.0, dual_clip=0)[1]
    assert torch.nn.functional.cosine_similarity(gradient, clean_gradient(), dim=0) < 0.5


@pytest.mark.parametrize("name", [name for name, settings in CASES.items() if "kl_coef" not in settings])
def test_a_hundred_nats_are_finite_in_every_case(name: str) -> None:
    figures, gradient = planted(100.0, **CASES[name])
    assert all(map(math.isfinite, figures.values())), figures
    assert gradient.isfinite().all()


def test_the_bounds_change_no_bit_of_ordinary_tokens() -> None:
    (figures, gradient), (unbounded, expected) = planted(0.5), planted(0.5, dual_clip=0, log_ratio_limit=80)
    assert figures == unbounded
    assert torch.equal(gradient, expected)


def test_objectives_agree_where_the_sampler_is_the_policy_and_lengths_are_equal() -> None:
    made = [item([1.0, 0.0, 0.0, 1.0], seed=seed, prompt=3, longest=1) for seed in range(3)]
    for group in made:
        tell_sampler(group, naive_logprobs(model(), group))
    found = []
    algorithms: list[Algorithm] = ["grpo", "gspo", "cispo"]
    for name in algorithms:
        policy, loss = copy.deepcopy(model()), LossSettings(algorithm=name)
        batch = make_batch(as_records(made), seq_len=64, loss=loss, policy_version=0)
        batch_gradients(Policy(policy), micro_batches(batch.sequences, 100, CPU), loss, loss_divisor=batch.loss_divisor)
        found.append(gradient_of(policy))
    assert found[0].norm() > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-7)


def test_k1_in_the_reward_is_k2_in_the_loss_where_the_sampler_is_the_policy() -> None:
    """Liu et al. 2025, arXiv 2510.01555."""
    group = item([1.0, 0.0, 0.5], seed=5)
    tell_sampler(group, naive_logprobs(model(), group))
    found = []
    for loss in (LossSettings(kl="k1", kl_in="reward", kl_coef=0.3), LossSettings(kl="k2", kl_coef=0.3)):
        policy = copy.deepcopy(model())
        batch = make_batch(as_records([group]), seq_len=64, loss=loss, policy_version=0)
        rows = micro_batches(batch.sequences, 100, CPU)
        batch_gradients(Policy(policy), rows, loss, reference=Policy(model("reference")))
        found.append(gradient_of(policy))
    assert (found[0] - found[1]).norm() <= ORACLE * found[0].norm()


def test_figures_count_what_the_corrections_did() -> None:
    plain = ours(LossSettings())[0]
    assert "importance_masked_frac" not in plain
    masked = ours(LossSettings(**CORRECTED["masked"]))[0]["importance_masked_frac"]
    both = ours(LossSettings(**CORRECTED["both masks"]))[0]["importance_masked_frac"]
    assert 0.1 < masked < both < 0.9
    wide = LossSettings(importance="mask", importance_bounds=(0.0, 1e9))
    assert ours(wide)[0]["importance_masked_frac"] == 0
    assert torch.equal(ours(wide)[1], ours(LossSettings())[1])


def test_the_table_of_the_documentation_has_the_presets() -> None:
    page = (Path(__file__).parents[4] / "docs" / "trainer.md").read_text()
    for name, preset in PRESETS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        settings = LossSettings.model_validate({"algorithm": name})
        for value in (settings.advantage, settings.ratio, settings.objective, settings.loss_mean):
            assert f"`{value}`" in row, (name, value)
        assert f"{settings.clip_eps:g}" in row
        assert f"{settings.clip_high:g}" in row
        assert all(getattr(settings, key) == value for key, value in preset.items())
