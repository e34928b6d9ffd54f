"""The trainer's loss and gradient against a float64 computation that shares no code with it: one sequence, one token
at a time.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from atroposlib.envs.payloads import group_items
from example_trainer.data.batching import make_batch
from example_trainer.data.packing import micro_batches
from example_trainer.loss.batch_gradients import batch_gradients
from example_trainer.loss.metric import values
from example_trainer.model.packed_attention import PACKED_SDPA
from example_trainer.model.policy import Policy, of_tokens, token_logprobs
from example_trainer.settings.loss import LossSettings
from tests.unit.trainer.fakes import as_records, item, tiny_model

CPU = torch.device("cpu")
FP32_RELATIVE = 2e-5  # float32 forward and backward of a two-layer model against float64


def items() -> list[dict[str, Any]]:
    return [
        item([1.0, 0.0, 0.0, 0.25], seed=1),
        item([0.0, 0.0], seed=2),
        item([-1.0, 2.0], seed=3, generation_params={"temperature": 0.7}),
        item([1.0, 0.0], seed=4, overrides=[{"set_advantage_to_zero": True}, {"temperature": 1.3}]),
    ]


def temperature(group: dict[str, Any], index: int) -> float:
    overrides = (group["overrides"] or [{}] * len(group["scores"]))[index]
    return float(overrides.get("temperature", (group["generation_params"] or {}).get("temperature", 1.0)))


def naive_loss(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    groups: list[dict[str, Any]],
    low: float,
    high: float,
    kl: float,
    ent: float,
) -> Tensor:
    """Mean over all sampled tokens, written from the formulas."""
    terms = []
    for group in groups:
        scores = group["scores"]
        mean = sum(scores) / len(scores)
        deviation = (sum((score - mean) ** 2 for score in scores) / len(scores)) ** 0.5
        for index, (tokens, mask) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
            advantage = (scores[index] - mean) / (deviation + 1e-4)
            if group["overrides"] and group["overrides"][index].get("set_advantage_to_zero"):
                advantage = 0.0
            logits = model(input_ids=torch.tensor([tokens])).logits[0] / temperature(group, index)
            reference_logits = reference(input_ids=torch.tensor([tokens])).logits[0].detach() / temperature(
                group, index
            )
            for position in range(1, len(tokens)):
                if mask[position] == -100:
                    continue
                probabilities = logits[position - 1].exp() / logits[position - 1].exp().sum()
                logprob = probabilities[tokens[position]].log()
                ratio = (logprob - group["inference_logprobs"][index][position]).exp()
                bounded = min(max(ratio.item(), 1 - low), 1 + high)
                # the smaller of two candidates, chosen by value; the bounded one is a constant unless it equals the
                # ratio
                surrogate = (
                    ratio * advantage
                    if ratio.item() * advantage <= bounded * advantage
                    else torch.tensor(bounded * advantage)
                )
                entropy = -(probabilities * probabilities.log()).sum()
                gap = torch.log_softmax(reference_logits[position - 1], -1)[tokens[position]] - logprob
                terms.append(-surrogate + kl * (gap.exp() - gap - 1) - ent * entropy)
    return torch.stack(terms).mean()


def float64_twin(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    model.save_pretrained(folder)
    twin: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    return twin


def trained_model(family: str, **changes: Any) -> PreTrainedModel:
    model = tiny_model(family, **changes)
    model.set_attn_implementation(PACKED_SDPA)
    return model


def our_figures(
    model: PreTrainedModel, reference: PreTrainedModel | None, settings: LossSettings, budget: int, chunk_mb: int = 128
) -> dict[str, float | None]:
    batch = make_batch(as_records(items()), seq_len=64, loss=settings, policy_version=0)
    return values(
        batch_gradients(
            Policy(model),
            micro_batches(batch.sequences, budget, CPU),
            settings,
            reference=None if reference is None else Policy(reference),
            chunk_mb=chunk_mb,
            loss_divisor=batch.loss_divisor,
        )
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradient_equal_a_float64_computation(family: str, tied: bool, tmp_path: Any) -> None:
    model, reference = (
        trained_model(family, tie_word_embeddings=tied),
        trained_model(family, seed=9, tie_word_embeddings=tied),
    )
    exact, exact_reference = float64_twin(model, tmp_path / "model"), float64_twin(reference, tmp_path / "reference")
    settings = LossSettings(clip_eps=0.2, clip_eps_high=0.3, dual_clip=0, kl_coef=0.1, entropy_coef=0.01)

    figures = our_figures(model, reference, settings, budget=30)
    expected = naive_loss(exact, exact_reference, items(), 0.2, 0.3, 0.1, 0.01)
    expected.backward()

    assert 0.2 < (figures["ratio_clipped_frac"] or 0) < 0.9  # both branches are in the comparison
    assert figures["loss"] == pytest.approx(expected.item(), rel=FP32_RELATIVE)
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= FP32_RELATIVE * theirs.grad.norm(), name


@pytest.mark.parametrize("scores", [[1.0, 1.0], [0.0, 1.0]], ids=["equal", "different"])
def test_the_penalties_have_their_configured_weights_however_many_groups_have_a_signal(scores: list[float]) -> None:
    groups = [item([1.0, 1.0, 1.0], seed=1), item(scores, seed=2)]
    settings = LossSettings(kl_coef=0.1, entropy_coef=0.01)
    batch = make_batch(as_records(groups), seq_len=64, loss=settings, policy_version=0)
    figures = values(
        batch_gradients(
            Policy(trained_model("llama")),
            micro_batches(batch.sequences, 100, CPU),
            settings,
            reference=Policy(trained_model("llama", seed=9)),
            loss_divisor=batch.loss_divisor,
        )
    )
    loss, policy, kl, entropy = (figures[key] or 0.0 for key in ("loss", "pg_loss", "kl", "entropy"))
    assert kl > 0.1
    assert (policy == 0) == (scores == [1.0, 1.0])
    assert loss == pytest.approx(policy + 0.1 * kl - 0.01 * entropy, rel=1e-6)


def of_three_rows(rows: int, head: Any, chunk_mb: int) -> Iterator[slice]:
    return (slice(start, min(start + 3, rows)) for start in range(0, rows, 3))


def test_gradient_is_the_same_in_one_micro_batch_or_many_and_in_small_logit_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = LossSettings(kl_coef=0.1, entropy_coef=0.01)
    reference = trained_model("llama", seed=9)

    def result(budget: int) -> tuple[dict[str, float | None], list[Tensor]]:
        model = trained_model("llama")
        figures = our_figures(model, reference, settings, budget)
        return figures, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    whole, whole_gradients = result(budget=10_000)
    monkeypatch.setattr("example_trainer.model.policy._chunks", of_three_rows)
    parts, part_gradients = result(budget=1)

    for key, value in whole.items():
        assert parts[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
    for one, many in zip(whole_gradients, part_gradients, strict=True):
        torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-6)


def test_tokens_of_groups_without_a_signal_shrink_the_step_in_proportion() -> None:
    batch = make_batch(as_records(items()), seq_len=64, policy_version=0)

    def gradient(extra_tokens: int) -> Tensor:
        model = trained_model("llama")
        batches = micro_batches(batch.sequences, 10_000, CPU)
        batch_gradients(Policy(model), batches, LossSettings(), loss_divisor=batch.trained_tokens + extra_tokens)
        grad = model.get_output_embeddings().weight.grad
        assert isinstance(grad, Tensor)
        return grad

    alone, as_many_again = gradient(0), gradient(batch.trained_tokens)
    assert alone.abs().max() > 0
    torch.testing.assert_close(as_many_again, alone / 2, rtol=1e-5, atol=0)


def test_reference_logprobs_of_the_environment_replace_the_reference_model() -> None:
    model = trained_model("llama")
    group = item([1.0, 0.0], seed=1)
    group["ref_logprobs"] = [
        [value - 0.5 if value <= 0 else value for value in row] for row in group["inference_logprobs"]
    ]
    expected = []
    for tokens, mask, given in zip(group["tokens"], group["masks"], group["ref_logprobs"], strict=True):
        logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        gaps = [given[at] - logprobs[at - 1, target].item() for at, target in enumerate(mask) if target != -100]
        expected += [math.exp(gap) - gap - 1 for gap in gaps]
    batch = make_batch(as_records([group]), seq_len=64, policy_version=0)
    figures = values(
        batch_gradients(
            Policy(model),
            micro_batches(batch.sequences, 100, CPU),
            LossSettings(kl_coef=0.1),
            reference=Policy(trained_model("llama", seed=9)),
        )
    )
    assert figures["kl"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_given_and_computed_reference_logprobs_mix_in_one_micro_batch() -> None:
    model, reference = trained_model("llama"), trained_model("llama", seed=9)

    def kl(*groups: dict[str, Any]) -> float:
        batch = make_batch(as_records(groups), seq_len=64, policy_version=0)
        figures = values(
            batch_gradients(
                Policy(model),
                micro_batches(batch.sequences, 1000, CPU),
                LossSettings(kl_coef=0.1),
                reference=Policy(reference),
            )
        )
        assert figures["kl"] is not None
        return figures["kl"] * batch.trained_tokens

    computed = item([1.0, 0.0], seed=1)
    given = item([1.0, 0.0], seed=2)
    given["ref_logprobs"] = given["inference_logprobs"]
    assert kl(computed, given) == pytest.approx(kl(computed) + kl(given), rel=1e-5)


def test_mean_of_ratios_is_one_when_the_sampler_was_this_very_policy() -> None:
    model = trained_model("llama")
    group = item([1.0, 0.0, 0.5], seed=5)
    for index, tokens in enumerate(group["tokens"]):
        logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        for position, target in enumerate(group["masks"][index]):
            if target != -100:
                group["inference_logprobs"][index][position] = logprobs[position - 1, target].item()
    batch = make_batch(as_records([group]), seq_len=64, policy_version=0)
    figures = values(batch_gradients(Policy(model), micro_batches(batch.sequences, 100, CPU), LossSettings()))
    assert figures["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert figures["ratio_clipped_frac"] == 0
    assert figures["logprob_diff_max"] == pytest.approx(0, abs=1e-5)
    assert figures["sampler_kl"] == pytest.approx(0.0, abs=1e-6)


def test_truncated_sampling_is_scored_over_the_kept_tokens_alone() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 3, dtype=torch.float32, requires_grad=True)
    targets, ones = torch.tensor([1, 2, 0]), torch.ones(3)
    # top-2; top-p 0.7 keeps 3.0 (0.64) and 2.0; and a token outside the nucleus, which was sampled, so it counts
    truncation = (torch.tensor([2, 0, 0]), torch.tensor([1.0, 0.7, 0.7]))
    logprobs, entropy, _ = of_tokens(logits, targets, ones, truncation)
    first = torch.tensor([3.0, 2.0]).log_softmax(-1)
    assert torch.allclose(logprobs[:2], first)
    assert torch.allclose(logprobs[2], torch.tensor([0.0, 3.0, 2.0]).log_softmax(-1)[0])
    assert torch.allclose(entropy[:2], -(first.exp() * first).sum().expand(2))
    logprobs.sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad[0, [0, 3]], torch.zeros(2))
    assert torch.isfinite(logits.grad).all()


def test_the_staleness_weight_scales_the_loss_and_the_step() -> None:
    def policy_loss_and_gradient(weight: float | None) -> tuple[float, Tensor]:
        model = trained_model("llama")
        group = item([1.0, 0.0], seed=1, group_overrides={"staleness_weight": weight})
        batch = make_batch(as_records([group]), seq_len=64, policy_version=0)
        figures = values(batch_gradients(Policy(model), micro_batches(batch.sequences, 100, CPU), LossSettings()))
        grad = model.get_output_embeddings().weight.grad
        assert isinstance(grad, Tensor)
        assert figures["pg_loss"] is not None
        return figures["pg_loss"], grad

    (loss, gradient), (half, half_gradient) = policy_loss_and_gradient(None), policy_loss_and_gradient(0.5)
    assert loss != 0
    assert half == pytest.approx(loss / 2, rel=1e-6)
    torch.testing.assert_close(half_gradient, gradient / 2)


@pytest.mark.parametrize("settings", [{"top_p": 0.6}, {"top_k": 3}, {"top_p": 0.6, "top_k": 3, "temperature": 0.7}])
def test_a_truncating_sampler_of_this_very_policy_has_ratios_of_one(settings: dict[str, Any]) -> None:
    """From the item's own words to the loss: were the truncation lost on the way, the ratios would be far from 1."""
    model = trained_model("llama")
    group = item([1.0, 0.0, 0.5], seed=5, generation_params=settings)
    for index, tokens in enumerate(group["tokens"]):
        logits = model(input_ids=torch.tensor([tokens])).logits[0].detach() / settings.get("temperature", 1.0)
        for position, target in enumerate(group["masks"][index]):
            if target != -100:
                # the naive nucleus: from the likeliest on, until their sum reaches top_p; the sampled token is one
                ranked = logits[position - 1].argsort(descending=True)[: settings.get("top_k")].tolist()
                sums = logits[position - 1, ranked].softmax(0).cumsum(0)
                kept = ranked[: int((sums < settings.get("top_p", 2.0)).sum()) + 1]
                kept = sorted({*kept, target})
                logprobs = logits[position - 1, kept].log_softmax(0)
                group["inference_logprobs"][index][position] = logprobs[kept.index(target)].item()
    batch = make_batch(as_records([group]), seq_len=64, policy_version=0)
    figures = values(batch_gradients(Policy(model), micro_batches(batch.sequences, 100, CPU), LossSettings()))
    assert figures["logprob_diff_max"] == pytest.approx(0, abs=1e-5)
    assert figures["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
    {"temperature": 1.3, "top_p": 0.5, "top_k": 0},
]


