"""Shared prefixes: what is in the row once, what attention computes of it, and gradients that are those of every
sequence alone.
"""

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from example_trainer.data.batching import Sequence, make_batch
from example_trainer.data.packing import MicroBatch, deal_shared, fed_length, micro_batches, with_old_logprobs
from example_trainer.data.prefixes import PASS, cut, distinct_tokens, lay_out, most_tokens, tree_order
from example_trainer.model import attention_blocks, packed_attention
from example_trainer.model.packed_attention import PACKED_SDPA, packed_sdpa
from example_trainer.model.policy import Policy, accumulate_gradients, token_logprobs
from tests.unit.trainer.fakes import VOCAB, as_records, gradient_of, item, tiny_model

CPU = torch.device("cpu")
FLOAT64 = 1e-12  # the same sums in another order
NORMS = 1e-6  # a float64 model norms and takes logarithms in float32, whose roundings then differ
few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(np.array)  # of two kinds: most begin alike
trees = st.lists(few_tokens, min_size=1, max_size=8)
THREE_LEVELS = [np.array(list(map(int, digits))) for digits in ("0001011", "0001010", "00010", "0011", "1", "00010100")]


def prefixes_of(tokens: list[Any]) -> set[tuple[int, ...]]:
    return {tuple(each[:end].tolist()) for each in tokens for end in range(1, len(each) + 1)}


@given(trees)
@example(THREE_LEVELS)
def test_a_row_has_each_distinct_prefix_once_and_segments_lead_back_to_its_beginning(tokens: list[Any]) -> None:
    row = lay_out(tokens)
    ids = row.gather(tokens)
    assert len(ids) == sum(row.lengths) == len(prefixes_of(tokens))
    starts = np.cumsum((0, *row.lengths))
    for place, expected in zip(row.places, tokens, strict=True):
        assert ids[place].tolist() == expected.tolist()
        segment = int(np.searchsorted(starts, place[-1], "right")) - 1
        path = list(range(starts[segment], place[-1] + 1))
        while (segment := row.parents[segment]) >= 0:
            path = [*range(starts[segment], starts[segment + 1]), *path]
        assert path == place.tolist()
    assert all(parent < segment for segment, parent in enumerate(row.parents))


@given(trees, st.integers(1, 30), st.data())
def test_cuts_compute_as_little_twice_as_any_within_the_budget(
    tokens: list[Any], budget: int, data: st.DataObject
) -> None:
    order, common = tree_order(tokens)
    lengths = [len(tokens[index]) for index in order]
    trained = [data.draw(st.integers(1, length)) for length in lengths]

    def cost(parts: list[range]) -> int:
        return sum(distinct_tokens(lengths, common, part) + PASS for part in parts)

    def fits(part: range) -> bool:
        used = max(distinct_tokens(lengths, common, part), sum(trained[at] for at in part))
        return used <= most_tokens(budget, max(lengths[at] for at in part))

    found = cut(lengths, common, trained, budget)
    assert [at for part in found for at in part] == list(range(len(tokens)))
    assert all(map(fits, found))
    for part in found:
        assert distinct_tokens(lengths, common, part) == len(prefixes_of([tokens[order[at]] for at in part]))
    ways = itertools.product((False, True), repeat=len(tokens) - 1)
    every = [
        [range(a, b) for a, b in itertools.pairwise((0, *(at for at, cuts in enumerate(way, 1) if cuts), len(tokens)))]
        for way in ways
    ]
    assert cost(found) == min(cost(parts) for parts in every if all(map(fits, parts)))


