"""vLLM's CPU attention kernel over packed sequences, called as vLLM itself calls it: same tiles, same cache layout, no
context split.

The trainer calls it through example_trainer/exact/model.py; it is the only part of vLLM that a trainer process loads.
Forward only.
"""

from functools import lru_cache
from types import ModuleType

import torch
from packaging.version import Version
from torch import Tensor

from atroposlib.errors import loading
from vllm_patching.batch_invariant.kernels import tile_queries
from vllm_patching.batch_invariant.switch import NotInvariant

BLOCK = 32  # tokens per cache block, as the launcher sets it for vLLM


@lru_cache(maxsize=1)
def _vllm_ops() -> ModuleType:
    """vLLM's wrappers of its C++ kernels; seconds to import, so only when first needed."""
    with loading("vLLM, with whose kernel --batch-invariant computes attention", NotInvariant):
        from vllm_patching.compat import vllm_ops

        return vllm_ops.cpu_kernels()


def _cache_dtype() -> dict[str, str]:
    """Return what the schedule is told of the cache, since vLLM 0.27."""
    from vllm_patching.version import VERSION

    return {"kv_cache_dtype": "auto"} if VERSION >= Version("0.27") else {}


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    contexts: tuple[int, ...] | None = None,
) -> Tensor:
    """Causal attention within each sequence of a row. query [T, heads, d], key and value [T, key heads, d]; result [T,
    heads, d]. `contexts` are the keys of each sequence where it has more than its queries, which are the last.
    """
    ops = _vllm_ops()
    heads, key_heads, size = query.shape[1], key.shape[1], query.shape[2]
    isa = "vec" if size % 32 == 0 else "vec16"
    contexts = contexts or lengths
    table, slots, blocks = pages(contexts)
    ends = torch.tensor(contexts, dtype=torch.int32)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(lengths).cumsum(0)
    starts, ends, table = tile_queries(starts, ends, table)
    cache = torch.zeros(blocks, key_heads, 2 * BLOCK, size, dtype=query.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key.contiguous(),
        value.contiguous(),
        key_cache,
        value_cache,
        slots,
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(ends),
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=size,
        seq_lens=ends,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
        dynamic_causal=None,
        **_cache_dtype(),
    )
    query = query.contiguous()
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=starts,
        seq_lens=ends,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=0,
        scheduler_metadata=schedule,
        s_aux=None,
        dynamic_causal=None,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    return output


def pages(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
    """Consecutive cache blocks for each sequence: block table [sequences, most blocks], the slot of every token [T],
    and their number.
    """
    blocks = [(length + BLOCK - 1) // BLOCK for length in lengths]
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    slots = []
    first = 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        table[row, :count] = torch.arange(first, first + count)
        slots.append(torch.arange(length) + first * BLOCK)
        first += count
    return table, torch.cat(slots), first
