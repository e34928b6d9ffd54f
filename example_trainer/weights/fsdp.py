"""A model whose weights, gradients and moments are shared out over the trainer's ranks: by tensor parallelism over the
mesh dimension "tp", if it has one, and by FSDP2 over the others.

    meta model ──split──▶ ──fully_shard──▶ DTensors without storage ──to_empty──▶ each rank reads its own part of the
                                                                                   safetensors

Each decoder layer is gathered for its own forward and backward pass. Embedding, final norm and head are one group, the
root's: the head runs in chunks (policy.py), and tied weights must be gathered together. The layers compute in
`compute_dtype`. The root's group always computes in float32, since the gradients of the head's chunks are summed in the
dtype that it computes in.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from example_trainer.model.files import WeightFiles
from example_trainer.model.loading import ModelError, check_packed_forward, rebuild_buffers
from example_trainer.model.policy import Policy
from example_trainer.model.tensor_parallel import split
from example_trainer.ranks.partition import REPLICATE, SHARD, has_tp, local, part
from example_trainer.weights.lora import name_in_files


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers that are gathered one at a time. Raises ModelError for a family without."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"{type(model).__name__} has no list of decoder layers, so it cannot be spread over several trainer ranks:"
            " use a Llama, Mistral, Qwen2 or Qwen3, or --trainer-ranks 1 --compute-dtype float32 --offload none"
        )
    return layers


def shard(
    policy: Policy,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    reshard_after_forward: bool = True,
    offload: bool = False,
    deadline_s: float = 600.0,
) -> None:
    """Make every parameter a DTensor over `mesh`. Gradients are summed over ranks, not averaged. New groups of
    ranks have this deadline.

    Where tensor parallelism alone shares the weights, in float32 and on their device, FSDP2 has nothing to do: what
    every rank has whole stays a plain tensor.
    """
    device = torch.device(mesh.device_type)
    if has_tp(mesh):
        split(policy.model, mesh, deadline_s)
        mesh = mesh[REPLICATE, SHARD] if REPLICATE in (mesh.mesh_dim_names or ()) else mesh[SHARD]
        if mesh.size() == 1 and dtype is torch.float32 and not offload:
            return
    where = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    of_root = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in decoder_layers(policy.model):
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=mixed, offload_policy=where
        )
        if dtype is not torch.float32:
            layer.register_forward_pre_hook(partial(_in_dtype, dtype), with_kwargs=True)
    fully_shard(policy, mesh=mesh, mp_policy=of_root, offload_policy=where)
    for method in ("logits", "logits_both_ways"):
        register_fsdp_forward_method(policy, method)
    for module in fsdp_modules(policy):  # each, as FSDP2 keeps these settings module by module
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo knows no other


def _in_dtype(dtype: torch.dtype, layer: nn.Module, args: object, kwargs: object) -> object:
    """A layer's inputs in the dtype that it computes in. FSDP2 casts them itself, but up to PyTorch 2.11 not where
    gradient checkpointing computes the layer again.
    """
    return tree_map_only(Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, (args, kwargs))


def fsdp_modules(policy: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP2 gathers."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def reshard(policy: nn.Module) -> None:
    """Give back weights that are still gathered after a forward pass without a backward pass."""
    for module in fsdp_modules(policy):
        module.reshard()


@torch.no_grad()
def load_shards(policy: Policy, files: WeightFiles, device: torch.device, adapter: Mapping[str, Tensor]) -> None:
    """Give a meta model storage on `device`, and this rank's rows, or all: of `adapter`, by parameter name, and of the
    files. Raises ModelError, before there is any storage if the files are another model's.
    """
    for name, parameter in policy.model.named_parameters():
        if name not in adapter:
            files.expect(name_in_files(name), tuple(parameter.shape))
    policy.to_empty(device=device)
    if not fsdp_modules(policy):
        policy.model.tie_weights()  # which the new storage has parted
    rebuild_buffers(policy.model, device)
    for name, parameter in policy.model.named_parameters():
        own = part(parameter)
        local(parameter).copy_(
            own.of(adapter[name]) if name in adapter else files.block(name_in_files(name), own.rows, own.columns)
        )


def expect_packed(policy: Policy, device: torch.device, dtype: torch.dtype, longest: int) -> None:
    """Raise ModelError unless a sharded policy computes packed sequences of up to `longest` tokens as its model does
    each alone. Every rank calls it.
    """
    policy.eval()  # no dropout of an adapter
    check_packed_forward(policy, device, dtype, longest=longest)
    policy.train()
    reshard(policy)
