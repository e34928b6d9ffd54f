"""A Hugging Face model laid out as vLLM's ranks would hold it, for tests of the trainer's side; no vLLM."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from atroposlib.processes.identity import this_process
from atroposlib.wire.bridge import Shard, SharedRank, align


def ranks_of(
    model: PreTrainedModel, tp: int, dtype: torch.dtype = torch.float32
) -> tuple[list[SharedRank], list[Tensor]]:
    """(bridge_attach replies, arenas) of `tp` ranks serving `model`, whose vocabulary is padded to a multiple of 64."""
    fused = [_fused(model, rank, tp) for rank in range(tp)]
    return list(
        map(list, zip(*(_arena(rank, parameters, dtype) for rank, parameters in enumerate(fused)), strict=True))
    )  # type: ignore[return-value]


def _fused(model: PreTrainedModel, rank: int, tp: int) -> dict[str, list[tuple[Shard, Tensor]]]:
    """vLLM's parameters of one rank: the shards each is made of, with their values."""
    parameters: dict[str, list[tuple[Shard, Tensor]]] = {}
    kv_heads = model.config.num_key_value_heads
    for name, tensor in model.named_parameters():
        leaf = name.split(".")[-2]
        parts, index, dim = tp, rank, 0
        if leaf in ("k_proj", "v_proj"):
            parts = min(tp, kv_heads)
            index = rank * parts // tp
        elif leaf in ("o_proj", "down_proj") and tensor.dim() == 2:
            dim = 1
        elif leaf in ("o_proj", "down_proj") or "norm" in leaf:  # every rank holds the same
            parts, index = 1, 0
        if leaf in ("embed_tokens", "lm_head"):
            size = math.ceil(tensor.shape[0] / 64) * 64 // tp
            start, end = min(rank * size, tensor.shape[0]), min((rank + 1) * size, tensor.shape[0])
        else:
            size = tensor.shape[dim] // parts
            start, end = index * size, (index + 1) * size
        vllm_name = name
        for fused, leaves in {
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        }.items():
            if leaf in leaves:
                vllm_name = name.replace(leaf, fused)
        row = sum(value.shape[0] for _, value in parameters.get(vllm_name, [])) if dim == 0 else 0
        shard = Shard(name, vllm_name, dim, row, end - start, start, tuple(tensor.shape))
        parameters.setdefault(vllm_name, []).append((shard, tensor.detach().narrow(dim, start, end - start)))
        if leaf in ("embed_tokens", "lm_head"):
            padding = torch.full((size - (end - start), tensor.shape[1]), 7.0)
            parameters[vllm_name].append((Shard("", vllm_name, 0, end - start, len(padding), 0, ()), padding))
    return parameters


def _arena(
    rank: int, parameters: dict[str, list[tuple[Shard, Tensor]]], dtype: torch.dtype
) -> tuple[SharedRank, Tensor]:
    layout, offset, values = {}, 0, {}
    for vllm_name, parts in parameters.items():
        values[vllm_name] = torch.cat([value for _, value in parts], 0).to(dtype).contiguous()
        offset = align(offset)
        layout[vllm_name] = (offset, tuple(values[vllm_name].shape), str(dtype).removeprefix("torch."))
        offset += values[vllm_name].nbytes
    buffer = torch.zeros(offset, dtype=torch.uint8)
    for vllm_name, value in values.items():
        start = layout[vllm_name][0]
        buffer[start : start + value.nbytes] = value.view(-1).view(torch.uint8)
    shards = [shard for parts in parameters.values() for shard, _ in parts if shard.name]
    return SharedRank(rank=rank, nbytes=offset, process=this_process(), layout=layout, shards=shards), buffer
