"""Makes a vLLM process compute batch-invariantly. Called by vLLM's general plugin in each of its processes, before a
model exists.

On CUDA vLLM's own mode does this; one kernel of that mode is replaced, attention is told of a longer query than there
is where it would decode by other tiles, and settings that the trainer cannot match are refused. On CPUs seven
replacements, each of one function or method of vLLM, make it compute with kernels.py (all through compat/):
    linear layers, output head   kernels.linear, by a packed copy of the plain weight, which can still be exchanged
                                 (../memory/packed.py)
    attention metadata           each request's queries cut into tiles at absolute positions; the kernel itself stays,
                                 but for AMX's
    rotary embedding             kernels.rotate, transformers' formula, on transformers' table
    RMS norm, SiLU               kernels.rms_norm, kernels.silu
    router, experts              kernels.route, kernels.experts
"""

import copy
from collections.abc import Callable
from functools import cache, partial

from torch import Tensor

from vllm_patching import vllm_types
from vllm_patching.batch_invariant import coverage, kernels, self_check
from vllm_patching.batch_invariant.attention import BLOCK
from vllm_patching.batch_invariant.cuda import longest_query
from vllm_patching.batch_invariant.switch import NotInvariant
from vllm_patching.compat import vllm_engine, vllm_kernels, vllm_layers
from vllm_patching.memory import packed

log = vllm_engine.init_logger("vllm.atropos_exact")


@cache
def install() -> None:
    """Check the model, replace what must be replaced; idempotent."""
    vllm_kernels.wrap_config_check(check_model)
    if not vllm_layers.on_cpu():
        vllm_kernels.add_before_norm()
        vllm_kernels.tell_longest_query(longest_query)
        log.info(
            "[vLLM Patch] ✓ Batch-invariant: vLLM's own kernels, the residual added before each norm, decoding in the"
            " attention tiles of prefill"
        )
        return
    vllm_layers.keep_plain_linears(_linear_for)
    vllm_kernels.wrap_attention_metadata(_tiled)
    vllm_kernels.attend_without_amx()
    vllm_kernels.replace_rotary(kernels.rotary_table, kernels.rotate)
    vllm_kernels.replace_norm_and_activation(_norm, _silu_and_mul)
    vllm_layers.keep_plain_experts(_experts)
    vllm_kernels.replace_routing(kernels.route)
    log.info("[vLLM Patch] ✓ Batch-invariant kernels installed")


def check_model(config: vllm_types.VllmConfig) -> None:
    """Raise NotInvariant for a model or setting of vLLM that is not covered. `config` is vLLM's own, resolved."""
    model, parallel = config.model_config, config.parallel_config
    device = "cpu" if vllm_layers.on_cpu() else "cuda"
    reason = coverage.why_not_exact(model.hf_config, tp_size=parallel.tensor_parallel_size, device=device)
    if device == "cuda":
        reason = reason or vllm_kernels.why_not_exact_on_cuda(config, BLOCK)
    asked = {
        "torch.compile (--no-enforce-eager)": device == "cpu" and not model.enforce_eager,
        f"--quantization {model.quantization}": model.quantization,
        f"--kv-cache-dtype {config.cache_config.cache_dtype}": config.cache_config.cache_dtype != "auto",
        "LoRA adapters": config.lora_config,
        "speculative decoding": config.speculative_config,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
    }
    reason = reason or next((name for name, wanted in asked.items() if wanted), None)
    if reason:
        raise NotInvariant(f"--batch-invariant does not cover {reason}; see docs/bit-exactness.md, or drop the flag")


def _linear_for(weight: Tensor) -> Callable[..., Tensor]:
    """The function that computes a layer with this weight. Raises NotInvariant if this machine cannot."""
    self_check.check_weight(weight)
    if vllm_layers.has_onednn_linear() and self_check.packing_is_exact(weight, pack):
        return packed.PackedLinear(kernels.linear, pack)
    log.warning_once(
        "Packed weights of shape %s give other bits on this machine: using plain ones, which is slower",
        tuple(weight.shape),
    )
    return kernels.linear


def _experts(x: Tensor, w13: Tensor, w2: Tensor, *routed: Tensor, **how: object) -> Tensor:
    """kernels.experts. Raises NotInvariant if this machine cannot."""
    self_check.check_weight(w13[0])
    self_check.check_weight(w2[0])
    return kernels.experts(x, w13, w2, *routed)


def pack(weight: Tensor) -> packed.Product:
    """kernels.linear, computed by vLLM's own product with a float32 copy of this weight that oneDNN packed."""
    return partial(kernels.linear, by=vllm_layers.onednn_linear(weight.float()))


def _tiled(metadata: vllm_types.AttentionMetadata) -> vllm_types.AttentionMetadata:
    """vLLM's common attention metadata, with one pseudo request per tile."""
    count = metadata.num_reqs
    tiled = copy.copy(metadata)
    tiled.query_start_loc, tiled.seq_lens, tiled.block_table_tensor = kernels.tile_queries(
        metadata.query_start_loc[: count + 1], metadata.seq_lens[:count], metadata.block_table_tensor[:count]
    )
    tiled.num_reqs = len(tiled.seq_lens)
    tiled.max_query_len = min(metadata.max_query_len, kernels.QUERY_TILE)
    return tiled


def _norm(module: vllm_types.RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return kernels.rms_norm(x, module.weight.data, module.variance_epsilon)
    total = x + residual
    return kernels.rms_norm(total, module.weight.data, module.variance_epsilon), total


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return kernels.silu(gate).mul_(up)
