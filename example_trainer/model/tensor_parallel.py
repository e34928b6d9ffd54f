"""A model whose layers are split over the ranks of the mesh dimension "tp": its plan (tp_plans.py) carried out.

    hidden ──▶ enter ──▶ own columns ──▶ own heads ──▶ own rows ──▶ leave ──▶ hidden + result
               backward: sum over ranks                             forward: sum over ranks

A split parameter is a DTensor with `Shard` along "tp"; what is computed with it takes this rank's part as a plain
tensor, so that attention, kernels and FSDP2 see ordinary layers. Everything else is whole on every rank, computed
alike. Two kinds of whole parameters are the exception: what a rank applies to its own heads alone (norms of queries and
keys, a half of each LoRA pair) has only a part of its gradient, which `sum_partial_gradients` sums once, before
clipping. Of fewer key-value heads than ranks, neighbours hold the same one, as in vLLM, and each computes it for its
own queries. So its gradient is a sum over these neighbours, which is made there, too.
"""

from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft.tuners.lora import Linear as AdaptedLinear
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from example_trainer.memory.tp_plans import PLANS, family_refusal, size_refusal, sizes
from example_trainer.model.loading import ModelError
from example_trainer.ranks.partition import COPIES, HEADS, TP, copies, local


class _Group(Protocol):
    group: dist.ProcessGroup


class _Columns(Protocol):
    columns: slice


