"""The attention function `packed_sdpa` for transformers models: causal attention within each sequence of a packed row.

A model loaded with `attn_implementation="packed_sdpa"` and called with `packed_lengths=(n1, n2, ...)` treats its one
row of n1 + n2 + ... tokens as that many separate sequences; the linear layers still see one long row. Without
`packed_lengths` it is ordinary causal attention, so the same model also serves plain, padded and cached calls.
Importing this module registers it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

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
    pieces = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([_causal(q, k, v, scaling, sliding_window) for q, k, v in pieces], 2).transpose(1, 2), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = query.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    behind = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)[None]
    mask = (behind >= 0) & (behind < window)  # [length, length]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)


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
