"""The attention function `packed_sdpa` for transformers models: causal attention within each sequence of a packed row.

A model loaded with `attn_implementation="packed_sdpa"` and called with `packed_lengths=(n1, n2, ...)` treats its one
row of n1 + n2 + ... tokens as that many separate sequences; the linear layers still see one long row. With
`packed_parents=(-1, 0, 0, ...)`, too, they are segments, each of which continues the one that it names (prefixes.py).
Without `packed_lengths` it is ordinary causal attention, so the same model also serves plain, padded and cached calls.
Importing this module registers it.
"""

from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from example_trainer.model.attention_blocks import attention_blocks

# PyTorch 2.11 asks for no consent to heads that share keys
SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}

PACKED_SDPA = "packed_sdpa"


def packed_sdpa(
    module: nn.Module,
    query: Tensor,  # [batch, heads, T, d]
    key: Tensor,  # [batch, key heads, T, d]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_lengths: tuple[int, ...] | None = None,
    packed_parents: tuple[int, ...] | None = None,
    packed_windows: set[int | None] | None = None,
    **other: object,
) -> tuple[Tensor, None]:
    """Attention output [batch, T, heads, d]. Dropout is never applied: it would make the probability ratio noise. The
    window that the layer gave is added to `packed_windows`.

    Raises ValueError for an architecture whose attention has extra terms (softcap, sinks, position bias).
    """
    extra = [name for name in ("softcap", "s_aux", "position_bias") if other.get(name) is not None]
    if extra:
        raise ValueError(f"packed attention does not implement {', '.join(extra)} of {type(module).__name__}")
    if packed_windows is not None:
        packed_windows.add(sliding_window)
    if attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    lengths = packed_lengths or (query.shape[2],)
    parents = packed_parents or (-1,) * len(lengths)
    return tree_attention(query, key, value, lengths, parents, scaling, sliding_window).transpose(1, 2), None


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    parents: tuple[int, ...],
    scaling: float | None,
    window: int | None = None,
) -> Tensor:
    """Attention output [batch, heads, T, d] of a row of segments, each of which sees itself and those that it
    continues.
    """
    if window is None and _takes_varlen(query) and (rows := _varlen_rows(lengths, parents, query.device)) is not None:
        return _in_one_call(query, key, value, rows, scaling)
    blocks = attention_blocks(lengths, parents, window, query.device, query.dtype)
    queries, keys, values = (tensor.split([block.size for block in blocks], 2) for tensor in (query, key, value))
    outputs = []
    for index, (block, of_block) in enumerate(zip(blocks, queries, strict=True)):
        seen = (*block.context, index)
        asked = [queries[at] for at in seen] if block.is_square else [of_block]
        parts = asked, [keys[at] for at in seen], [values[at] for at in seen]
        if block.recomputed and torch.is_grad_enabled():
            result: Any = checkpoint(
                _attention, *parts, block.mask, scaling, use_reentrant=False, preserve_rng_state=False
            )
        else:
            result = _attention(*parts, block.mask, scaling)
        outputs.append(result)
    return torch.cat(outputs, 2)


class VarlenRows(NamedTuple):
    """Describes which keys the queries of a row's segments see, as FlashAttention's call for sequences of many
    lengths takes it: causal, the last query of a segment seeing all its keys.
    """

    of_queries: Tensor  # [segments + 1], int32: where each begins in the row
    of_keys: Tensor  # [segments + 1], int32: where the keys of each begin
    places: Tensor | None  # [keys], in the row; None where no segment continues another, and keys are the row's own
    most_queries: int
    most_keys: int


@lru_cache(maxsize=2)  # each layer of a micro-batch asks for the same
def _varlen_rows(lengths: tuple[int, ...], parents: tuple[int, ...], device: torch.device) -> VarlenRows | None:
    """None where contexts are so long and so often shared that copies of them would outgrow the memory plan, which has
    room for as many keys again as the row has.
    """
    ends = torch.tensor(lengths).cumsum(0).tolist()
    chains: list[list[int]] = []
    for segment, parent in enumerate(parents):
        chains.append([*(chains[parent] if parent >= 0 else []), segment])
    counts = [sum(lengths[at] for at in chain) for chain in chains]
    if sum(counts) > 2 * ends[-1]:
        return None
    places = None
    if any(parent >= 0 for parent in parents):
        spans = [torch.arange(ends[at] - lengths[at], ends[at]) for chain in chains for at in chain]
        places = torch.cat(spans).to(device)

    def begins(sizes: list[int] | tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)

    return VarlenRows(begins(lengths), begins(counts), places, max(lengths), max(counts))


def _takes_varlen(query: Tensor) -> bool:
    """Return whether FlashAttention computes sequences of many lengths in one call here."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.shape[0] == 1 and query.shape[-1] % 8 == 0


def _in_one_call(query: Tensor, key: Tensor, value: Tensor, rows: VarlenRows, scaling: float | None) -> Tensor:
    asked, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, d]
    if rows.places is not None:
        # of a key that several segments see, embedding sums the gradients in a fixed order
        keys, values = (
            F.embedding(rows.places, tensor.flatten(1)).unflatten(1, tensor.shape[1:]) for tensor in (keys, values)
        )
    result: Any = varlen_attn(
        asked,
        keys,
        values,
        cu_seq_q=rows.of_queries,
        cu_seq_k=rows.of_keys,
        max_q=rows.most_queries,
        max_k=rows.most_keys,
        scale=scaling,
        window_size=(-1, 0),  # causal
        **SHARED_KEYS,
    )
    output: Tensor = result.transpose(0, 1)[None]
    return output


def _attention(
    queries_of: list[Tensor],
    keys_of: list[Tensor],
    values_of: list[Tensor],
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Compute the attention of one block, the last of the queries, which come in parts, as keys and values do.
    Without a mask it is causal, the last query seeing all.
    """
    query, key, value = (
        parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in (queries_of, keys_of, values_of)
    )
    size, keys = query.shape[2], key.shape[2]
    bias: Any = mask
    if mask is None and size < keys:
        # FlashAttention, without a mask: attention_blocks leaves it away on GPUs alone
        bias = causal_lower_right(size, keys)
    if query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # FlashAttention takes neither; torch's memory-efficient kernel takes as many heads of keys as of queries
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    result = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        is_causal=bias is None,
        scale=scaling,
        enable_gqa=key.shape[1] < query.shape[1],
    )
    return result[:, :, -queries_of[-1].shape[2] :]


def packed_mask(*, attention_mask: Tensor | None = None, q_length: int, kv_length: int, **other: Any) -> Tensor | None:
    """No mask for a plain or packed row, which `packed_sdpa` handles; transformers' own where padding or a cache asks
    for one.
    """
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(
        attention_mask=attention_mask,
        q_length=q_length,
        kv_length=kv_length,
        **(other | {"allow_is_causal_skip": False}),
    )


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, packed_mask)
