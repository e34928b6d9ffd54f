"""The attention function `packed_sdpa` for transformers models: causal attention within each sequence of a packed row.

A model loaded with `attn_implementation="packed_sdpa"` and called with `packed_lengths=(n1, n2, ...)` treats its one
row of n1 + n2 + ... tokens as that many separate sequences; the linear layers still see one long row. With
`packed_parents=(-1, 0, 0, ...)`, too, they are segments, each of which continues the one that it names (prefixes.py).
Without `packed_lengths` it is ordinary causal attention, so the same model also serves plain, padded and cached calls.
Importing this module registers it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from example_trainer.attention_blocks import attention_blocks

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
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention output [batch, T, heads, d]. Dropout is never applied: it would make the probability ratio noise.

    Raises ValueError for an architecture whose attention has extra terms (softcap, sinks, position bias).
    """
    extra = [name for name in ("softcap", "s_aux", "position_bias") if other.get(name) is not None]
    if extra:
        raise ValueError(f"packed attention does not implement {', '.join(extra)} of {type(module).__name__}")
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


def _attention(
    queries_of: list[Tensor],
    keys_of: list[Tensor],
    values_of: list[Tensor],
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Of one block, the last of the queries, which come in parts, as keys and values do; without a mask it is causal,
    the last query seeing all.
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
