"""Makes a transformers model compute on a GPU what vLLM computes there with VLLM_BATCH_INVARIANT=1, with gradients.

    attention   q|k|v product ─▶ norms of q and k (Qwen3) ─▶ rotation ─▶ FlashAttention over pages ─▶ o product
    mlp         gate|up product ─▶ silu(gate) * up ─▶ down product
    head        a product as wide as vLLM pads the vocabulary, cut

Parameters, names and checkpoints do not change. Products that vLLM fuses are fused here too, because its kernel's tiles
depend on their width. The kernels have the interface of vllm_patching.batch_invariant.cuda.CudaKernels; backward passes
are those of the plain formulas. Run on an H100 (docs/benchmarks/gpu.md); tests use plain torch functions as kernels.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from example_trainer.exact.functions import Kernel, Linear, PackedAttention
from vllm_patching.batch_invariant.switch import NotInvariant

VOCABULARY_MULTIPLE = 64  # to which vLLM pads the rows of an output head


class Kernels(Protocol):
    """What the exact forwards call of vllm_patching.batch_invariant.cuda.CudaKernels."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, /) -> Tensor: ...

    def silu_and_mul(self, x: Tensor, /) -> Tensor: ...

    def rotary_table(self) -> Tensor: ...

    def rotate(self, positions: Tensor, query: Tensor, key: Tensor, /) -> tuple[Tensor, ...]: ...

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        scale: float,
        contexts: tuple[int, ...] | None = None,
        /,
    ) -> Tensor: ...


def exchange(model: PreTrainedModel, kernels: Kernels, dtype: torch.dtype) -> None:
    """Give each module of a covered model its exact forward in `dtype`. Raises NotInvariant for a layer of another
    kind.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        kind = type(module).__name__
        forward: object
        if kind == "Linear":
            forward = partial(_product, kernels, (module,), multiple=VOCABULARY_MULTIPLE if module is head else 1)
        elif kind == "Embedding":
            forward = partial(_embedding, module, dtype)
        elif kind.endswith("RMSNorm"):
            forward = partial(_norm, kernels, module)
        elif kind.endswith("Attention"):
            forward = partial(_attention, kernels, module)
        elif kind.endswith("MLP"):
            forward = partial(_mlp, kernels, module)
        elif next(module.parameters(recurse=False), None) is not None:
            raise NotInvariant(
                f"--batch-invariant does not cover layers of type {kind}; see docs/bit-exactness.md, or drop the flag"
            )
        else:
            continue
        module.forward = forward


def _product(kernels: Kernels, layers: Sequence[Any], x: Tensor, *, multiple: int = 1) -> Tensor:
    # the weights of all `layers`, one below the other, and rows of zeros up to a multiple
    weight = _stacked([layer.weight for layer in layers], x.dtype)
    bias = None if layers[0].bias is None else _stacked([layer.bias for layer in layers], x.dtype)
    rows = weight.shape[0]
    missing = -rows % multiple
    if missing:
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    result: Tensor = Linear.apply(kernels.linear, x, weight, bias)
    return result[..., :rows]


def _stacked(parameters: list[Tensor], dtype: torch.dtype) -> Tensor:
    return (
        parameters[0].to(dtype)
        if len(parameters) == 1
        else torch.cat([parameter.to(dtype) for parameter in parameters])
    )


def _embedding(module: Any, dtype: torch.dtype, ids: Tensor) -> Tensor:
    return F.embedding(ids, module.weight).to(dtype)


def _norm(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    epsilon = module.variance_epsilon
    result: Tensor = Kernel.apply(
        lambda rows, weight: kernels.rms_norm(rows, weight, epsilon),
        lambda rows, weight: rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon) * weight,
        x,
        module.weight.to(x.dtype),
    )
    return result


def _mlp(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    gate_up = _product(kernels, (module.gate_proj, module.up_proj), x)
    return cast(Tensor, module.down_proj(Kernel.apply(kernels.silu_and_mul, _silu_and_mul, gate_up)))


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _attention(
    kernels: Kernels,
    module: Any,
    hidden_states: Tensor,  # [rows, T, d]
    *,
    position_ids: Tensor,  # [rows or 1, T]
    attention_mask: Tensor | None = None,
    packed_lengths: tuple[int, ...] | None = None,  # of one packed row; else each row is one sequence
    packed_parents: tuple[int, ...] | None = None,
    past_key_values: object = None,
    **other: object,
) -> tuple[Tensor, None]:
    if attention_mask is not None or past_key_values is not None:
        raise ValueError(f"exact attention of {type(module).__name__} takes packed sequences, neither masks nor caches")
    rows, length = hidden_states.shape[:2]
    positions = position_ids.expand(rows, length).flatten()
    projections = (module.q_proj, module.k_proj, module.v_proj)
    together = _product(kernels, projections, hidden_states.flatten(0, 1))
    split = together.split([layer.out_features for layer in projections], -1)
    query, key, value = (part.unflatten(-1, (-1, module.head_dim)) for part in split)  # [N, heads, d]
    norms = dict(module.named_children())
    query, key = (norms[name](x) if name in norms else x for name, x in (("q_norm", query), ("k_norm", key)))
    query, key = Kernel.apply(
        partial(kernels.rotate, positions), partial(_rotate, kernels.rotary_table(), positions), query, key
    )
    output = PackedAttention.apply(
        kernels.attention,
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        packed_lengths or (length,) * rows,
        module.scaling,
        packed_parents,
    )
    return module.o_proj(output.flatten(1)).unflatten(0, (rows, length)), None


def _rotate(table: Tensor, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    # tensors are [N, heads, d], and `table` is cos | sin, [positions, d]
    cos, sin = table[positions].to(tensors[0].dtype)[:, None].chunk(2, -1)
    return tuple(
        torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        for first, second in (tensor.chunk(2, -1) for tensor in tensors)
    )


def override_log_softmax(kernels: Any, dispatch_key: str = "CUDA") -> torch.library.Library:
    """Let torch's log_softmax be the mode's kernel, as vLLM does in its own processes. It lasts as long as what is
    returned.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "_log_softmax",
        lambda x, dim, half_to_float: kernels.log_softmax(x.float() if half_to_float else x),
        dispatch_key,
    )
    return library
