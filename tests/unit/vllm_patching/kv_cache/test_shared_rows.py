"""Which rows of a pass are computed once, and that a model that runs on them alone gives what it gives on all."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_patching.compat import vllm_engine, vllm_layers  # noqa: F401  # before a test's time limit begins
from vllm_patching.kv_cache.shared_rows import LEAST_ROWS, RowSharing, SharedRows, equal_rows

BLOCK = 4
LONG = list(range(20, 20 + LEAST_ROWS))


def found(
    chunks: list[list[int]],
    computed: list[int] | None = None,
    blocks: list[list[int]] | None = None,
    sharing: RowSharing | None = None,
    names: list[str] | None = None,
) -> Any:
    count = len(chunks)
    return (sharing or RowSharing()).of_pass(
        names or [str(number) for number in range(count)],
        np.array([token for chunk in chunks for token in chunk], dtype=np.int32),
        np.cumsum([0, *map(len, chunks)]),
        np.array(computed or [0] * count),
        np.array(blocks or [[0] * 8] * count),
        BLOCK,
    )


def distinct_rows(rows: SharedRows | None) -> list[int] | None:
    return None if rows is None else rows.distinct.tolist()


@pytest.mark.parametrize(
    ("chunks", "computed", "blocks", "distinct"),
    [
        ([LONG, LONG], None, None, list(range(8))),
        ([LONG, [1], LONG], None, None, list(range(9))),  # a decode between
        ([LONG, [*LONG[:-1], 1]], None, None, None),  # other prompts
        ([[1, *LONG], [2, *LONG]], None, None, None),  # which end alike
        ([LONG[:-1], LONG[:-1]], None, None, None),  # too short to be worth it
        # the second found the first's block, which is written in this pass
        ([[5, 6, 7, 8, *LONG], LONG], [0, 4], [[3, 0], [3, 0]], list(range(12))),
        ([[5, 6, 7, 8, *LONG], LONG], [0, 4], [[3, 0], [4, 0]], None),  # another block, so other tokens before
        ([LONG, LONG], [4, 4], [[3, 0], [3, 1]], list(range(8))),
        ([LONG, LONG], [5, 5], [[3, 7], [3, 8]], None),  # the fifth token's block is each one's own
        ([LONG, [5, 6, 7, 8, *LONG]], [4, 0], [[3, 0], [3, 0]], None),  # the later one computes more
    ],
)
def test_rows_are_shared_that_follow_the_same_tokens(
    chunks: list[list[int]], computed: Any, blocks: Any, distinct: list[int] | None
) -> None:
    assert distinct_rows(found(chunks, computed, blocks)) == distinct


@pytest.mark.parametrize(
    ("second", "names", "computed", "distinct"),
    [
        ([[7]] * 9, None, None, [0]),
        ([[7]] * 4 + [[8]] * 5, None, None, None),  # 7 rows less: not worth it
        ([[7]] * 5 + [[8]] * 5, None, None, [0, 5]),
        ([[7]] * 9, "jklmnopqr", None, None),  # other requests, each with blocks of its own
        ([[7]] * 9, "abcdefgjk", None, None),  # two of them
        ([[7]] * 9, None, [4] * 9, None),  # preempted, and computed again from their own blocks
        ([[7]] * 9, None, [0] * 9, [0]),  # or from the start
        ([LONG] * 2, "ab", [0, 0], list(range(8))),
    ],
)
def test_requests_that_were_alike_are_while_their_tokens_are(
    second: list[list[int]], names: Any, computed: Any, distinct: list[int] | None
) -> None:
    sharing, count = RowSharing(), len(second)
    own = [[number] * 8 for number in range(count)]
    first = found([LONG] * 10, None, [[number] * 8 for number in range(10)], sharing, list("abcdefghij"))
    assert distinct_rows(first) == list(range(8))
    rows = found(second, computed or [8] * count, own, sharing, list(names or "abcdefghij"[:count]))
    assert distinct_rows(rows) == distinct


def test_requests_that_once_differed_never_are_alike_again() -> None:
    sharing = RowSharing()
    own = [[number] * 8 for number in range(18)]
    found([LONG] * 18, None, own, sharing)
    assert distinct_rows(found([[1]] * 9 + [[2]] * 9, [8] * 18, own, sharing)) == [0, 9]
    assert distinct_rows(found([[3]] * 18, [9] * 18, own, sharing)) == [0, 9]


ROWS_BEFORE = st.tuples(st.sampled_from([0, 4, 6, 8]), st.integers(1, 14), st.integers(0, 2))


@given(st.lists(ROWS_BEFORE, min_size=1, max_size=12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_row_stands_for_another_only_after_the_same_tokens(
    requests: list[tuple[int, int, int]], passes: int, random: Any
) -> None:
    """A block is named by the tokens up to its end, as in vLLM's cache; one that is not whole is a request's own. From
    pass to pass requests draw a token, end, begin anew under their name, and change places.
    """
    texts = [[random.randrange(2) for _ in range(22)] for _ in range(3)]
    names: dict[object, int] = {}
    sharing = RowSharing()
    live = {
        str(number): (texts[text][: before + length], before)
        for number, (before, length, text) in enumerate(requests * (1 + LEAST_ROWS // len(requests)))
    }
    for _ in range(passes):
        chunks, computed, blocks = [], [], []
        for name, (tokens, before) in live.items():
            chunks.append(tokens[before:])
            computed.append(before)
            ends = [min(end, before) for end in range(BLOCK, before + BLOCK, BLOCK)]
            held = [tuple(tokens[:end]) if end % BLOCK == 0 else (name, end) for end in ends]
            blocks.append([names.setdefault(each, len(names)) for each in held] + [-1] * (8 - len(held)))
        rows = found(chunks, computed, blocks, sharing, [*live])
        if rows is not None:
            prefixes = [
                tuple(tokens[: before + offset + 1])
                for tokens, before in live.values()
                for offset in range(len(tokens) - before)
            ]
            assert [prefixes[rows.distinct[place]] for place in rows.place] == prefixes
        drawn = {name: ([*tokens, random.randrange(2)], len(tokens)) for name, (tokens, _) in live.items()}
        anew = {name: (random.choice(texts)[: random.randrange(9, 22)], random.choice([0, 4, 8])) for name in drawn}
        anew = {name: request for name, request in anew.items() if random.random() < 0.1}
        live = dict(random.sample([*(drawn | anew).items()], max(1, len(drawn) - random.randrange(2))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_equal_whose_bits_are(dtype: torch.dtype) -> None:
    states = torch.randn(12, 5).to(dtype)
    assert equal_rows(states) is None
    states[3:] = states[1]
    states[7] = -states[1]
    rows = equal_rows(states)
    assert rows is not None
    assert rows.distinct.tolist() == [0, 1, 2, 7]
    assert torch.equal(states[rows.distinct][rows.place], states)


@pytest.mark.parametrize(
    ("kind", "ranks", "computed"),
    [(LogitsProcessor, 1, 2), (LogitsProcessor, 2, 12), (LogitsProcessorWithLoRA, 1, 12)],
)
def test_logits_of_equal_states_are_computed_once_by_one_process_without_adapters(
    monkeypatch: pytest.MonkeyPatch, kind: Any, ranks: int, computed: int
) -> None:
    heads: list[int] = []

    def forward(self: object, head: torch.Tensor, states: torch.Tensor, bias: Any = None) -> torch.Tensor:
        heads.append(len(states))
        return states @ head

    monkeypatch.setattr(LogitsProcessor, "forward", forward)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tensor_model_parallel_world_size", lambda: ranks)
    vllm_layers.share_logits.__wrapped__()
    states, head = torch.randn(12, 5), torch.randn(5, 7)
    states[2:] = states[1]
    compute: Any = LogitsProcessor.forward
    logits = compute(kind.__new__(kind), head, states)
    assert heads == [computed]
    torch.testing.assert_close(logits, states @ head)


class Layer(torch.nn.Module):
    """Stands in for a model: rows are mixed by attention alone, in which each request sees its own rows before."""

    def __init__(self, starts: list[int]) -> None:
        super().__init__()
        self.starts = starts
        self.attention = Attention.__new__(Attention)
        self.rows: list[int] = []
        self.attended: list[tuple[int, int]] = []  # rows of queries, and of keys

    def forward(self, *, input_ids: torch.Tensor, positions: torch.Tensor, **more: object) -> torch.Tensor:
        assert set(more.values()) <= {None}
        x = torch.stack([input_ids.double().sin(), positions.double().cos()], 1)
        self.rows.append(len(x))
        for _ in range(2):
            x = x + Attention.forward(self.attention, x, x * 2, x * 3).tanh()
        return x


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Layer:
    """The requests of a pass write keys and values into slots of their own, whose number their block table tells."""
    model = Layer([0, 9, 10, 19, 28])
    context: Any = SimpleNamespace()

    def attend(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        metadata, mixed = context.attn_metadata["attention"].common, []
        model.attended.append((len(query), len(key)))
        assert metadata.num_actual_tokens == len(query)
        for request, end in enumerate(metadata.seq_lens.tolist()):
            slot = int(metadata.block_table_tensor[request])
            first, last = metadata.query_start_loc[request : request + 2].tolist()
            assert last - first == end
            seen = key[slot : slot + end] * value[slot : slot + end]
            mixed.append(query[first:last] + seen.cumsum(0))
        return torch.cat(mixed)

    def build(self: object, prefix: int, common: Any, fast: bool = False) -> Any:
        return SimpleNamespace(common=common)

    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", build)
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    monkeypatch.setattr(Attention, "forward", attend)
    monkeypatch.setattr(GPUModelRunner, "_model_forward", lambda self, **inputs: self.model(**inputs))
    vllm_layers.share_rows.__wrapped__()
    starts = torch.tensor(model.starts, dtype=torch.int32)
    common: Any = SimpleNamespace(
        num_reqs=4,
        num_actual_tokens=28,
        query_start_loc=starts,
        seq_lens=starts.diff(),
        block_table_tensor=starts[:-1, None],
    )
    builder: Any = CPUAttentionMetadataBuilder
    context.attn_metadata = {"attention": builder.build(None, 0, common)}
    return model


def runner(model: Layer, **config: Any) -> Any:
    parts = {"model_config": SimpleNamespace(enforce_eager=True), "lora_config": None, "speculative_config": None}
    parts["parallel_config"] = SimpleNamespace(pipeline_parallel_size=1)
    parts["compilation_config"] = SimpleNamespace(static_forward_context={"attention": model.attention})
    table = SimpleNamespace(block_size=32, get_numpy_array=lambda: np.zeros((4, 2), dtype=np.int32))
    batch = SimpleNamespace(
        num_reqs=4, req_ids=[*"abcd"], num_computed_tokens_cpu=np.array([0, 9, 0, 0]), block_table=[table]
    )
    return SimpleNamespace(
        model=model,
        input_batch=batch,
        query_start_loc=SimpleNamespace(np=np.array(model.starts)),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        vllm_config=SimpleNamespace(**parts | config),
    )


INPUTS: dict[str, Any] = {
    "input_ids": torch.tensor([*range(9), 4, *range(9), *range(8), 77]),
    "positions": torch.tensor([*range(9), 9, *range(9), *range(9)]),
    "intermediate_tensors": None,
    "inputs_embeds": None,
}


def test_a_model_runs_on_distinct_rows_and_writes_the_keys_of_all(patched: Layer) -> None:
    whole = patched(**INPUTS)
    shared: Any = GPUModelRunner._model_forward(runner(patched), **INPUTS)
    assert torch.equal(shared, whole)
    assert patched.rows == [28, 19]
    assert patched.attended == [(28, 28)] * 2 + [(19, 28)] * 2
    assert torch.equal(patched(**INPUTS), whole)  # nothing is left of the pass


@pytest.mark.parametrize(
    "config",
    [
        {"model_config": SimpleNamespace(enforce_eager=False)},
        {"lora_config": object()},
        {"speculative_config": object()},
        {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
        {"compilation_config": SimpleNamespace(static_forward_context={"a": Attention.__new__(Attention), "m": 1})},
    ],
    ids=lambda config: next(iter(config)),
)
def test_a_model_whose_rows_are_more_than_their_tokens_runs_on_all(patched: Layer, config: dict[str, Any]) -> None:
    GPUModelRunner._model_forward(runner(patched, **config), **INPUTS)
    assert patched.rows == [28]
