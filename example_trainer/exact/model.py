"""A transformers model that computes what a batch-invariant vLLM computes, bit for bit, with gradients.

`make_exact(model, dtype, tp_size)` replaces what the modules of a loaded Llama, Qwen2, Qwen3 or Qwen3-MoE compute;
parameters, names and checkpoints do not change. Forward passes are those of vllm_patching/batch_invariant; backward
passes are ordinary formulas, as accurate as the model's own. Parameters may be float32 masters of a model served in
bfloat16: they are rounded on the way in. This module is for CPUs; cuda.py does the same on a GPU.
"""

import re
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from example_trainer.exact import cuda as exact_cuda
from example_trainer.exact.functions import Linear, PackedAttention
from vllm_patching.batch_invariant import coverage, kernels
from vllm_patching.batch_invariant.attention import packed_attention
from vllm_patching.batch_invariant.cuda import vllm_kernels
from vllm_patching.batch_invariant.self_check import check_weight
from vllm_patching.batch_invariant.switch import NotInvariant

EXACT_ATTENTION = "vllm_attention"
_overrides: list[torch.library.Library] = []  # torch functions that are vLLM's in this process


def make_exact(model: PreTrainedModel, dtype: torch.dtype, tp_size: int = 1) -> None:
    """Make `model` compute in `dtype` as vLLM does over `tp_size` ranks. Raises NotInvariant,
    naming what is not covered.
    """
    reason = coverage.why_not_exact(model.config, tp_size=tp_size, device=model.device.type)
    if model.device.type == "cuda" and dtype != torch.bfloat16:
        reason = reason or f"{str(dtype).removeprefix('torch.')} on CUDA, where vLLM's exact attention takes bfloat16"
    if reason:
        raise NotInvariant(f"--batch-invariant does not cover {reason}; see docs/bit-exactness.md, or drop the flag")
    if model.device.type == "cuda":
        cuda = vllm_kernels(model.config, dtype, model.device)
        exact_cuda.exchange(model, cuda, dtype)
        # backward products are summed in float32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        _overrides[:] = _overrides or [exact_cuda.override_log_softmax(cuda)]
    else:
        rowwise = [name for name, plan in (model.config.base_model_tp_plan or {}).items() if plan == "rowwise"]
        for name, module in model.named_modules():
            place = re.sub(r"\.\d+\.", ".*.", name.removeprefix("model."))  # such as layers.*.mlp.down_proj
            # vLLM splits the inputs of these over its ranks, by transformers' own plan
            _exchange(module, dtype, tp_size if place in rowwise or place.endswith("experts") else 1)
    model.set_attn_implementation(EXACT_ATTENTION)


def _exchange(module: Any, dtype: torch.dtype, ranks: int) -> None:
    kind = type(module).__name__
    if kind == "Linear":
        check_weight(module.weight)
        product = partial(kernels.row_parallel_linear, ranks=ranks)
        module.forward = lambda x: Linear.apply(product, x, module.weight, module.bias)
    elif kind == "Embedding":
        module.forward = lambda ids: F.embedding(ids, module.weight).to(dtype)
    elif kind.endswith("RMSNorm"):
        module.forward = lambda x: kernels.rms_norm(x, module.weight, module.variance_epsilon)
    elif kind.endswith("MLP"):
        module.act_fn.forward = _Silu.apply
    elif kind == "Qwen3MoeTopKRouter":
        check_weight(module.weight)
        module.forward = partial(_routed, module)
    elif kind == "Qwen3MoeExperts":
        check_weight(module.gate_up_proj[0])
        check_weight(module.down_proj[0])
        module.forward = partial(_experts, module, ranks)
    elif next(module.parameters(recurse=False), None) is not None:
        raise NotInvariant(
            f"--batch-invariant does not cover layers of type {kind}; see docs/bit-exactness.md, or drop the flag"
        )


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return cast(Tensor, Linear.apply(kernels.linear, x, weight, None))


def _routed(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = _linear(x.reshape(-1, x.shape[-1]), router.weight)
    return logits, *kernels.route(logits, router.top_k, router.norm_topk_prob)


def _experts(module: Any, ranks: int, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    weights = module.gate_up_proj, module.down_proj
    return kernels.experts(x, *weights, shares, chosen, ranks=ranks, multiply=_linear, activate=_Silu.apply)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return kernels.silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cast(Tensor, torch.ops.aten.silu_backward(grad, x))


def exact_attention(
    module: nn.Module,
    query: Tensor,  # [batch, heads, T, d]
    key: Tensor,  # [batch, key heads, T, d]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed_lengths: tuple[int, ...] | None = None,
    packed_parents: tuple[int, ...] | None = None,
    **other: object,
) -> tuple[Tensor, None]:
    """Attention output [batch, T, heads, d]: of a packed row (`packed_lengths`), or of sequences of one length."""
    if attention_mask is not None or key.shape[2] != query.shape[2]:
        raise ValueError(f"exact attention of {type(module).__name__} takes packed sequences, neither masks nor caches")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    lengths = packed_lengths or (query.shape[2],)
    return torch.stack(
        [
            PackedAttention.apply(packed_attention, *row, lengths, scale, packed_parents)
            for row in zip(query, key, value, strict=True)
        ]
    ), None


def _no_mask(*, attention_mask: Tensor | None = None, **other: object) -> Tensor | None:
    return attention_mask


AttentionInterface.register(EXACT_ATTENTION, exact_attention)
AttentionMaskInterface.register(EXACT_ATTENTION, _no_mask)
