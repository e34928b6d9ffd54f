"""What a vLLM server with VLLM_BATCH_INVARIANT=1 computes on a GPU, as functions of tensors. They are vLLM's own,
called as vLLM calls them.

The trainer calls them through example_trainer/exact/cuda.py. Forward only. Written by reading vLLM 0.26, 0.32 and
0.33; run on an H100 with 0.26 (docs/benchmarks/gpu.md).

    linear        one Triton kernel; its tiles depend on the weight's shape, so fused products (q|k|v, gate|up) stay
                  fused
    rms_norm      one Triton kernel, one program per row; of a sum, once the sum is rounded (add_before_norm)
    silu_and_mul, rotate                 vLLM's elementwise kernels, the rotary table by vLLM's formula on the GPU
    attention     FlashAttention over a paged cache with pages of the server's size, the context never split
    log_softmax   the Triton kernel that the mode registers for torch's own
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

import torch
from torch import Tensor

from vllm_patching import vllm_types
from vllm_patching.batch_invariant.attention import BLOCK, pages
from vllm_patching.batch_invariant.switch import NotInvariant, switch_on


@dataclass(frozen=True)
class CudaKernels:
    """Functions of plain tensors; N is the number of tokens. vLLM's functions with other arguments are fields, which
    methods call.
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [..., in], weight [out, in], bias [out]: [..., out]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x [..., d], weight [d], epsilon
    log_softmax: Callable[[Tensor], Tensor]  # logits [rows, vocabulary], float32: log-probabilities
    write_silu_and_mul: Callable[[Tensor, Tensor], None]  # output [N, d], x [N, 2 d]
    rotary: vllm_types.RotaryEmbedding  # `forward_cuda(positions, query, key)` rotates in place by `cos_sin_cache`
    flash_attention: Annotated[Callable[..., Tensor], "vllm.v1.attention.backends.fa_utils.flash_attn_varlen_func"]
    flash_attention_version: int | None  # as vLLM chooses it for this GPU and head size

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [N, 2 d], gate before up: silu(gate) * up, [N, d]."""
        output = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        self.write_silu_and_mul(output, x.contiguous())
        return output

    def rotary_table(self) -> Tensor:
        """cos | sin, [positions, head size]."""
        return cast(Tensor, self.rotary.cos_sin_cache)

    def rotate(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """positions [N], query [N, heads, d] and key [N, key heads, d], rotated; the arguments stay as they are."""
        rotated = self.rotary.forward_cuda(positions, query.flatten(1).clone(), key.flatten(1).clone())
        return rotated[0].view_as(query), rotated[1].view_as(key)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        scale: float,
        contexts: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Causal within each sequence of a row. query [N, heads, d], key and value [N, key heads, d]: [N, heads, d].
        `contexts` are the keys of each sequence where it has more than its queries, which are the last.
        """
        contexts = contexts or lengths
        table, slots, blocks = pages(contexts)
        ends = torch.tensor(contexts, dtype=torch.int32, device=query.device)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=query.device)
        starts[1:] = torch.tensor(lengths, device=query.device).cumsum(0)
        slots = slots.to(query.device)
        caches = [
            tensor.new_zeros(blocks * BLOCK, *tensor.shape[1:]).index_copy_(0, slots, tensor) for tensor in (key, value)
        ]
        key_cache, value_cache = (cache.unflatten(0, (blocks, BLOCK)) for cache in caches)
        return self.flash_attention(
            q=query.contiguous(),
            k=key_cache,
            v=value_cache,
            cu_seqlens_q=starts,
            seqused_k=ends,
            max_seqlen_q=longest_query(max(lengths), query.shape[-1]),
            max_seqlen_k=max(contexts),
            softmax_scale=scale,
            causal=True,
            window_size=[-1, -1],
            softcap=0.0,
            block_table=table.to(query.device),
            num_splits=1,
            fa_version=self.flash_attention_version,
        )


def longest_query(tokens: int, head_size: int) -> int:
    """Return the longest query of a batch, as FlashAttention 3 is told so that it takes 128 keys at a time, whatever
    the batch.

    Where it knows of one token it drops the causal mask, and takes more keys for heads below 64. For heads of 64 it
    takes 192 while the longest query and the heads that share its keys make at most 64 rows. Then a context of more
    than 128 tokens has other bits when it is decoded than in a prefill. (tile_size.h and heuristics.h of vLLM's fork of
    FlashAttention; heads of 32, 64 and 128 seen on an H100.)
    """
    return max(65 if head_size == 64 else 2, tokens)


def vllm_kernels(config: object, dtype: torch.dtype, device: torch.device) -> CudaKernels:
    """vLLM's for this Hugging Face configuration. Raises NotInvariant where the environment or vLLM cannot do it."""
    switch_on(os.environ, cpu=False)  # vLLM's Python and its C++ read VLLM_BATCH_INVARIANT when they are first asked
    try:
        from vllm_patching import version

        version.check_version()
        from vllm_patching.compat import vllm_kernels

        return CudaKernels(**vllm_kernels.cuda_kernels(config, dtype, device))
    except (ImportError, KeyError, RuntimeError) as error:  # not installed, not importable, UnsupportedVllm
        raise NotInvariant(
            f"--batch-invariant computes with vLLM's kernels, and vLLM cannot be used here: {error}"
        ) from error
