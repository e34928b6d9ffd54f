"""What a batch-invariant vLLM computes with in place of its own kernels, and what stands in the way."""

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from packaging.version import Version
from vllm.platforms import current_platform

from vllm_patching import vllm_types
from vllm_patching.version import VERSION

KERNEL_WIDTH = 32  # words: each row of the C++ kernels for CPUs is a multiple of their widest vector, of bfloat16


def replace_routing(route: Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Choose experts on CPUs by `route(logits, count, renormalize)`: their shares, and their numbers."""
    if VERSION < Version("0.32"):  # as in keep_plain_experts
        return
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    def chosen(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        shares, numbers = route(router_logits, top_k, renormalize)
        return shares, numbers.to(torch.int32)

    cpu_router._softmax_topk = chosen


def wrap_config_check(check: Callable[[vllm_types.VllmConfig], None]) -> None:
    """Call `check` with vLLM's whole configuration, in every process, once the platform has completed it."""
    platform: Any = type(current_platform)
    complete = platform.check_and_update_config

    def checked(cls: type, config: vllm_types.VllmConfig) -> None:
        complete(config)
        if config.model_config is not None:
            check(config)

    platform.check_and_update_config = classmethod(checked)


def wrap_attention_metadata(change: Callable[[Any], Any]) -> None:
    """Let `change` rewrite the common metadata from which the CPU backend schedules its attention kernel."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    build = CPUAttentionMetadataBuilder.build

    def changed(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> object:
        return build(self, common_prefix_len, change(common_attn_metadata), fast_build)

    cast(Any, CPUAttentionMetadataBuilder).build = changed


def tell_longest_query(longest: Callable[[int, int], int]) -> None:
    """Tell FlashAttention `longest(tokens, head size)` for the longest query of a batch, on CUDA."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    build = FlashAttentionMetadataBuilder.build

    def told(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> object:
        metadata = copy.copy(common_attn_metadata)
        metadata.max_query_len = longest(metadata.max_query_len, self.headdim)
        return build(self, common_prefix_len, metadata, fast_build)

    cast(Any, FlashAttentionMetadataBuilder).build = told


def attend_without_amx() -> None:
    """Make the CPU backend use its vector kernel where it would use the AMX kernel, as it does for half precision."""
    from vllm.v1.attention.backends import cpu_attn

    choose = cpu_attn._get_attn_isa

    def without_amx(*arguments: Any, **named: Any) -> str:
        isa: str = choose(*arguments, **named)
        return "vec" if isa == "amx" else isa

    cast(Any, cpu_attn)._get_attn_isa = without_amx


def replace_rotary(table: Callable[[object, int], object], rotate: Callable[..., None]) -> None:
    """Rotate by `rotate(x, cos, sin)`, in place, with cos | sin from `table(Hugging Face config, positions)`
    [positions, rotary dim].
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import base, linear_scaling_rope, yarn_scaling_rope

    def cos_sin(self: vllm_types.RotaryEmbedding) -> object:
        model = get_current_vllm_config().model_config
        return table(model.hf_config, max(self.max_position_embeddings, model.max_model_len))

    scaled = (linear_scaling_rope.LinearScalingRotaryEmbedding, yarn_scaling_rope.YaRNScalingRotaryEmbedding)
    for rotary in cast(tuple[Any, ...], (base.RotaryEmbeddingBase, *scaled)):
        rotary._compute_cos_sin_cache = cos_sin

    def forward(
        self: vllm_types.RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        angles = self.cos_sin_cache.index_select(0, positions.flatten()).to(query.dtype)
        for x in _side_by_side(query, key):
            rotate(x.view(len(angles), -1, self.head_size), *angles[:, None].chunk(2, -1))
        return query, key

    cast(Any, base.RotaryEmbedding).forward_cpu = forward


def _side_by_side(query: torch.Tensor, key: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Query and key [tokens, heads * size] as one tensor, to rotate them at once, if they are adjacent in rows of one
    product.
    """
    if key is None:
        return (query,)
    one_product = (
        query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr() and query.stride() == key.stride()
    )
    if one_product and key.storage_offset() == query.storage_offset() + query.shape[-1]:
        return (query.as_strided((len(query), query.shape[-1] + key.shape[-1]), query.stride()),)
    return query, key


def replace_norm_and_activation(
    norm: Callable[..., object], silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """`norm(module, x, residual=None)` for RMSNorm on CPUs, `silu_and_mul(x)` for SiluAndMul."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    norms: Any = RMSNorm
    norms.forward_cpu = norms.forward_native = norm
    activations: Any = SiluAndMul
    activations.forward_cpu = lambda self, x: silu_and_mul(x)
    activations.forward_native = staticmethod(silu_and_mul)


def fuse_norm() -> None:
    """Have RMSNorm call vLLM's C++ kernels on CPUs too, where it computes them by up to eight operations of torch:
    threads wait for each other after each. A compiled model keeps those, which the compiler fuses.
    """
    import vllm._custom_ops  # noqa: F401  loads the kernels behind torch.ops._C
    from vllm.model_executor.layers.layernorm import RMSNorm

    def norm(self: vllm_types.RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None) -> object:
        weight, last = self.weight.data, x.shape[-1]
        is_plain = self.variance_size_override is None and weight.dtype == x.dtype and last % KERNEL_WIDTH == 0
        if not is_plain or (residual is not None and not (x.is_contiguous() and residual.is_contiguous())):
            return self.forward_native(x, residual)
        if residual is None:
            normed = torch.empty(x.shape, dtype=x.dtype)
            torch.ops._C.rms_norm(normed, x.contiguous(), weight, self.variance_epsilon)
            return normed
        torch.ops._C.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)
        return x, residual

    cast(Any, RMSNorm).forward_cpu = norm


def cuda_kernels(config: Any, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Collect what vLLM calls on CUDA with VLLM_BATCH_INVARIANT=1 for a model of this Hugging Face configuration,
    its rotary table made on `device` as vLLM's loader makes it: the fields of batch_invariant/cuda.py's CudaKernels.
    """
    import vllm._custom_ops  # noqa: F401  loads the kernels behind torch.ops._C
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import layernorm, linear
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    # the module of these functions moved in 0.27..0.32; its users import them by name throughout
    home = importlib.import_module(linear.linear_batch_invariant.__module__)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    with set_current_vllm_config(VllmConfig()), torch.device(device):
        rotary = get_rope(
            head_size,
            max_position=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
            dtype=dtype,
        )
    return {
        "linear": linear.linear_batch_invariant,
        "rms_norm": layernorm.rms_norm_batch_invariant,
        "log_softmax": partial(home.log_softmax, dim=-1),
        "write_silu_and_mul": torch.ops._C.silu_and_mul,
        "rotary": rotary,
        "flash_attention": flash_attn_varlen_func,
        "flash_attention_version": get_flash_attn_version(head_size=head_size),
    }


def add_before_norm() -> None:
    """Make RMSNorm on CUDA add the residual, round the sum, and then norm each row by itself.

    vLLM's mode uses one fused kernel for both. In releases of this range, that kernel sums a row by blocks of threads
    whose size depends on the number of rows; the norm without a residual has one block size.
    """
    from vllm.model_executor.layers.layernorm import RMSNorm

    norm = RMSNorm.forward_cuda

    def separate(self: vllm_types.RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None) -> object:
        if residual is None:
            return norm(self, x)
        total = x + residual
        return norm(self, total), total

    cast(Any, RMSNorm).forward_cuda = separate


def why_not_exact_on_cuda(config: vllm_types.VllmConfig, block_size: int) -> str | None:
    """The first setting of vLLM's whole configuration under which its CUDA kernels are not those of `cuda_kernels`,
    or None.
    """
    model, attention = config.model_config, config.attention_config
    backend = None if attention.backend is None else attention.backend.name
    asked = {
        "GPUs that are not NVIDIA's": not current_platform.is_cuda(),
        "torch.compile: give --enforce-eager": int(config.compilation_config.mode or 0) != 0,
        f"--dtype {model.dtype} on CUDA: give bfloat16": model.dtype != torch.bfloat16,
        f"--attention-backend {backend} on CUDA: give FLASH_ATTN": backend != "FLASH_ATTN",
        f"FlashAttention {attention.flash_attn_version} by hand": attention.flash_attn_version is not None,
        f"--block-size {config.cache_config.block_size} on CUDA: give {block_size}": config.cache_config.block_size
        != block_size,
        "cascade attention": not model.disable_cascade_attn,
        "vLLM's second model runner on CUDA: set VLLM_USE_V2_MODEL_RUNNER=0": config.use_v2_model_runner,
    }
    return next((name for name, wanted in asked.items() if wanted), None)
