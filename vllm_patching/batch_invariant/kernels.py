"""The arithmetic that vLLM and the trainer share, forward only, in torch alone. All of it is independent of the
batch.

Why each one is (measured by self_check.py and the tests of this directory):
    linear        oneDNN's matrix product sums over the inputs in one order for every number of rows but 1,
                  where it takes another kernel: one row is computed as two. Splitting the outputs (fused qkv, gate_up,
                  TP columns) changes nothing.
    silu          torch.nn.functional.silu has a scalar and a vector body that differ in the last bit;
                  x / (1 + exp(-x)) has one.
    experts       each token adds up its experts in the order of their numbers, whoever else chose them.
    rms_norm      each row is reduced alone; the residual is rounded to the model's dtype first, as transformers does.
    tile_queries  vLLM's attention kernel cuts the context by the size of its query tile: tiles of 8 at absolute
                  positions are always cut alike.
Half-precision weights are multiplied in float32 and rounded once; a large one in parts, each of which stays in the
cache.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

QUERY_TILE = 8
WIDENED_OUTPUTS = 4096  # of a half-precision weight at a time


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, by: Callable[..., Tensor] | None = None) -> Tensor:
    """x [..., in] times weight [out, in] plus bias [out], in x's dtype. `by`, if given, computes the product of float32
    rows and this weight.
    """
    if by is None and weight.dtype != torch.float32 and len(weight) > WIDENED_OUTPUTS:
        parts = weight.split(WIDENED_OUTPUTS)
        biases = [None] * len(parts) if bias is None else bias.split(WIDENED_OUTPUTS)
        return torch.cat([linear(x, part, of_part) for part, of_part in zip(parts, biases, strict=True)], -1)
    rows = x.reshape(-1, x.shape[-1]).float()
    if len(rows) == 1:
        rows = rows.repeat(2, 1)
    bias = None if bias is None else bias.float()
    product = _onednn_linear(rows, weight.float(), bias) if by is None else by(rows, weight, bias)
    return product[: x.numel() // x.shape[-1]].view(*x.shape[:-1], -1).to(x.dtype)


def _onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


def row_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int) -> Tensor:
    """`linear` as `ranks` tensor-parallel ranks compute it: each its share of the inputs, the first the bias, then the
    sum.
    """
    if ranks == 1:
        return linear(x, weight, bias)
    shares = zip(x.chunk(ranks, -1), weight.chunk(ranks, 1), strict=True)
    return torch.stack(
        [linear(part, columns.contiguous(), bias if rank == 0 else None) for rank, (part, columns) in enumerate(shares)]
    ).sum(0)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), in x's dtype."""
    wide = x.float()
    divisor = wide.neg().exp_().add_(1)
    return torch.div(wide, divisor, out=divisor).to(x.dtype)


def route(logits: Tensor, count: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `count` experts with the largest logits [tokens, experts] of each token, and their shares in float32: of the
    softmax over these experts, or over all where not `renormalize`. Both are [tokens, count].
    """
    largest, chosen = logits.float().topk(count, -1)
    shares = largest.softmax(-1) if renormalize else (largest - logits.float().logsumexp(-1, keepdim=True)).exp()
    return shares, chosen


def experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    shares: Tensor,
    chosen: Tensor,
    *,
    ranks: int = 1,
    multiply: Callable[[Tensor, Tensor], Tensor] = linear,
    activate: Callable[[Tensor], Tensor] = silu,
    **how: object,
) -> Tensor:
    """The sum over each token's `chosen` experts [tokens, k], in the order of their numbers, of what they make of it
    times their `shares`: added up in float32, rounded once to x's dtype.

    x is [tokens, in], w13 [experts, 2 width, in] gate over up, w2 [experts, in, width]; the result is [tokens, in].
    With `ranks`, each tensor-parallel rank has its part of every expert's width, and its sum is rounded before it is
    added.
    """
    width = w2.shape[-1] // ranks
    sums = [torch.zeros(x.shape) for _ in range(ranks)]
    of_experts = list(zip(w13.unbind(), w2.unbind(), strict=True))
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        inputs, (gates, ups), down = x[token], of_experts[expert][0].chunk(2), of_experts[expert][1]
        for rank, of_rank in enumerate(sums):
            own = slice(rank * width, (rank + 1) * width)
            inner = activate(multiply(inputs, gates[own])) * multiply(inputs, ups[own])
            output = multiply(inner, down[:, own].contiguous())
            of_rank.index_add_(0, token, output.float() * shares[token, place, None])
    rounded = [of_rank.to(x.dtype) for of_rank in sums]
    return rounded[0] if ranks == 1 else torch.stack(rounded).sum(0)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension, computed in float32, scaled in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return normed.to(x.dtype) * weight.to(x.dtype)


def rotary_table(config: Any, positions: int) -> Tensor:
    """cos | sin of every position, [positions, rotary dim], float32, by transformers' own formula for this
    configuration.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # [1, positions, 2 halves that are equal]
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [tokens, heads, 2 half] in place by cos, sin [tokens, 1, half], in x's dtype: transformers' formula,
    term by term.
    """
    left, right = x.chunk(2, -1)
    left_sin, right_sin = left * sin, right * sin
    left.mul_(cos).sub_(right_sin)
    right.mul_(cos).add_(left_sin)


def tile_queries(starts: Tensor, ends: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut each request's queries at absolute multiples of QUERY_TILE into requests of their own.

    `starts` [n + 1] are offsets of the requests' queries in the row, `ends` [n] the context lengths after them,
    `block_table` [n, blocks] their cache blocks. Returns the same three for the tiles.
    """
    queries = (starts[1:] - starts[:-1]).long()
    if int(queries.max()) <= 1:
        return starts, ends, block_table
    after = ends.long()
    before = after - queries
    first = before // QUERY_TILE
    tiles = torch.where(queries > 0, (after + QUERY_TILE - 1) // QUERY_TILE - first, 0)
    request = torch.repeat_interleave(torch.arange(len(tiles)), tiles)
    nth = torch.arange(len(request)) - torch.repeat_interleave(tiles.cumsum(0) - tiles, tiles)
    opens = torch.maximum((first[request] + nth) * QUERY_TILE, before[request])
    closes = torch.minimum((first[request] + nth + 1) * QUERY_TILE, after[request])
    offsets = torch.zeros(len(request) + 1, dtype=starts.dtype)
    offsets[1:] = (closes - opens).cumsum(0)
    return offsets, closes.to(ends.dtype), block_table[request].contiguous()