def sequence_of(tokens: Any, trained_from: int = 1) -> Sequence:
    places = np.arange(len(tokens))
    values = -0.1 * places.astype(np.float32)
    return Sequence(tokens, places >= trained_from, values, values, None, 1.0)


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9).map(np.array), min_size=1, max_size=9), st.data())
def test_ranks_get_as_many_rows_and_every_trained_token_once(tokens: list[Any], data: st.DataObject) -> None:
    ranks, budget = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30))
    sequences = [sequence_of(each) for each in tokens]
    shares = [micro_batches(sequences, budget, CPU, rank, ranks, share=True) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    counted = [batch for share in shares for batch in share if batch.counted]
    for batch in counted:
        longest = int(batch.position_ids.max()) + 1
        assert max(batch.input_ids.shape[1], len(batch.rows)) <= most_tokens(budget, longest)
    assert sum(len(batch.counts) for batch in counted) == len(sequences)
    column = torch.cat([-batch.targets - 10.0 * batch.position_ids[0, batch.rows] for batch in counted])
    for found in with_old_logprobs(sequences, column.numpy(), budget, ranks, share=True):
        assert found.old_logprobs is not None
        expected = -found.tokens[1:] - 10.0 * np.arange(len(found.tokens) - 1)
        assert found.old_logprobs[1:].tolist() == expected.tolist()


def test_a_group_stays_together_where_it_fits() -> None:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(2, 90, 300) for _ in range(3)]
    sequences = [sequence_of(np.concatenate([prompt, generator.integers(2, 90, 100)]), 300) for prompt in prompts * 8]
    (dealt,) = deal_shared(sequences, 1, 2048)
    assert sorted(sorted({index % 3 for index in members}) for members in dealt) == [[0], [1], [2]]
    rows = micro_batches(sequences, 2048, CPU, share=True)
    assert [row.input_ids.shape[1] for row in rows] == [300 + 8 * 99] * 3
    assert [len(share) for share in deal_shared(sequences, 2, 2048)] == [2, 2]