class _Enter(torch.autograd.Function):
    """Whole hidden states as they are; of their gradient every rank has a part."""

    @staticmethod
    def forward(ctx: _Group, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: _Group, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.clone(memory_format=torch.contiguous_format)  # autograd may have given others the same tensor
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class _Leave(torch.autograd.Function):
    """The sum of what the ranks have; each has all of its gradient."""

    @staticmethod
    def forward(ctx: object, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Joined(torch.autograd.Function):
    """The ranks' columns [..., n / ranks] side by side, [..., n]."""

    @staticmethod
    def forward(ctx: _Columns, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.columns = slice(dist.get_rank(group) * part.shape[-1], (dist.get_rank(group) + 1) * part.shape[-1])
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: _Columns, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., ctx.columns], None


def expect_divisible(model: PreTrainedModel, tp: int) -> None:
    """Raise ModelError, which names the remedy, for a model that `tp` ranks cannot split."""
    config, name = model.config.get_text_config(), type(model).__name__
    why = family_refusal(config.model_type, name) or size_refusal(
        sizes(config.num_attention_heads, config.num_key_value_heads, config.intermediate_size), tp, name
    )
    if why:
        raise ModelError(why)


def split(model: PreTrainedModel, ranks: DeviceMesh, deadline_s: float) -> None:
    """Make this rank's part of every split parameter of a meta model a DTensor over "tp" of the ranks' mesh, and have
    the modules compute with it. New groups of ranks have this deadline. Raises ModelError.
    """
    mesh = ranks[TP]
    expect_divisible(model, mesh.size())
    plan, group = PLANS[model.config.model_type], mesh.get_group()
    kv_heads = model.config.num_key_value_heads
    of_heads = _over_heads(ranks, kv_heads, deadline_s) if kv_heads < mesh.size() else mesh
    for layer in cast(nn.ModuleList, model.base_model.layers):
        for name in plan.columns:
            _split_columns(layer.get_submodule(name), of_heads if name in plan.key_values else mesh)
        cast(Any, layer.self_attn).num_key_value_groups = model.config.num_attention_heads // max(kv_heads, mesh.size())
        for name in plan.rows:
            module = layer.get_submodule(name)
            _split_rows(module, mesh, f"{type(model).__name__}'s {name}")
            module.register_forward_hook(partial(_leave, group=group))
        for name in plan.enter:
            layer.get_submodule(name).register_forward_pre_hook(partial(_enter, group=group), with_kwargs=True)
    _split_vocabulary(model, mesh)


def _over_heads(ranks: DeviceMesh, kv_heads: int, deadline_s: float) -> DeviceMesh:
    """The ranks along "tp", the last dimension, as key-value heads x copies. Every rank of the mesh calls this."""
    *names, _ = ranks.mesh_dim_names or ()
    grid = ranks.mesh.reshape(*ranks.shape[:-1], kv_heads, -1)
    made = [
        dist.new_subgroups_by_enumeration(
            grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist(), timeout=timedelta(seconds=deadline_s)
        )[0]
        for dim in (grid.ndim - 2, grid.ndim - 1)
    ]
    groups = [*map(ranks.get_group, names), *made]
    whole = DeviceMesh.from_group(groups, ranks.device_type, mesh=grid, mesh_dim_names=(*names, HEADS, COPIES))
    return whole[HEADS, COPIES]


def _enter(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], *, group: dist.ProcessGroup
) -> tuple[tuple[object, ...], dict[str, object]]:
    if args:
        return (_Enter.apply(args[0], group), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _Enter.apply(kwargs["hidden_states"], group)}


def _leave(module: nn.Module, args: object, output: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Leave.apply(output, group))


def _split_columns(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    for linear in (module.base_layer, *module.lora_B.values()) if isinstance(module, AdaptedLinear) else (module,):
        _compute_with_part(linear, mesh, 0)


def _split_rows(module: torch.nn.Module, mesh: DeviceMesh, name: str) -> None:
    for linear in (module.base_layer, *module.lora_A.values()) if isinstance(module, AdaptedLinear) else (module,):
        if linear.bias is not None:
            raise ModelError(f"--tp-size cannot split {name}, which adds a bias to a sum over ranks: give --tp-size 1")
        _compute_with_part(linear, mesh, 1)


def _compute_with_part(linear: Any, mesh: DeviceMesh, dim: int) -> None:
    linear.weight = _part(linear.weight, mesh, dim)
    if linear.bias is not None:
        linear.bias = _part(linear.bias, mesh, 0)
    linear.forward = partial(_linear, linear)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, local(module.weight), None if module.bias is None else local(module.bias))


def _part(parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """Return this rank's part along the first dimension of the mesh, the same along another."""
    own = parameter.detach().chunk(mesh.size(0), dim)[mesh.get_local_rank(0)].contiguous()
    placements = [Shard(dim), *(Replicate() for _ in range(1, mesh.ndim))]
    whole = DTensor.from_local(own, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _split_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Embedding and head by rows of the vocabulary, if the ranks divide it; else every rank has both whole."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if embedding.weight.shape[0] % mesh.size():
        return
    tied, group = head.weight is embedding.weight, mesh.get_group()
    embedding.weight = _part(embedding.weight, mesh, 0)
    embedding.forward = partial(_embed, embedding, group)
    if tied:
        head.weight, head.forward = embedding.weight, partial(_linear, head)
    else:
        _compute_with_part(head, mesh, 0)
    head.register_forward_pre_hook(lambda module, args: (_Enter.apply(args[0], group),))
    head.register_forward_hook(lambda module, args, part: _Joined.apply(part, group))


def _embed(module: nn.Embedding, group: dist.ProcessGroup, ids: Tensor) -> Tensor:
    weight = local(module.weight)
    start = dist.get_rank(group) * weight.shape[0]
    others = (ids < start) | (ids >= start + weight.shape[0])
    own = F.embedding((ids - start).masked_fill(others, 0), weight)
    return cast(Tensor, _Leave.apply(own.masked_fill(others[..., None], 0), group))


def partial_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The trained parameters that are whole on every rank, but whose gradient is a part of a sum over "tp"."""
    plan = PLANS[model.config.model_type]

    def has_part(name: str) -> bool:
        module = name.rpartition(".")[0]
        adapted, _, half = module.partition(".lora_")  # of a pair, the half that is whole
        whole_halves = {"A": plan.columns, "B": plan.rows}
        return module.endswith(plan.norms) or adapted.endswith(whole_halves.get(half[:1], ()))

    return [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and has_part(name)]


@torch.no_grad()
def sum_partial_gradients(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Sum them over "tp", and those of keys and values over the copies of their heads, once for all micro-batches of an
    update: they were summed over "shard" already, if at all.
    """
    _sum_gradients(partial_parameters(model), mesh.get_group(TP))
    copied = [parameter for parameter in model.parameters() if parameter.requires_grad and copies(parameter) > 1]
    if copied:
        _sum_gradients(copied, cast(DTensor, copied[0]).device_mesh.get_group(COPIES))


def _sum_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, whole in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(whole.view_as(gradient))