def sampled_by_hand(model: PreTrainedModel, settings: dict[str, Any], random: Any, length: int) -> dict[str, Any]:
    """A sequence of `length` tokens behind a prompt, drawn one at a time in float64, and what an environment records
    of it. The kept tokens: top-k of softmax(logits / T), of these the fewest that hold top-p of their mass.
    """
    tokens, masks, logprobs = [5, 9, 2], [-100] * 3, [1.0] * 3
    for _ in range(length):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].numpy() / settings["temperature"]
        ranked = sorted(range(len(logits)), key=lambda token: -logits[token])
        ranked = ranked[: settings["top_k"]] if settings["top_k"] > 0 else ranked
        weights = [math.exp(logits[token] - logits[ranked[0]]) for token in ranked]
        mass, kept = 0.0, 0
        while kept < len(ranked) and mass < settings["top_p"] * sum(weights):
            mass, kept = mass + weights[kept], kept + 1
        place = random.choices(range(kept), weights[:kept])[0]
        logprobs.append(math.log(weights[place] / mass))
        tokens.append(ranked[place])
        masks.append(ranked[place])
    return {
        "tokens": tokens,
        "masks": masks,
        "scores": float(len(tokens) % 2),
        "inference_logprobs": logprobs,
        "generation_params": settings,
    }


def test_what_each_sequence_was_sampled_with_gives_the_log_probabilities_of_float64() -> None:
    model, random = trained_model("llama"), Random(3)
    oracle = tiny_model("llama").double()
    oracle.load_state_dict(model.state_dict())
    items = [sampled_by_hand(oracle, settings, random, 30 + index) for index, settings in enumerate(SAMPLERS)]
    group = group_items(items)
    assert group["generation_params"] is None  # they differ, so each sequence has its own
    sequences = make_batch(as_records([json.loads(json.dumps(group))]), seq_len=64, policy_version=0).sequences
    (row,) = micro_batches(sequences, 1000, CPU)
    found = token_logprobs(Policy(model), row, 8).double()
    expected = torch.tensor([value for item in items for value in item["inference_logprobs"][3:]], dtype=torch.float64)
    assert len(expected) == sum(30 + index for index in range(len(SAMPLERS)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    plain = token_logprobs(Policy(model), replace(row, truncation=None), 8).double()
    assert (plain - expected).abs().max() > 0.05  # the nucleus matters here
