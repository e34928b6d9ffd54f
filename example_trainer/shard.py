"""A model whose weights, gradients and moments are sharded over the trainer's ranks by FSDP2.

    meta model ──fully_shard──▶ DTensors without storage ──to_empty──▶ each rank reads its own rows of the safetensors

Each decoder layer is gathered for its own forward and backward pass. Embedding, final norm and head are one group, the
root's: the head runs in chunks (policy.py), and tied weights must be gathered together. The layers compute in
`compute_dtype`. The root's group always computes in float32, since the gradients of the head's chunks are summed in the
dtype that it computes in.
"""

from collections.abc import Mapping

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
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from example_trainer.adapters import name_in_files
from example_trainer.model import ModelError, check_packed_forward, rebuild_buffers
from example_trainer.policy import Policy
from example_trainer.weights.files import WeightFiles


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """What is gathered one at a time. Raises ModelError for a family without."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"{type(model).__name__} has no list of decoder layers, so it cannot be spread over several trainer ranks:"
            " use a Llama, Mistral, Qwen2 or Qwen3, or --trainer-ranks 1 --compute-dtype float32 --offload none"
        )
    return layers


def shard(
    policy: Policy, mesh: DeviceMesh, *, dtype: torch.dtype, reshard_after_forward: bool = True, offload: bool = False
) -> None:
    """Make every parameter a DTensor, rows over `mesh`. Gradients are summed over ranks, not averaged."""
    device = torch.device(mesh.device_type)
    where = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    of_root = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in decoder_layers(policy.model):
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=mixed, offload_policy=where
        )
    fully_shard(policy, mesh=mesh, mp_policy=of_root, offload_policy=where)
    register_fsdp_forward_method(policy, "logits_both_ways")
    for module in fsdp_modules(policy):  # each, as FSDP2 keeps these settings module by module
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo knows no other


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
        rows = local_rows(parameter)
        local(parameter).copy_(
            adapter[name][rows.start : rows.stop]
            if name in adapter
            else files.part(name_in_files(name), 0, rows.start, len(rows))
        )


def expect_packed(policy: Policy, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError unless a sharded policy computes packed sequences as its model does each alone. Every rank
    calls it.
    """
    policy.eval()  # no dropout of an adapter
    check_packed_forward(policy, device, dtype)
    policy.train()
    reshard(policy)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, which it shares memory with."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_rows(parameter: Tensor) -> range:
    """Which rows of it this rank holds: FSDP2's even chunks, the last ones shorter or empty."""
    rows = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return range(rows)
    mesh = parameter.device_mesh
    size = -(-rows // mesh.size(mesh.ndim - 1))
    start = min(rows, size * mesh.get_local_rank(mesh.ndim - 1))
    return range(start, min(rows, start + size))
