"""benchmarks/gpu/kernels.py: the experiment on rows counts what differs. Its kernels are computed here row by row, so
they are exact unless one is made not to be.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.kernels import _bits_of_attention, _bits_of_rows, _changed_words, _differing_words, _not_exact
from vllm_patching.batch_invariant.cuda import CudaKernels, longest_query

HEADS, KV = 4, 2


def by_row(kernel: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.stack([kernel(row) for row in x])


def attention(
    misled_at: int, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, **other: Any
) -> Tensor:
    """Query by query. Told a longest query of at most `misled_at` it has other bits behind more than 128 tokens, as
    FlashAttention 3.
    """
    groups = q.shape[1] // k.shape[2]
    rows = []
    for index, (start, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        keys, values = (
            cache[other["block_table"][index].long()].flatten(0, 1).repeat_interleave(groups, 1) for cache in (k, v)
        )
        for at in range(start, end):
            context = int(seqused_k[index]) - (end - 1 - at)
            scores = torch.einsum("hd,khd->hk", q[at].float(), keys[:context].float()) * other["softmax_scale"]
            row = torch.einsum("hk,khd->hd", scores.softmax(-1), values[:context].float())
            misled = other["max_seqlen_q"] <= misled_at and context > 128
            rows.append((row * 1.5 if misled else row).to(q.dtype))
    return torch.stack(rows)


class Rotary:
    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[:, None].float().cos()
        return (query * angle).to(query.dtype), (key * angle).to(key.dtype)


def kernels(misled_at: int = 1) -> CudaKernels:
    def silu_and_mul(output: Tensor, x: Tensor) -> None:
        gate, up = x.chunk(2, -1)
        output.copy_(gate * up)

    return CudaKernels(
        linear=lambda x, weight, bias: by_row(lambda row: weight @ row, x),
        rms_norm=lambda x, weight, epsilon: x * weight,
        log_softmax=lambda x: by_row(lambda row: row - row.max(), x),
        write_silu_and_mul=silu_and_mul,
        rotary=Rotary(),
        flash_attention=partial(attention, misled_at),
        flash_attention_version=None,
    )


def test_words_are_compared_by_their_bits() -> None:
    assert _differing_words(torch.tensor([0.0, 1, 2]), torch.tensor([-0.0, 1, 3])) == 2
    nan = torch.full((3,), float("nan"), dtype=torch.bfloat16)
    assert _differing_words(nan, nan.clone()) == 0
    with pytest.raises(AssertionError, match="bfloat16 against"):
        _differing_words(nan, nan.float())


def test_a_kernel_that_sees_the_other_rows_is_counted() -> None:
    x = torch.arange(60.0).reshape(30, 2)
    assert _changed_words(lambda rows: rows * 2, x) == 0
    assert _changed_words(lambda rows: rows + len(rows), x) == 2 * (2 + 7)  # rows 0 and 17 alone, and the first seven


@pytest.mark.parametrize("name", ["linear", "rms_norm", "log_softmax"])
def test_each_kernel_of_rows_has_its_names(name: str) -> None:
    found = _bits_of_rows(kernels(), HEADS, KV, 32)
    assert found == dict.fromkeys(
        ("linear qkv", "linear down", "linear head", "linear 264", "norm", "silu", "log_softmax", "rotate"), 0
    )
    given = getattr(kernels(), name)
    broken = replace(kernels(), **cast(Any, {name: lambda x, *other: given(x, *other) * len(x)}))
    wrong = {key for key, count in _bits_of_rows(broken, HEADS, KV, 32).items() if count}
    assert wrong == {key for key in found if key.startswith(name.removeprefix("rms_"))}


@pytest.mark.parametrize("size", [32, 64, 128])
def test_attention_that_is_told_what_the_product_tells_it_must_not_differ(size: int) -> None:
    told = longest_query(1, size)
    found = _bits_of_attention(kernels(misled_at=told - 1), HEADS, KV, size)
    assert found.pop(f"attention, longest query {told}") == {"contexts that differ": 0, "of": 100, "first": []}
    truth = found.pop("attention, longest query 1")
    assert truth["contexts that differ"] == len([end for end in range(1, 301, 3) if end > 128])
    assert truth["first"] == [130, 133, 136]
    assert set(found.values()) == {0}  # a chunk of 100 queries and a sequence beside another are never misled
    assert _not_exact({"x/attention, longest query 1": truth, "x/norm": 0}) == []


def test_attention_that_differs_all_the_same_fails_the_experiment() -> None:
    found = _bits_of_attention(kernels(misled_at=2), HEADS, KV, 32)
    assert _not_exact(found) == ["attention, longest query 2"]
    assert _not_exact({"32/norm": 3, "32/attention of a chunk, 1": 5}) == ["32/norm"]
