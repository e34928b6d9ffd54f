"""The check of every step, on an exact model without vLLM: what equals, what differs by one bit, and what a strict run
leaves behind.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from example_trainer import grpo, replay
from example_trainer.data.batching import make_batch
from example_trainer.data.packing import micro_batches
from example_trainer.errors import TrainerError
from example_trainer.exact import check
from example_trainer.exact.check import Comparison, Exactness, Mismatch, NotExact, hexadecimal, summary
from example_trainer.exact.functions import attention_gradients
from example_trainer.exact.model import make_exact
from example_trainer.model.loading import load_model
from example_trainer.model.packed_attention import tree_attention
from example_trainer.model.policy import Policy, accumulate_gradients, token_logprobs
from example_trainer.settings.config import TrainerConfig
from tests.unit.trainer import whole_runs
from tests.unit.trainer.fakes import (
    VOCAB,
    FakeApi,
    RecordingBridge,
    as_records,
    gradient_of,
    item,
    model_folder,
    serve,
    tiny_model,
)
from tests.unit.trainer.whole_runs import rows
from vllm_patching.batch_invariant import kernels
from vllm_patching.batch_invariant.switch import NotInvariant
from vllm_patching.compat import vllm_engine  # noqa: F401  loads vLLM, which starts a process, as no test may (tests/marks.py)

SHAPE: dict[str, Any] = dict(
    hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=96
)
MODEL = SHAPE | {"tie_word_embeddings": True}
pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def exact(name: str) -> Any:
    loaded = load_model(name, torch.device("cpu"))
    make_exact(loaded, torch.float32)
    return loaded


def batch_of(items: list[dict[str, Any]]) -> Any:
    return make_batch(as_records(items), seq_len=2048, policy_version=0)


def scored(model: str, seed: int) -> list[dict[str, Any]]:
    """A batch as an exact sampler of `model` would have scored it: each sequence alone."""
    group = item([1.0, 0.0, 0.0, 1.0], seed=seed, policy_versions=[[0, 0]] * 4)
    policy = exact(model)
    for index, sequence in enumerate(batch_of([group]).sequences):
        logprobs = np.asarray(group["inference_logprobs"][index])
        (alone,) = micro_batches([sequence], 1, torch.device("cpu"))
        logprobs[sequence.trained] = token_logprobs(Policy(policy), alone, 1).numpy()
        group["inference_logprobs"][index] = logprobs.tolist()
    return [group]


def config(model: str, folder: Path, url: str = "http://127.0.0.1:1", **changes: Any) -> TrainerConfig:
    one_step: dict[str, Any] = dict(training_steps=1, batch_size=4, warmup_steps=0)
    return whole_runs.config(model, folder, url, **one_step | dict(batch_invariant=True, bit_exact="strict") | changes)


def train(
    model: str, folder: Path, api: FakeApi, bridge: RecordingBridge | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """Metrics rows of a run; the same fake serves the API and, as far as asked, vLLM."""
    with serve(api) as url:
        port = int(url.rpartition(":")[2])
        grpo.run(
            config(model, folder, url, vllm_host="127.0.0.1", vllm_port=port, **changes),
            bridge or RecordingBridge(),
        )
    return rows(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared prefixes"])
def test_packing_does_not_change_a_bit(family: str, dtype: torch.dtype, share: bool) -> None:
    model = tiny_model(family, **SHAPE)
    make_exact(model, dtype)
    # prompts that end inside a page of the cache and behind one
    groups = [item([1.0, 0.0, 2.0, 3.0], seed=3, longest=40), item([1.0, 0.0], seed=4, prompt=45, longest=40)]
    for name in ("tokens", "masks", "inference_logprobs"):  # one answer begins with another
        groups[0][name][1] = [*groups[0][name][0], *groups[0][name][1][-3:]]
    sequences = batch_of(groups).sequences
    alone = micro_batches(sequences, 1, torch.device("cpu"))
    (packed,) = micro_batches(sequences, 10_000, torch.device("cpu"), share=share)
    apart = sorted((one.targets.tolist(), token_logprobs(Policy(model), one, 1).tolist()) for one in alone)
    together = token_logprobs(Policy(model), packed, 8).tolist()
    found, start = [], 0
    for sequence in sequences:
        end = start + sequence.trained_tokens
        found.append((packed.targets[start:end].tolist(), together[start:end]))
        start = end
    assert sorted(found) == apart


@pytest.mark.parametrize("tied", [True, False])
def test_the_padding_tokens_embedding_has_a_gradient_in_plain_and_exact_models(tmp_path: Path, tied: bool) -> None:
    """Chat templates have that token in every prompt."""
    padding = 7
    folder = model_folder(tmp_path, tie_word_embeddings=tied, pad_token_id=padding, **SHAPE)
    group = item([1.0, 0.0], seed=5)
    for tokens in group["tokens"]:
        tokens[1] = padding
    (packed,) = micro_batches(batch_of([group]).sequences, 10_000, torch.device("cpu"))
    gradients = []
    for load in (lambda name: load_model(name, torch.device("cpu")), exact):
        model = load(folder)
        accumulate_gradients(
            Policy(model), packed, lambda logprobs, entropy, chunk: (logprobs * packed.advantages[chunk]).mean(), 8
        )
        gradients.append([gradient_of(parameter) for parameter in model.parameters()])
        assert gradient_of(model.get_input_embeddings().get_parameter("weight"))[padding].any()
    for plain, of_exact in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, of_exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.0, VOCAB // 2), (1.3, VOCAB // 2)], ids=lambda value: f"{value:g}"
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared prefixes"])
def test_gradients_are_those_of_the_model_in_float64(family: str, share: bool, temperature: float, top_k: int) -> None:
    model, reference = tiny_model(family, **SHAPE), tiny_model(family, **SHAPE).double()
    reference.config._experts_implementation = "eager"  # the grouped product takes no float64
    make_exact(model, torch.float32)
    sequences = [
        replace(each, temperature=temperature, top_k=top_k)
        for each in batch_of([item([1.0, 0.0], seed=5, longest=60)]).sequences
    ]
    (packed,) = micro_batches(sequences, 10_000, torch.device("cpu"))
    (computed,) = micro_batches(sequences, 10_000, torch.device("cpu"), share=share)
    accumulate_gradients(
        Policy(model), computed, lambda logprobs, entropy, chunk: (logprobs * packed.advantages[chunk]).mean(), 8
    )
    pieces = zip(packed.input_ids[0].split(packed.lengths), strict=False)
    logits = torch.cat([reference(input_ids=piece[None]).logits[0] for (piece,) in pieces])[packed.rows] / temperature
    if top_k:
        dropped = (logits < logits.topk(top_k).values[:, -1:]).scatter(1, packed.targets[:, None], False)
        logits = logits.masked_fill(dropped, -torch.inf)
    (logits.log_softmax(-1).gather(1, packed.targets[:, None])[:, 0] * packed.advantages.double()).mean().backward()
    found = torch.cat([gradient_of(parameter).flatten().double() for parameter in model.parameters()])
    expected = torch.cat([gradient_of(parameter).flatten() for parameter in reference.parameters()])
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_one_bit_is_found_and_shown() -> None:
    sampler = torch.tensor([-0.5, -1.25, -3.0])
    ours = sampler.clone()
    ours[1] = torch.nextafter(ours[1], torch.tensor(0.0))
    comparison = Comparison()
    comparison.add(torch.tensor([7, 8]), sampler[:2], ours[:2])
    comparison.add(torch.tensor([9]), sampler[2:], ours[2:])
    assert summary(comparison.row()) == "Bitwise identical: False · 1 / 3 tokens differ"
    assert comparison.row()["bit_exact/max_abs_diff"] == 2**-23
    (line,) = comparison.table().splitlines()[1:]
    assert line.split() == ["1", "8", "-1.2500000000", "-1.2499998808", "bfa00000", "bf9fffff", "1.192e-07"]


def test_zeros_of_both_signs_differ_by_a_bit() -> None:
    comparison = Comparison()
    ours = torch.tensor([-0.0, -1.0, -2.0])
    comparison.add(torch.tensor([1, 2, 3]), torch.tensor([0.0, -1.0, -2.0]), ours)
    assert comparison.row()["bit_exact/differing_tokens"] == 1
    assert hexadecimal(ours[0]) in comparison.table()


def test_a_strict_run_trains_on_exact_batches_and_says_so(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = scored(model, seed=1)
    (row,) = train(model, tmp_path, FakeApi(lambda n: batch))
    tokens = row["trained_tokens"]
    assert (row["bit_exact/differing_tokens"], row["bit_exact/tokens"], row["bit_exact/max_abs_diff"]) == (
        0,
        tokens,
        0.0,
    )
    assert row["ratio_mean"] == 1.0
    assert row["ratio_tokens_different"] == 0
    assert row["logprob_diff_max"] == 0
    assert f"Bitwise identical: True · 0 / {tokens} tokens differ" in capsys.readouterr().out


def test_a_step_without_a_signal_compares_nothing_and_says_so(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = train(model, tmp_path, FakeApi(lambda n: [item([1.0, 1.0])]))
    assert (row["bit_exact/differing_tokens"], row["bit_exact/tokens"], row["bit_exact/max_abs_diff"], row["loss"]) == (
        0,
        0,
        None,
        None,
    )
    assert "Bitwise identical: nothing to compare · 0 / 0 tokens differ" in capsys.readouterr().out


def test_one_changed_rounding_in_a_kernel_is_caught_located_and_replayed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = scored(model, seed=1)
    silu = kernels.silu

    def silu_with_one_value_rounded_up(x: torch.Tensor) -> torch.Tensor:
        result = silu(x)
        result[..., 0] = torch.nextafter(result[..., 0], torch.full_like(result[..., 0], torch.inf))
        return result

    monkeypatch.setattr(kernels, "silu", silu_with_one_value_rounded_up)
    with pytest.raises(NotExact, match=r"step 1: \d+ of \d+ tokens differ \(--bit-exact strict\)"):
        train(model, tmp_path, FakeApi(lambda n: batch))
    shown = capsys.readouterr().out
    assert "Bitwise identical: False" in shown
    assert "hex" in shown

    kept = tmp_path / "logs" / "bit_exact_step_1" / "batch.pt"
    assert replay.main([str(kept)]) == 1
    again = capsys.readouterr().out
    assert again.splitlines()[-3:] == shown.splitlines()[-3:]  # the same tokens, the same bits
    monkeypatch.setattr(kernels, "silu", silu)
    assert replay.main([str(kept)]) == 0
    assert "Bitwise identical: True" in capsys.readouterr().out


def test_the_same_seed_and_a_resumed_run_give_the_same_bytes(model: str, tmp_path: Path) -> None:
    def run(name: str, first: int = 0, fail_at: int | None = None, **changes: Any) -> list[dict[str, Any]]:
        api = FakeApi(lambda n: [item([1.0, 0.0, 0.0, 1.0], seed=10 + first + n)])
        bridge = RecordingBridge(fail_at=fail_at)
        settings: dict[str, Any] = dict(
            training_steps=4, checkpoint_interval=2, bit_exact="report", mismatch_limit=100, bridge=bridge
        )
        return train(model, tmp_path / name, api, **settings | changes)

    once, twice = run("once"), run("twice")
    with pytest.raises(KeyboardInterrupt):
        run("resumed", fail_at=4)
    resumed = run("resumed", first=2, resume="latest")
    golden = (tmp_path / "once/checkpoints/final_model/model.safetensors").read_bytes()
    for name, written in (("twice", twice), ("resumed", resumed)):
        assert (tmp_path / name / "checkpoints/final_model/model.safetensors").read_bytes() == golden
        for expected, row in zip(once, written, strict=True):
            assert {key: value for key, value in row.items() if key != "time" and not key.endswith("_s")} == {
                key: value for key, value in expected.items() if key != "time" and not key.endswith("_s")
            }


def test_a_run_gone_wrong_stops_without_the_mode_too(model: str, tmp_path: Path) -> None:
    with pytest.raises(NotExact, match=r"nats on average \(--mismatch-limit 0.001\): vLLM serves other weights"):
        train(
            model,
            tmp_path,
            FakeApi(lambda n: [item([1.0, 0.0])]),
            batch_invariant=False,
            bit_exact="report",
            mismatch_limit=1e-3,
        )


def test_a_run_that_agreed_once_ends_well_after_a_batch_without_tokens(model: str, tmp_path: Path) -> None:
    settings = {"model_name": model, "save_path": tmp_path, "mismatch_limit": 0.1}
    config = TrainerConfig.model_validate(settings)
    loaded, batch = load_model(model, torch.device("cpu")), batch_of([item([1.0, 0.0])])

    def judged(*differences: float, before: str | None = "") -> Exactness:
        exactness = Exactness(config, "float32", config.kernels, before)
        for step, difference in enumerate(differences):
            comparison = Comparison()
            if difference >= 0:  # else nothing is compared
                comparison.add(torch.tensor([1]), torch.tensor([-1.0]), torch.tensor([-1.0 - difference]))
            with contextlib.suppress(Mismatch):
                exactness.judge(comparison, step=step, batch=batch, model=loaded)
        return exactness

    judged(0.0, -1.0, 1.0).expect_agreement()
    with pytest.raises(Mismatch, match="step 1"):
        judged(-1.0, 1.0).expect_agreement()

    judged(1.0, before=judged(0.0).mismatch).expect_agreement()  # resumed
    judged(0.0, before=judged(1.0).mismatch).expect_agreement()
    with pytest.raises(Mismatch, match="step 0"):
        judged(before=judged(1.0).mismatch).expect_agreement()


def test_what_is_not_covered_is_refused_by_name(model: str, tmp_path: Path) -> None:
    api = FakeApi(lambda n: None)
    api.batch_invariant = False
    with pytest.raises(TrainerError, match="was started without it"):
        train(model, tmp_path, api)
    with pytest.raises(NotInvariant, match="does not cover tensor parallelism over 4 ranks"):
        make_exact(tiny_model(), torch.float32, tp_size=4)
    with pytest.raises(NotInvariant, match="does not cover rotary embedding 'dynamic'"):
        make_exact(
            tiny_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), torch.float32
        )
    with pytest.raises(ValueError, match="needs --batch-invariant"):
        config(model, tmp_path, batch_invariant=False)
    with pytest.raises(ValueError, match="does not cover LoRA adapters"):
        config(model, tmp_path, weight_bridge_mode="lora_only")
    odd = tiny_model()
    odd.lm_head = torch.nn.Bilinear(1, 1, 1)
    with pytest.raises(NotInvariant, match="does not cover layers of type Bilinear"):
        make_exact(odd, torch.float32)


def test_sequences_survive_being_kept() -> None:
    sequence, *_ = batch_of([item([1.0, 0.0])]).sequences
    found = check.sequence_from(check._tensors(sequence))
    assert np.array_equal(found.tokens, sequence.tokens)
    assert found.temperature == sequence.temperature


@pytest.mark.parametrize(("staleness", "sampled_at", "warns"), [(0, 0.7, True), (0, 1.0, False), (1, 0.7, False)])
def test_log_probabilities_of_another_sampling_are_warned_of_at_staleness_0(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, staleness: int, sampled_at: float, warns: bool
) -> None:
    """The environment sampled at `sampled_at`, and its groups say temperature 1."""
    group = item([1.0, 0.0, 0.0, 1.0], seed=5, policy_versions=[[0, 0]] * 4)
    sequences = batch_of([group | {"generation_params": {"temperature": sampled_at}}]).sequences
    policy, comparison = Policy(load_model(model, torch.device("cpu"))), Comparison()
    for packed in micro_batches(sequences, 64, torch.device("cpu")):
        sampler = token_logprobs(policy, packed, 8)
        ours = token_logprobs(policy, replace(packed, temperatures=torch.ones_like(packed.temperatures)), 8)
        comparison.add(packed.targets, sampler, ours)
    settings = config(model, tmp_path, batch_invariant=False, bit_exact="report")
    judge = Exactness(settings, "float32", "torch")
    batch = make_batch(as_records([group]), seq_len=2048, policy_version=staleness)
    for step in (1, 2):  # once
        judge.judge(comparison, step, batch, policy.model)
    found = [record for record in caplog.records if "at staleness 0" in record.message]
    assert len(found) == warns
    assert all("temperature, top_p or top_k that its groups do not report" in record.message for record in found)


@pytest.mark.parametrize(
    ("lengths", "parents"),
    [
        ((20, 33, 7), (-1, -1, -1)),
        ((20, 33, 7), (-1, 0, 1)),
        ((17, *range(3, 25, 3), 11, 5, 24), (-1, *[0] * 8, -1, 9, 9)),  # two prompts with answers, as a quickstart has
        ((50, 100, 100, 90, 120), (-1, 0, 0, 0, 0)),  # more than are multiplied at once
    ],
)
def test_repeatable_gradients_of_attention_are_those_of_its_formula_whatever_the_threads(
    lengths: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    """Of sequences, and of segments that continue others; four heads share two of keys."""
    scale = 0.2
    draw = torch.Generator().manual_seed(1)
    query, grad = (torch.randn(4, sum(lengths), 32, generator=draw) for _ in range(2))
    key, value = (torch.randn(2, sum(lengths), 32, generator=draw) for _ in range(2))
    queries, keys, values = (each.double()[None].requires_grad_() for each in (query, key, value))
    output = tree_attention(queries, keys, values, lengths, parents, scale)
    expected = torch.autograd.grad(output, (queries, keys, values), grad.double()[None])
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(attention_gradients(query, key, value, grad, lengths, parents, scale))
    finally:
        torch.set_num_threads(threads)
    for one, other, right in zip(*found, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, right[0].float(), rtol=0, atol=2e-5)


def test_repeatable_gradients_of_attention_do_not_depend_on_what_else_is_in_the_row() -> None:
    lengths, parents = (17, 24, 3, 15), (-1, 0, 0, 0)
    draw = torch.Generator().manual_seed(2)
    own, other = sum(lengths), 40
    query, grad = (torch.randn(9, other + own, 64, generator=draw) for _ in range(2))
    key, value = (torch.randn(3, other + own, 64, generator=draw) for _ in range(2))
    queries, keys, values, grads = (each[:, other:] for each in (query, key, value, grad))
    alone = attention_gradients(queries, keys, values, grads, lengths, parents, 0.125)
    moved = tuple(parent if parent < 0 else parent + 1 for parent in parents)
    beside = attention_gradients(query, key, value, grad, (other, *lengths), (-1, *moved), 0.125)
    for one, both in zip(alone, beside, strict=True):
        assert torch.equal(one, both[:, other:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_one_file_run_compares_with_a_start_model_that_is_exact_too(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from example_trainer import simple_rl

    compared: list[Any] = []

    def accumulate(*given: Any) -> NoReturn:
        compared.extend(given[:2])
        raise ZeroDivisionError("no step is taken")

    monkeypatch.setattr(simple_rl, "start_vllm", lambda *given: None)
    monkeypatch.setattr(simple_rl, "sample", lambda *given: [])
    monkeypatch.setattr(simple_rl, "accumulate", accumulate)
    monkeypatch.setattr("example_trainer.model.loading.load_tokenizer", lambda name: object())
    settings = {"model": model_folder(tmp_path / "model", **MODEL), "out": tmp_path / "out", "dtype": dtype}
    with pytest.raises(ZeroDivisionError):
        simple_rl.train(simple_rl.SimpleConfig.model_validate(settings | {"kl_coef": 0.1}))
    group = [simple_rl.Rollout([1, 2, 3], [*range(length)], torch.zeros(length), 0.0, 0.0) for length in (5, 40)]
    of_policy, of_start = (simple_rl.answer_logprobs(model, group, 1.0)[0] for model in compared)
    assert torch.equal(of_policy, of_start)
