"""Packing: which sequences share a row, and what a row holds."""

import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from example_trainer.data.batching import Sequence, make_batch
from example_trainer.data.packing import fed_length, micro_batches, pack, with_old_logprobs
from example_trainer.model.loading import ModelError, check_packed_forward, load_model, meta_model
from example_trainer.model.packed_attention import PACKED_SDPA
from example_trainer.model.policy import Policy, token_logprobs, trained_hidden
from tests.unit.trainer.fakes import VOCAB, as_records, item, tiny_model

CPU = torch.device("cpu")
FP32_SUMS = 1e-4  # float32 sums in another order, on logits up to about 10


def make_sequence(length: int, trained: list[int], **fields: Any) -> Sequence:
    """A sequence of `length` tokens that trains those at the places `trained`."""
    values: dict[str, Any] = dict(
        tokens=np.arange(length),
        trained=np.isin(np.arange(length), trained),
        sampler_logprobs=np.full(length, -0.5, np.float32),
        advantages=np.ones(length, np.float32),
        reference_logprobs=None,
        temperature=1.0,
    )
    return Sequence(**values | fields)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 80))
def test_every_sequence_is_packed_once_within_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(len(members) == 1 or sum(lengths[i] for i in members) <= budget for members in bins)
    fills = [sum(lengths[i] for i in members) for members in bins]
    # no two neighbours would fit in one
    assert all(first + second > budget for first, second in itertools.pairwise(fills))


@given(st.data())
def test_rows_select_exactly_the_trained_tokens(data: st.DataObject) -> None:
    sequences = []
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(2, 20))
        trained = np.array(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
        trained[0] = False
        trained[1] |= not trained.any()
        values = np.arange(length, dtype=np.float32)
        tokens = np.array(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length)))
        sequences.append(Sequence(tokens, trained, -values, values, None, 1.0))
    batches = micro_batches(sequences, data.draw(st.integers(1, 40)), CPU)

    found = []
    for batch in batches:
        assert sum(batch.lengths) == batch.input_ids.shape[1] == batch.position_ids.shape[1]
        starts = np.cumsum((0, *batch.lengths))
        for row, target, logprob, advantage in zip(
            batch.rows, batch.targets, batch.sampler_logprobs, batch.advantages, strict=True
        ):
            position = int(batch.position_ids[0, row]) + 1
            assert row - batch.position_ids[0, row] in starts
            assert -logprob == advantage == position
            found.append((position, int(target)))
    expected = [
        (int(at), int(sequence.tokens[at])) for sequence in sequences for at in np.flatnonzero(sequence.trained)
    ]
    assert sorted(found) == sorted(expected)