def test_thousands_of_short_sequences_are_dealt_to_ranks_in_less_than_a_step() -> None:
    generator = np.random.default_rng(0)
    prompts = generator.integers(2, 90, (256, 20))
    sequences = [sequence_of(np.append(prompts[i // 8], generator.integers(2, 90, 15)), 20) for i in range(2048)]
    start = time.process_time()
    dealt = deal_shared(sequences, 8, 65536)
    assert time.process_time() - start < 2  # seconds; a loop over all pairs of sequences took 4.3
    assert [len(share) for share in dealt] == [1] * 8


@pytest.mark.parametrize(("prompt", "answer", "computed"), [(1900, 100, 4600), (3000, 100, 3800)])
def test_a_prompt_about_as_long_as_the_budget_is_shared(prompt: int, answer: int, computed: int) -> None:
    generator = np.random.default_rng(0)
    question = generator.integers(2, 90, prompt)
    sequences = [sequence_of(np.concatenate([question, generator.integers(2, 90, answer)]), prompt) for _ in range(8)]
    rows = micro_batches(sequences, 2048, CPU, share=True)
    assert sum(row.input_ids.shape[1] for row in rows) == pytest.approx(computed, rel=0.01)


def test_sequences_with_experts_of_their_own_share_nothing() -> None:
    sequences = [sequence_of(np.array([1, 2, 3, last]), 3) for last in (4, 5)]
    (shared,) = micro_batches(sequences, 100, CPU, share=True)
    assert shared.input_ids.tolist() == [[1, 2, 3]]
    sequences[1] = replace(sequences[1], routed_experts=np.ones((3, 2, 1), np.uint16))
    (whole,) = micro_batches(sequences, 100, CPU, share=True)
    assert whole.input_ids.tolist() == [[1, 2, 3, 1, 2, 3]]
    assert whole.parents is None
    assert whole.routing is not None
    assert whole.routing[:, 0, 0].tolist() == [-1, -1, -1, 1, 1, 1]


# --- attention --------------------------------------------------------------------------------------------------------


def naive_attention(
    inputs: tuple[Tensor, Tensor, Tensor], places: list[Any], window: int | None
) -> dict[tuple[int, int], Tensor]:
    """Of each sequence alone, the output of each token [heads, d], by sequence and position."""
    found: dict[tuple[int, int], Tensor] = {}
    for index, place in enumerate(places):
        q, k, v = (tensor[0][:, place] for tensor in inputs)
        k, v = (tensor.repeat_interleave(len(q) // len(k), 0) for tensor in (k, v))
        behind = torch.arange(len(place))[:, None] - torch.arange(len(place))
        seen = (behind >= 0) & (behind < (window or len(place)))
        scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        output = scores.softmax(-1) @ v
        found |= {(index, position): output[:, position] for position in range(len(place))}
    return found


@pytest.mark.parametrize("prices", [(0.0, 0.01), (1e9, 1.0), (3.0, 1.0), (20.0, 0.1)])
@settings(max_examples=25, deadline=None)
@given(tokens=trees, window=st.none() | st.integers(1, 9))
@example(tokens=THREE_LEVELS, window=None)
@example(tokens=THREE_LEVELS, window=2)
@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_attention_and_its_gradients_are_those_of_each_sequence_alone(
    prices: tuple[float, float], as_on_gpu: bool, tokens: list[Any], window: int | None
) -> None:
    row = lay_out(tokens)
    size = sum(row.lengths)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, size, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    inputs = query, key, value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "CALL", prices[0])
        patch.setattr(attention_blocks, "COPIED", prices[1])
        patch.setattr(attention_blocks, "knows_causal_contexts", lambda device: as_on_gpu)
        attention_blocks.attention_blocks.cache_clear()
        output, _ = packed_sdpa(
            torch.nn.Identity(),
            query,
            key,
            value,
            None,
            sliding_window=window,
            packed_lengths=row.lengths,
            packed_parents=row.parents,
        )
        blocks = attention_blocks.attention_blocks(row.lengths, row.parents, window, CPU, torch.float64)
        attention_blocks.attention_blocks.cache_clear()
    assert [block.start for block in blocks] == [0, *(block.end for block in blocks)][:-1]
    kept = [block for block in blocks if not block.recomputed]
    assert sum(blocks[at].size for block in kept for at in block.context) <= size
    weights = torch.randn(len(tokens), 9, 4, 4, dtype=torch.float64)  # [sequence, position, heads, d]
    naive = naive_attention(inputs, row.places, window)
    ours = {(at, position): output[0, row.places[at][position]] for at, position in naive}
    for at, value in naive.items():
        assert (ours[at] - value).abs().max() < FLOAT64
    found, expected = (torch.stack([(weights[at] * each[at]).sum() for at in naive]).sum() for each in (ours, naive))
    for one, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert (one - other).abs().max() < FLOAT64


@pytest.mark.parametrize(("prompt", "answers"), [(1900, [2] * 64), (1000, [100] * 8), (17, [20] * 8), (64, [1] * 30)])
def test_few_copies_of_contexts_are_kept_and_few_scores_wasted(prompt: int, answers: list[int]) -> None:
    lengths, parents = (prompt, *answers), (-1, *[0] * len(answers))
    blocks = attention_blocks.attention_blocks(lengths, parents, None, CPU, torch.float32)
    kept = [block for block in blocks if not block.recomputed]
    assert sum(blocks[at].size for block in kept for at in block.context) <= sum(lengths)
    scores = sum(block.size * (block.size + sum(blocks[at].size for at in block.context)) for block in blocks)
    needed = prompt**2 + sum(answer * (prompt + answer) for answer in answers)
    assert scores < 1.5 * needed + 30_000


def test_long_answers_to_a_long_prompt_are_computed_apart_and_short_ones_together() -> None:
    long = attention_blocks.attention_blocks((500, 400, 400), (-1, 0, 0), None, CPU, torch.float32)
    assert [(block.size, block.context) for block in long] == [(500, ()), (400, (0,)), (400, (0,))]
    short = attention_blocks.attention_blocks((500, 3, 3, 2), (-1, 0, 0, 2), None, CPU, torch.float32)
    assert [(block.size, block.context) for block in short] == [(500, ()), (8, (0,))]


def test_a_long_answer_to_a_short_prompt_is_computed_with_it_again_instead_of_under_a_mask() -> None:
    def blocks(prompt: int, window: int | None = None) -> list[tuple[bool, bool]]:
        row = (prompt, 1000, 900), (-1, 0, 0)
        found = attention_blocks.attention_blocks(*row, window, CPU, torch.float32)
        return [(block.mask is None, block.is_square) for block in found]

    assert blocks(17) == blocks(17, window=1017) == [(True, False), (True, True), (True, True)]
    assert blocks(17, window=950) == [(True, False), (False, False), (True, True)]
    assert blocks(700) == [(True, False), (False, False), (False, False)]


def test_a_gpu_needs_no_mask_for_an_answer_behind_its_prompt() -> None:
    def masks(device: torch.device, answer: int) -> list[bool]:
        lengths = (500, answer, answer)
        blocks = attention_blocks.attention_blocks(lengths, (-1, 0, 0), None, device, torch.float32)
        return [block.mask is not None for block in blocks]

    gpu = torch.device("cuda")  # nothing is put there
    assert [masks(gpu, answer) for answer in (400, 3)] == [[False, False, False]] * 2
    assert [masks(CPU, answer) for answer in (400, 3)] == [[False, True, True], [False, True]]


def test_without_a_mask_the_last_query_sees_every_key() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, size, 8) for heads, size in ((4, 3), (2, 7), (2, 7)))
    mask = torch.ones(3, 7, dtype=torch.bool).tril(4)
    expected = packed_attention._attention([query], [key], [value], mask, None)
    torch.testing.assert_close(packed_attention._attention([query], [key], [value], None, None), expected)


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window_size: tuple[int, int],
    **other: Any,
) -> Tensor:
    """What FlashAttention's call for sequences of many lengths computes, [T, heads, d]."""
    assert window_size == (-1, 0)  # causal, the last query seeing all keys
    sizes = [list(itertools.pairwise(ends.tolist())) for ends in (cu_seq_q, cu_seq_k)]
    assert [max(end - start for start, end in each) for each in sizes] == [max_q, max_k]
    found = []
    for asked, seen in zip(*sizes, strict=True):
        parts = (tensor[slice(*at)].transpose(0, 1) for tensor, at in ((query, asked), (key, seen), (value, seen)))
        q, k, v = (tensor.repeat_interleave(query.shape[1] // tensor.shape[0], 0) for tensor in parts)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        found.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(0, 1))
    return torch.cat(found)


@settings(max_examples=50, deadline=None)
@given(tokens=trees)
@example(tokens=THREE_LEVELS)
def test_all_segments_in_one_call_are_each_sequence_alone(tokens: list[Any]) -> None:
    row = lay_out(tokens)
    torch.manual_seed(0)
    size = sum(row.lengths)
    query, key, value = (torch.randn(1, heads, size, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    inputs = query, key, value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "varlen_attn", one_by_one)
        patch.setattr(packed_attention, "_takes_varlen", lambda query: True)
        output, _ = packed_sdpa(
            torch.nn.Identity(), *inputs, None, packed_lengths=row.lengths, packed_parents=row.parents
        )
    naive = naive_attention(inputs, row.places, None)
    for (at, position), expected in naive.items():
        assert (output[0, row.places[at][position]] - expected).abs().max() < FLOAT64
    found, wanted = (
        torch.stack([each.square().sum() for each in values]).sum()
        for values in ([output[0, row.places[at][position]] for at, position in naive], naive.values())
    )
    for one, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        assert (one - other).abs().max() < FLOAT64


def test_one_call_copies_no_more_keys_than_the_row_has() -> None:
    assert packed_attention._varlen_rows((1000, 2, 2), (-1, 0, 0), CPU) is None
    rows = packed_attention._varlen_rows((4, 3, 5), (-1, 0, -1), CPU)
    assert rows is not None
    assert rows.places is not None
    assert rows.places.tolist() == [*range(4), *range(4), 4, 5, 6, *range(7, 12)]
    assert (rows.of_queries.tolist(), rows.of_keys.tolist()) == ([0, 4, 7, 12], [0, 4, 11, 16])
    assert (rows.most_queries, rows.most_keys) == (5, 7)
    alone = packed_attention._varlen_rows((4, 3), (-1, -1), CPU)
    assert alone is not None
    assert alone.places is None


# --- whole models -----------------------------------------------------------------------------------------------------


def conversations() -> list[Sequence]:
    """Groups of a prompt: answers of which two begin alike and two are equal, one that ends at once, one answer only,
    turns between which a tool speaks, and an advantage of each token.
    """
    generator = np.random.default_rng(3)
    plain = item([1.0, 0.0, 0.5, 0.2, 0.7], seed=1, prompt=9, longest=12)
    first = plain["tokens"][0][9:]
    replace_answer(plain, 1, first)
    replace_answer(plain, 2, [*first[:-1], 5, 6, 7])
    replace_answer(plain, 3, [8])
    alone = item([0.5], seed=2, prompt=7, longest=9)
    turns = item([1.0, 0.0, 0.25], seed=4, prompt=6, longest=8)
    shared = turns["tokens"][0]
    for index in range(3):
        more = generator.integers(1, VOCAB, 7).tolist()
        turns["tokens"][index] = [*shared, *more]
        # the tool's three tokens between two turns are not trained
        turns["masks"][index] = [*turns["masks"][0][: len(shared)], -100, -100, -100, *more[3:]]
        turns["inference_logprobs"][index] = [
            1.0 if mask == -100 else -0.5 - 0.1 * index for mask in turns["masks"][index]
        ]
    turns["advantages"] = [generator.normal(size=len(tokens)).tolist() for tokens in turns["tokens"]]
    return make_batch(as_records([plain, alone, turns]), seq_len=99, policy_version=0).sequences


def replace_answer(group: dict[str, Any], index: int, answer: list[int]) -> None:
    prompt = sum(mask == -100 for mask in group["masks"][index])
    group["tokens"][index] = [*group["tokens"][0][:prompt], *answer]
    group["masks"][index] = [-100] * prompt + answer
    group["inference_logprobs"][index] = [1.0] * prompt + [-1.5] * len(answer)


def gradients(model: PreTrainedModel, batches: list[MicroBatch]) -> Tensor:
    model.set_attn_implementation(PACKED_SDPA)
    model.train()
    for batch in batches:

        def loss(logprobs: Tensor, entropy: Tensor, chunk: slice, batch: MicroBatch = batch) -> Tensor:
            ratio = (logprobs - batch.old_logprobs[chunk]).exp()
            return (0.1 * entropy - ratio * batch.advantages[chunk]).sum()

        accumulate_gradients(Policy(model), batch, loss, 8)
    return torch.cat([gradient_of(parameter).flatten() for parameter in model.parameters()])


def off(found: Tensor, expected: Tensor) -> float:
    """Their distance, relative to the expected one's length."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("budget", [1000, 40])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_gradients_are_those_of_each_sequence_alone(family: str, changes: dict[str, Any], budget: int) -> None:
    sequences = conversations()
    alone = gradients(tiny_model(family, **changes).double(), micro_batches(sequences, 1, CPU))
    shared = micro_batches(sequences, budget, CPU, share=True)
    fed = sum(map(fed_length, sequences))
    assert sum(batch.input_ids.shape[1] for batch in shared) < 0.7 * fed
    assert max(len(batch.parents or ()) - (batch.parents or ()).count(-1) for batch in shared) > 2
    assert off(gradients(tiny_model(family, **changes).double(), shared), alone) < NORMS


def test_gradient_checkpointing_changes_no_shared_gradient() -> None:
    shared = micro_batches(conversations(), 1000, CPU, share=True)
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(model, shared), gradients(tiny_model(), shared))


@pytest.mark.parametrize("mistake", ["positions of the row", "answers see each other", "answers miss their prompt"])
def test_a_mistake_would_be_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tolerances above find what sharing could get wrong."""
    sequences = conversations()
    alone = gradients(tiny_model().double(), micro_batches(sequences, 1, CPU))
    shared = micro_batches(sequences, 1000, CPU, share=True)
    if mistake == "positions of the row":
        shared = [replace(batch, position_ids=torch.arange(batch.input_ids.shape[1])[None]) for batch in shared]
    elif mistake == "answers see each other":
        right = attention_blocks._mask

        def leaking(*arguments: Any) -> Tensor | None:
            mask = right(*arguments)
            return None if mask is None else torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0])

        monkeypatch.setattr(attention_blocks, "_mask", leaking)
    else:
        shared = [replace(batch, parents=None) for batch in shared]
    attention_blocks.attention_blocks.cache_clear()
    found = gradients(tiny_model().double(), shared)
    attention_blocks.attention_blocks.cache_clear()
    assert off(found, alone) > 1000 * NORMS


def test_log_probabilities_of_equal_answers_are_equal_bits() -> None:
    sequences = conversations()
    (shared,) = micro_batches(sequences, 1000, CPU, share=True)
    model = tiny_model()
    model.set_attn_implementation(PACKED_SDPA)
    of_sequences = token_logprobs(Policy(model), shared, 8).split(shared.counts)
    assert torch.equal(of_sequences[0], of_sequences[1])
    assert not torch.equal(of_sequences[0][-1:], of_sequences[2][-1:])
