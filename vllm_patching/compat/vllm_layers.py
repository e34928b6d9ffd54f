"""vLLM's layers on CPUs: what they multiply by, so that new weights reach them, and which rows they compute."""

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from packaging.version import Version
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

from vllm_patching import vllm_types
from vllm_patching.compat.vllm_ops import cpu_kernels
from vllm_patching.kv_cache.shared_rows import RowSharing, SharedRows, equal_rows
from vllm_patching.memory import packed
from vllm_patching.version import VERSION

__all__ = [
    "ColumnParallelLinear",
    "LinearBase",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RoutedExperts",
    "RowParallelLinear",
    "UnquantizedFusedMoEMethod",
    "VocabParallelEmbedding",
]

ROW_INPUTS = ("input_ids", "positions")  # of a model: one for each row


def on_cpu() -> bool:
    return current_platform.is_cpu()


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


@functools.cache
def share_rows() -> None:
    """Compute rows that are alike once per pass, as shared_rows.py finds them, where all that mixes rows is attention.

    The model and its attention run on the distinct rows; each request's keys and values are written for all of them.
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    run, attend, schedule = GPUModelRunner._model_forward, Attention.forward, CPUAttentionMetadataBuilder.build
    sharing = RowSharing()
    schedules: dict[int, Callable[[SharedRows], object]] = {}  # by the identity of the coming pass's metadata
    shared: list[torch.Tensor] = []  # the pass under way: the place of each row among the distinct ones

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> object:
        every = schedule(self, common_prefix_len, common_attn_metadata, fast_build)
        schedules[id(every)] = lambda rows: schedule(self, 0, _requests_of(rows, common_attn_metadata), fast_build)
        return every

    def model_forward(self: vllm_types.ModelRunner, **inputs: Any) -> object:
        context: Any = get_forward_context()
        every, rows = context.attn_metadata, _alike(sharing, self, inputs)
        try:
            if rows is None or not isinstance(every, dict):
                return run(self, **inputs)
            distinct, place = torch.from_numpy(rows.distinct), torch.from_numpy(rows.place)
            of_rows = {number: schedules[number](rows) for number in {*map(id, every.values())}}
            context.attn_metadata = {layer: of_rows[id(each)] for layer, each in every.items()}
            shared.append(place)
            chosen = {name: inputs[name].index_select(0, distinct) for name in ROW_INPUTS}
            return cast(torch.Tensor, run(self, **inputs | chosen)).index_select(0, place)
        finally:
            context.attn_metadata = every
            shared.clear()
            schedules.clear()

    def attention_forward(self: Any, query: torch.Tensor, key: Any, value: Any, *more: Any, **named: Any) -> object:
        if shared:
            key, value = (None if each is None else each.index_select(0, shared[0]) for each in (key, value))
        return cast(Any, attend)(self, query, key, value, *more, **named)

    cast(Any, GPUModelRunner)._model_forward, cast(Any, Attention).forward = model_forward, attention_forward
    cast(Any, CPUAttentionMetadataBuilder).build = build


@functools.cache
def share_logits() -> None:
    """Compute the logits of equal hidden states once per pass, where one process has them all: states of several could
    differ by a bit in one alone, which would then wait for others. With LoRA each row has an adapter of its own; vLLM
    then calls this method for another class.
    """
    from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    compute = LogitsProcessor.forward

    def forward(self: Any, lm_head: Any, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        alone = isinstance(self, LogitsProcessor) and get_tensor_model_parallel_world_size() == 1
        rows = equal_rows(hidden_states) if alone else None
        if rows is None:
            return compute(self, lm_head, hidden_states, *more, **named)
        distinct, place = torch.from_numpy(rows.distinct), torch.from_numpy(rows.place)
        logits = compute(self, lm_head, hidden_states.index_select(0, distinct), *more, **named)
        return None if logits is None else logits.index_select(0, place)

    cast(Any, LogitsProcessor).forward = forward


def call_attention_directly(model: torch.nn.Module) -> None:
    """Have the attention layers of an eager model call their backend. The platform of CPUs has them go through torch's
    dispatcher instead, where a compiled model needs a seam; 60 such calls take 2 ms of a pass of 30 layers.
    """
    for layer in model.modules():
        if hasattr(layer, "use_direct_call"):
            cast(Any, layer).use_direct_call = True


def _alike(sharing: RowSharing, runner: vllm_types.ModelRunner, inputs: Mapping[str, Any]) -> SharedRows | None:
    """Find the shared rows of a pass; None, too, for a model or an input of which a row is more than its token."""
    tokens, positions = inputs["input_ids"], inputs["positions"]
    requests = runner.input_batch.num_reqs
    starts = runner.query_start_loc.np[: requests + 1]
    only_tokens = tokens is not None and positions.dim() == 1 and len(tokens) == len(positions) == starts[-1]
    if not only_tokens or any(each is not None for name, each in inputs.items() if name not in ROW_INPUTS):
        return None
    if not _mixes_rows_by_attention_alone(runner):
        return None
    table = runner.input_batch.block_table[0]
    return sharing.of_pass(
        runner.input_batch.req_ids[:requests],
        tokens.numpy(),
        starts,
        runner.input_batch.num_computed_tokens_cpu[:requests],
        table.get_numpy_array()[:requests],
        table.block_size,
    )


def _requests_of(rows: SharedRows, metadata: vllm_types.AttentionMetadata) -> vllm_types.AttentionMetadata:
    """vLLM's common attention metadata of the requests to which the distinct rows belong; the slots, into which keys
    and values are written, remain those of all.
    """
    starts = metadata.query_start_loc.numpy()[: metadata.num_reqs + 1]
    chosen = np.flatnonzero(np.isin(starts[:-1], rows.distinct))
    requests, lengths = torch.from_numpy(chosen), np.diff(starts)[chosen]
    of_rows = copy.copy(metadata)
    of_rows.query_start_loc = torch.from_numpy(np.cumsum([0, *lengths], dtype=starts.dtype))
    of_rows.seq_lens = metadata.seq_lens.index_select(0, requests)
    of_rows.block_table_tensor = metadata.block_table_tensor.index_select(0, requests)
    of_rows.num_reqs, of_rows.num_actual_tokens = len(chosen), len(rows.distinct)
    return of_rows


def _mixes_rows_by_attention_alone(runner: vllm_types.ModelRunner) -> bool:
    from vllm.model_executor.layers.attention import Attention

    config = runner.vllm_config
    return (
        config.model_config.enforce_eager
        and config.lora_config is None
        and config.speculative_config is None
        and config.parallel_config.pipeline_parallel_size == 1
        and len(runner.kv_cache_config.kv_cache_groups) == 1
        and all(type(layer) is Attention for layer in config.compilation_config.static_forward_context.values())
    )


def adapted_layer(model: torch.nn.Module, tensor: str) -> str:
    """The name in vLLM's `model` of the layer to which an adapter's tensor belongs."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    # without its stacking of q, k and v: by a method of either name, or the mapper knows none
    methods = (getattr(mapper, name, None) for name in ("get_rename_mapper", "get_unstacked_mapper"))
    renames = next(filter(None, methods), lambda: mapper)
    return str(parse_fine_tuned_lora_name(tensor, renames())[0])