def test_tokens_behind_the_last_trained_one_are_not_fed() -> None:
    sequence = make_sequence(6, [2, 3])
    assert fed_length(sequence) == 3
    assert micro_batches([sequence], 100, CPU)[0].input_ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, None),
        ({"top_p": 0.9}, {}, ([0, 0, 0], [0.9, 0.9, 1.0])),
        ({}, {"top_p": 0.9}, ([0, 0, 0], [1.0, 1.0, 0.9])),
        ({"top_k": 5}, {}, ([5, 5, 0], [1.0, 1.0, 1.0])),
        ({"top_k": 5, "top_p": 0.5}, {"top_k": 7, "top_p": 0.7}, ([5, 5, 7], [0.5, 0.5, 0.7])),
    ],
    ids=["neither", "top_p of the first alone", "top_p of the second alone", "top_k alone", "both"],
)
def test_each_trained_token_has_the_truncation_of_its_sampler(
    first: dict[str, Any], second: dict[str, Any], expected: tuple[list[int], list[float]] | None
) -> None:
    (batch,) = micro_batches([make_sequence(4, [2, 3], **first), make_sequence(3, [2], **second)], 100, CPU)
    if expected is None:
        assert batch.truncation is None
        return
    assert batch.truncation is not None
    top_ks, top_ps = batch.truncation
    assert (top_ks.tolist(), top_ps.dtype) == (expected[0], torch.float32)
    assert top_ps.tolist() == pytest.approx(expected[1])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_recomputed_log_probabilities_go_back_to_their_tokens_from_whichever_rank_had_them(ranks: int) -> None:
    lengths = [9, 3, 14, 6, 2, 11, 5]
    sequences = [make_sequence(length, list(range(length // 2, length))) for length in lengths]
    batches = [batch for rank in range(ranks) for batch in micro_batches(sequences, 12, CPU, rank, ranks)]
    column = torch.cat([-batch.targets.float() for batch in batches if batch.counted])
    found = with_old_logprobs(sequences, column.numpy(), 12, ranks)
    for sequence, with_old in zip(sequences, found, strict=True):
        assert with_old.old_logprobs is not None
        assert (with_old.old_logprobs[sequence.trained] == -sequence.tokens[sequence.trained]).all()
    (again,) = micro_batches(found, 100, CPU)
    assert torch.equal(again.old_logprobs, -again.targets.float())
    assert torch.equal(again.sampler_logprobs, torch.full_like(again.old_logprobs, -0.5))


def test_each_trained_token_has_the_settings_of_its_sequence() -> None:
    reference = np.array([0.0, -1.0, -2.0, -3.0], np.float32)
    (batch,) = micro_batches(
        [
            make_sequence(4, [1, 3], temperature=0.5, reference_logprobs=reference),
            make_sequence(3, [1], temperature=2.0),
        ],
        100,
        CPU,
    )
    assert batch.temperatures.tolist() == [0.5, 0.5, 2.0]
    assert batch.reference_logprobs[:2].tolist() == [-1.0, -3.0]
    assert batch.reference_logprobs[2].isnan()
    assert (batch.lengths, batch.rows.tolist(), batch.targets.tolist()) == ((3, 1), [0, 2, 3], [1, 3, 1])


def test_a_row_is_filled_to_the_last_token_and_no_further() -> None:
    assert pack([3, 3, 2], 6) == [[0, 1], [2]]
    assert pack([3, 4, 2], 6) == [[1, 2], [0]]
    assert pack([7, 1], 6) == [[0], [1]]  # a longer one goes alone


def packed_and_plain(model: PreTrainedModel, folder: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    model.save_pretrained(folder)
    packed, plain = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=name)
        for name in (PACKED_SDPA, "eager")
    )
    return packed, plain


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3", {}),
    ],
)
def test_packed_logits_equal_each_sequence_alone(family: str, changes: dict[str, Any], tmp_path: Any) -> None:
    packed, plain = packed_and_plain(tiny_model(family, **changes), tmp_path)
    batch = make_batch(
        as_records([item([1.0, 0.0, 0.5], longest=20), item([0.0, 1.0], seed=7)]),
        seq_len=64,
        policy_version=0,
    )
    (row,) = micro_batches(batch.sequences, 1000, CPU)
    found = packed.get_output_embeddings()(trained_hidden(packed, row))
    expected = [
        plain(input_ids=torch.tensor(r.tokens)[None]).logits[0][np.flatnonzero(r.trained) - 1] for r in batch.sequences
    ]
    torch.testing.assert_close(found, torch.cat(expected), rtol=FP32_SUMS, atol=FP32_SUMS)


@torch.no_grad()
def test_a_model_with_packed_attention_still_does_plain_padded_and_cached_calls(tmp_path: Any) -> None:
    packed, plain = packed_and_plain(tiny_model("qwen3"), tmp_path)
    tokens = torch.arange(1, 13).view(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    torch.testing.assert_close(
        packed(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=FP32_SUMS, atol=FP32_SUMS
    )
    padded, expected = (model(input_ids=tokens, attention_mask=mask).logits for model in (packed, plain))
    torch.testing.assert_close(padded[mask.bool()], expected[mask.bool()], rtol=FP32_SUMS, atol=FP32_SUMS)
    generated = [
        cast(Any, model).generate(tokens[:1], max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()
        for model in (packed, plain)
    ]
    assert generated[0] == generated[1]


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model("llama")
        model.set_attn_implementation(PACKED_SDPA)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        (row,) = micro_batches(
            make_batch(as_records([item([1.0, 0.0])]), seq_len=64, policy_version=0).sequences,
            1000,
            CPU,
        )
        trained_hidden(model, row).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.base_model.parameters()])
    for without, with_checkpointing in zip(*gradients, strict=True):
        torch.testing.assert_close(without, with_checkpointing)


def test_logprobs_without_gradient_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.set_attn_implementation(PACKED_SDPA)
    (row,) = micro_batches(
        make_batch(as_records([item([1.0, 0.0])]), seq_len=64, policy_version=0).sequences,
        1000,
        CPU,
    )
    whole = token_logprobs(Policy(model), row, 128)
    pairs = [slice(start, min(start + 2, len(whole))) for start in range(0, len(whole), 2)]
    monkeypatch.setattr("example_trainer.model.policy._chunks", lambda rows, head, chunk_mb: pairs)
    torch.testing.assert_close(token_logprobs(Policy(model), row, 128), whole)


def test_an_architecture_with_attention_functions_of_its_own_is_refused(tmp_path: Path) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    FalconForCausalLM(config).save_pretrained(tmp_path)
    reason = "cannot be trained with packed sequences: its architecture has attention functions of its own"
    for load in (lambda: load_model(str(tmp_path), CPU), lambda: meta_model(str(tmp_path))):
        with pytest.raises(ModelError, match=reason):
            load()


def test_an_architecture_that_reshapes_its_logits_is_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=1.0,
        attn_logit_softcapping=None,
        initializer_range=0.3,
    )
    model = Gemma2ForCausalLM(config)
    model.set_attn_implementation(PACKED_SDPA)
    with pytest.raises(
        ModelError, match="Gemma2ForCausalLM cannot be trained with packed sequences: its logits differ"
    ):
        check_packed_forward(Policy(model), CPU)
    config.attn_logit_softcapping = 50.0
    model = Gemma2ForCausalLM(config)
    model.set_attn_implementation(PACKED_SDPA)
    with pytest.raises(ModelError, match="softcap"):
        check_packed_forward(Policy(model), CPU)
