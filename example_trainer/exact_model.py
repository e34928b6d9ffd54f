"""A transformers model that computes what a batch-invariant vLLM computes, bit for bit, and differentiates it.

`make_exact(model, dtype, tp_size)` exchanges, in a loaded Llama, Qwen2 or Qwen3, what its modules compute; parameters, names and
checkpoints stay as they are. Forward passes are those of vllm_patching/batch_invariant; each backward is plain torch, as accurate
as the model's own. Parameters may be float32 masters of a model served in bfloat16: they are rounded on the way in.
"""

import re
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from example_trainer.errors import TrainerError
from vllm_patching.batch_invariant import coverage, kernels
from vllm_patching.batch_invariant.attention import packed_attention
from vllm_patching.batch_invariant.self_check import check_weight
from vllm_patching.batch_invariant.switch import NotInvariant

EXACT_ATTENTION = "vllm_cpu_attention"


def make_exact(model: PreTrainedModel, dtype: torch.dtype, tp_size: int = 1) -> None:
    """Make `model` compute in `dtype` as vLLM does over `tp_size` ranks. Raises TrainerError naming what is not covered."""
    reason = coverage.why_not_exact(model.config, tp_size=tp_size)
    if model.device.type != "cpu":
        reason = f"training on {model.device.type}; covered is cpu"
    if reason:
        raise TrainerError(f"--batch-invariant does not cover {reason}; see docs/bit-exactness.md, or drop the flag")
    try:
        for name, module in model.named_modules():
            _exchange(module, dtype, tp_size if _is_row_parallel(model, name) else 1)
    except NotInvariant as error:
        raise TrainerError(str(error)) from error
    model.set_attn_implementation(EXACT_ATTENTION)


def _exchange(module: Any, dtype: torch.dtype, ranks: int) -> None:
    """Give one module its exact forward; containers are left as they are."""
    kind = type(module).__name__
    if kind == "Linear":
        check_weight(module.weight)
        module.forward = partial(_linear, module, ranks)
    elif kind == "Embedding":
        module.forward = lambda ids: F.embedding(ids, module.weight).to(dtype)
    elif kind.endswith("RMSNorm"):
        module.forward = lambda x: kernels.rms_norm(x, module.weight, module.variance_epsilon)
    elif kind.endswith("MLP"):
        module.act_fn = _Activation()
    elif next(module.parameters(recurse=False), None) is not None:
        raise NotInvariant(f"--batch-invariant does not cover layers of type {kind}; see docs/bit-exactness.md, or drop the flag")


def _is_row_parallel(model: PreTrainedModel, name: str) -> bool:
    """Whether vLLM splits this layer's inputs over its ranks, by transformers' own plan (`layers.*.mlp.down_proj: rowwise`)."""
    place = re.sub(r"\.\d+\.", ".*.", name.removeprefix("model."))
    return (model.config.base_model_tp_plan or {}).get(place) == "rowwise"


class _Activation(nn.Module):
    """SiLU as vLLM computes it."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        result: Tensor = _Silu.apply(x)
        return result


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return kernels.silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = torch.ops.aten.silu_backward(grad, x)
        return result


def _linear(module: nn.Linear, ranks: int, x: Tensor) -> Tensor:
    result: Tensor = _Linear.apply(x, module.weight, module.bias, ranks)
    return result


class _Linear(torch.autograd.Function):
    """x [..., in], weight [out, in] and bias [out] as they are stored; computed in x's dtype, weight gradients in the weight's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        served = weight.to(x.dtype)
        return kernels.row_parallel_linear(x, served, None if bias is None else bias.to(x.dtype), ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wide = grad.reshape(-1, grad.shape[-1]).float()
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (wide @ weight.to(x.dtype).float()).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (wide.T @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = wide.sum(0).to(ctx.bias_dtype)
        return of_x, of_weight, of_bias, None


class _PackedAttention(torch.autograd.Function):
    """Forward by vLLM's kernel, backward by that of torch's own attention. query [heads, T, d], key and value [key heads, T, d]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.lengths, ctx.scale = lengths, scale
        return packed_attention(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), lengths, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # grad [T, heads, d]
        pieces = zip(*(saved.split(ctx.lengths, 1) for saved in ctx.saved_tensors), grad.split(ctx.lengths, 0), strict=True)
        grads = [_attention_gradients(q, k, v, of_output.transpose(0, 1), ctx.scale) for q, k, v, of_output in pieces]
        of_query, of_key, of_value = (torch.cat(parts, 1) for parts in zip(*grads, strict=True))
        return of_query, of_key, of_value, None, None


def _attention_gradients(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, scale: float) -> tuple[Tensor, ...]:
    inputs = q, k, v = [tensor.detach()[None].requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return tuple(found[0] for found in torch.autograd.grad(output, inputs, grad[None]))


def exact_attention(
    module: nn.Module,
    query: Tensor,  # [batch, heads, T, d]
    key: Tensor,  # [batch, key heads, T, d]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed_lengths: tuple[int, ...] | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention output [batch, T, heads, d]: of a packed row (`packed_lengths`), or of sequences of one length."""
    if attention_mask is not None or key.shape[2] != query.shape[2]:
        raise ValueError(f"exact attention of {type(module).__name__} takes packed sequences, neither masks nor caches")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    lengths = packed_lengths or (query.shape[2],)
    rows = [_PackedAttention.apply(*row, lengths, scale) for row in zip(query, key, value, strict=True)]
    return torch.stack(rows), None


def _no_mask(*, attention_mask: Tensor | None = None, **other: Any) -> Tensor | None:
    return attention_mask


AttentionInterface.register(EXACT_ATTENTION, exact_attention)
AttentionMaskInterface.register(EXACT_ATTENTION, _no_mask)
