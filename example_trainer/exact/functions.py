"""Differentiable functions whose forward pass is a batch-invariant kernel. Backward passes are ordinary formulas.

Used by model.py (CPU) and cuda.py; the kernels are those of vllm_patching/batch_invariant, which have no
gradients.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from example_trainer.model.cpu_kernels import exact_product, onednn_product, repeatable
from example_trainer.model.packed_attention import tree_attention

BLOCK = 256  # tokens


class Saved(Protocol):
    """What autograd keeps of a forward pass for the backward pass."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class SavedLinear(Saved, Protocol):
    """Also keeps the dtype of the bias, None without any."""

    bias_dtype: torch.dtype | None


class SavedAttention(Saved, Protocol):
    """Also keeps how the row is divided into sequences."""

    scale: float
    lengths: tuple[int, ...]
    parents: tuple[int, ...]


class SavedKernel(Saved, Protocol):
    """Also keeps what the kernel computes, in plain torch."""

    formula: Callable[..., Any]


class Linear(torch.autograd.Function):
    """x [..., in], weight [out, in] and bias [out] as they are stored; computed in x's dtype, weight gradients in the
    weight's own.

    `product(x, weight, bias)` makes the output from tensors of x's dtype.
    """

    @staticmethod
    def forward(
        ctx: SavedLinear, product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return product(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: SavedLinear, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        # a GPU sums products of bfloat16 in float32 by itself; a CPU would emulate each of them
        on_cpu = x.device.type == "cpu"
        computed, product = (torch.float32, exact_product()) if on_cpu else (x.dtype, _product)
        wide = grad.reshape(-1, grad.shape[-1]).to(computed)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_x = product(wide, weight.to(x.dtype).to(computed).t()).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[2]:
            columns = x.reshape(-1, x.shape[-1]).to(computed).t()
            of_weight = product(wide.t(), columns).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = grad.reshape(-1, grad.shape[-1]).float().sum(0).to(ctx.bias_dtype)
        return None, of_x, of_weight, of_bias


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.t()


class PackedAttention(torch.autograd.Function):
    """Forward by `kernel`, backward by that of torch's own attention. query [heads, T, d], key and value [key heads,
    T, d].

    `kernel(query, key, value, lengths, scale)` takes and gives [T, heads, d]; so is the output. With `parents` the
    lengths are of segments that continue others (prefixes.py): then keys and values are those of each segment's whole
    sequence so far, and a further argument has their numbers.
    """

    @staticmethod
    def forward(
        ctx: SavedAttention,
        kernel: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        scale: float,
        parents: tuple[int, ...] | None = None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        ctx.lengths, ctx.parents = lengths, parents or (-1,) * len(lengths)
        rows = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        if parents is None:
            return kernel(*rows, lengths, scale)
        seen = _places(lengths, parents)
        of_all = torch.cat(seen).to(query.device)
        return kernel(rows[0], rows[1][of_all], rows[2][of_all], lengths, scale, tuple(map(len, seen)))

    @staticmethod
    def backward(
        ctx: SavedAttention, grad: Tensor
    ) -> tuple[None, Tensor, Tensor, Tensor, None, None, None]:  # [T, heads, d]
        if repeatable() and grad.device.type == "cpu":
            query, key, value = ctx.saved_tensors
            outer = grad.transpose(0, 1)
            of = attention_gradients(query, key, value, outer, ctx.lengths, ctx.parents, ctx.scale)
            return None, *of, None, None, None
        query, key, value = (tensor.detach()[None].requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            output = tree_attention(query, key, value, ctx.lengths, ctx.parents, ctx.scale)
        gradients = torch.autograd.grad(output, (query, key, value), grad.transpose(0, 1)[None])
        return None, gradients[0][0], gradients[1][0], gradients[2][0], None, None, None


def attention_gradients(
    query: Tensor,  # [heads, T, d]
    key: Tensor,  # [key heads, T, d]
    value: Tensor,
    grad: Tensor,  # [heads, T, d], of the output
    lengths: tuple[int, ...],
    parents: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return those of query, key and value, by oneDNN's products: of sequences that begin alike together, and at once
    for the heads that share keys.

    PyTorch's own backward multiplies by MKL, whose bits depend on where its threads' buffers lie.
    """
    dtype = query.dtype
    of_query, of_key, of_value = (torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
    query, key, value, grad = (each.float() for each in (query, key, value, grad))
    group = len(query) // len(key)
    for own, seen, hidden in _blocks(lengths, parents):
        hidden_to_all = hidden.repeat(group, 1)
        for of in range(len(key)):
            heads = slice(of * group, (of + 1) * group)
            queries, outer = query[heads, own].flatten(0, 1), grad[heads, own].flatten(0, 1)
            keys, values = key[of, seen], value[of, seen]
            weights = onednn_product(queries, keys).mul_(scale).masked_fill_(hidden_to_all, -torch.inf).softmax(-1)
            of_weights = onednn_product(outer, values)
            of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
            of_query[heads, own] = onednn_product(of_scores, keys.t()).unflatten(0, (group, len(own)))
            of_key[of].index_add_(0, seen, onednn_product(of_scores.t(), queries.t()))
            of_value[of].index_add_(0, seen, onednn_product(weights.t(), outer.t()))
    return of_query.to(dtype), of_key.to(dtype), of_value.to(dtype)


@lru_cache(maxsize=4)  # every layer asks for those of the same row
def _blocks(lengths: tuple[int, ...], parents: tuple[int, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return what is multiplied at once: places whose queries are taken [n], those of the keys that one of them sees
    [m], and which of these are hidden from which [n, m]. A block is a segment, or as many that follow each other and
    have one root as have BLOCK tokens: each small product costs a call.
    """
    places, blocks = _places(lengths, parents), list[tuple[Tensor, Tensor, Tensor]]()
    segments = range(len(lengths))
    for _, of_root in itertools.groupby(segments, lambda segment: int(places[segment][0])):
        for members in _cut(list(of_root), lengths):
            seen = torch.cat([places[each] for each in members]).unique()
            hidden = torch.ones(sum(lengths[each] for each in members), len(seen), dtype=torch.bool)
            for rows, each in zip(hidden.split([lengths[each] for each in members]), members, strict=True):
                length, whole = lengths[each], len(places[each])
                later = torch.ones(length, whole, dtype=torch.bool).triu(whole - length + 1)
                rows[:, torch.searchsorted(seen, places[each])] = later
            own = torch.cat([places[each][len(places[each]) - lengths[each] :] for each in members])
            blocks.append((own, seen, hidden))
    return blocks


def _cut(segments: list[int], lengths: tuple[int, ...]) -> Iterator[list[int]]:
    """Cut a list of segments where the next one would make more than BLOCK tokens."""
    members: list[int] = []
    for segment in segments:
        if members and sum(lengths[each] for each in members) + lengths[segment] > BLOCK:
            yield members
            members = []
        members.append(segment)
    yield members


def _places(lengths: tuple[int, ...], parents: tuple[int, ...]) -> list[Tensor]:
    """Return for each segment the places in the row that its last token sees."""
    places: list[Tensor] = []
    for own, parent in zip(torch.arange(sum(lengths)).split(lengths), parents, strict=True):
        places.append(own if parent < 0 else torch.cat([places[parent], own]))
    return places


class Kernel(torch.autograd.Function):
    """Forward by `kernel`, backward by that of `formula`: the same function of the same tensors in plain torch, made
    in float32.
    """

    @staticmethod
    def forward(
        ctx: SavedKernel, kernel: Callable[..., object], formula: Callable[..., object], *inputs: Tensor
    ) -> object:
        ctx.save_for_backward(*inputs)
        ctx.formula = formula
        return kernel(*inputs)

    @staticmethod
    def backward(ctx: SavedKernel, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [
            saved.detach().float().requires_grad_(need) for saved, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.formula(*inputs)
        gradients = iter(
            torch.autograd.grad(
                outputs, [value for value in inputs if value.requires_grad], [grad.float() for grad in grads]
            )
        )
        of_inputs = (
            next(gradients).to(saved.dtype) if need else None
            for saved, need in zip(ctx.saved_tensors, needed, strict=True)
        )
        return None, None, *of_inputs
