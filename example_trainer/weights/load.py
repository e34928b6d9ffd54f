"""The model that a run trains, loaded: whole, with an adapter, or over memory that vLLM shares."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from atroposlib.wire.folders import is_sharded
from example_trainer.model.fused_norms import fuse_norms
from example_trainer.model.loading import (
    expect_even_layers,
    load_model,
    load_tokenizer,
    meta_model,
    prepare_for_training,
)
from example_trainer.model.policy import Policy
from example_trainer.optim.bf16_masters import MasteredParameter, set_value
from example_trainer.ranks.partition import Part, local
from example_trainer.ranks.ranks import compute_dtype
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.fsdp import expect_packed, fsdp_modules, load_shards, shard
from example_trainer.weights.gathered import Gather, RankSends, ShardedModel, adapter_of_ranks, whole_model
from example_trainer.weights.lora import (
    ADAPTER,
    CONFIG,
    load_adapted_model,
    meta_adapted_model,
    read_adapter,
    saved_name,
)
from example_trainer.weights.sharded import parts_of
from example_trainer.weights.shards import open_weights
from example_trainer.weights.shared import SharedWeights, bind
from example_trainer.weights.written import WHOLE_MODEL, TrainedModel


def load_trained(
    config: TrainerConfig, source: str, device: torch.device, storage: SharedWeights | None = None
) -> TrainedModel:
    """The model of `source` (hub id or directory) in training mode; over `storage`, where one is given, whose values
    stay as they are. Raises ModelError or AdapterError.
    """
    if config.bridge.trains_adapter:
        return TrainedModel(load_adapted_model(source, config, device), load_tokenizer(config.model_name), ADAPTER)
    if storage is None and is_sharded(Path(source)):
        model = _of_shards(source, device, config)
    elif storage is None:
        model = load_model(source, device, gradient_checkpointing=config.gradient_checkpointing, longest=config.seq_len)
    else:
        model = meta_model(source)
        bind(model, storage.tensors, gradient_checkpointing=config.gradient_checkpointing, longest=config.seq_len)
    return TrainedModel(model, load_tokenizer(source), WHOLE_MODEL)


@torch.no_grad()
def read_into(model: PreTrainedModel, folder: Path) -> None:
    """Give the trained parameters, or the parts of them that this process has, the values that a directory of the same
    run has, where they are. Every rank calls it. Raises ModelError or AdapterError.
    """
    value = _adapter_values(folder, model) if (folder / CONFIG).is_file() else _file_values(folder)
    for name, parameter, own in parts_of(model):
        if not parameter.requires_grad:
            continue
        loaded = value(name, own)
        if isinstance(parameter, MasteredParameter):
            set_value(parameter, loaded)
        else:
            local(parameter).copy_(loaded)


def _adapter_values(folder: Path, model: PreTrainedModel) -> Callable[[str, Part], Tensor]:
    saved = read_adapter(folder, model)
    return lambda name, own: own.of(saved[saved_name(name)])


def _file_values(folder: Path) -> Callable[[str, Part], Tensor]:
    files = open_weights(str(folder))
    return lambda name, own: files.block(name, own.rows, own.columns)


def _of_shards(source: str, device: torch.device, config: TrainerConfig) -> PreTrainedModel:
    """The whole model of a sharded checkpoint."""
    model = meta_model(source)
    policy = Policy(model)
    load_shards(policy, open_weights(source), device, {})
    prepare_for_training(model, gradient_checkpointing=config.gradient_checkpointing, longest=config.seq_len)
    expect_packed(policy, device, torch.float32, config.seq_len)
    return model


def load_sharded(
    config: TrainerConfig,
    source: str,
    device: torch.device,
    mesh: DeviceMesh,
    gather: Gather,
    sends: RankSends,
    logprobs: Callable[[list[int]], Tensor],
) -> ShardedModel:
    """The model of `source` with this rank's rows alone. Every rank calls it. Raises ModelError or AdapterError."""
    if config.bridge.trains_adapter:
        model, adapter = meta_adapted_model(source, config, compute_dtype(config, device))
        source = config.model_name
        policy = sharded_policy(config, model, source, device, mesh, adapter)
        form = adapter_of_ranks(gather, device)
    else:
        policy, form = sharded_model(config, source, device, mesh), whole_model(gather, device)
    return ShardedModel(
        policy.model,
        load_tokenizer(source),
        form,
        sharded=policy,
        gather=gather,
        sends=sends,
        device=device,
        logprobs=logprobs,
    )


def start_policy(config: TrainerConfig, device: torch.device, mesh: DeviceMesh | None, stored: torch.dtype) -> Policy:
    """The frozen start model, which the KL term compares with. It is rounded to `stored`, as the policy's own weights
    are beside an adapter and in a single copy of a bfloat16 server, so that the KL is 0 before the first update. Every
    rank calls it.
    """
    if mesh is None:
        model = load_model(config.model_name, device, longest=config.seq_len)
        for parameter in model.parameters():  # not the rotary tables, which stay float32
            parameter.data = parameter.data.to(stored)
        return Policy(model).requires_grad_(False)
    policy = sharded_model(config, config.model_name, device, mesh, stored)
    for module in fsdp_modules(policy):
        module.set_reshard_after_forward(True)  # no backward pass follows
    return policy.requires_grad_(False)


def sharded_model(
    config: TrainerConfig, source: str, device: torch.device, mesh: DeviceMesh, stored: torch.dtype = torch.float32
) -> Policy:
    """A policy over `mesh` with the weights of `source`, in the dtype `stored`."""
    model = meta_model(source)
    nn.Module.to(model, stored)
    prepare_for_training(model, gradient_checkpointing=config.gradient_checkpointing, longest=config.seq_len)
    return sharded_policy(config, model, source, device, mesh, {})


def sharded_policy(
    config: TrainerConfig,
    model: PreTrainedModel,
    source: str,
    device: torch.device,
    mesh: DeviceMesh,
    adapter: Mapping[str, Tensor],
) -> Policy:
    """A policy over `mesh` that computes as configured: a meta model with the weights of `source`, and those of
    `adapter` by parameter name.
    """
    expect_even_layers(model)
    files = open_weights(source)
    policy = Policy(model)
    shard(
        policy,
        mesh,
        dtype=compute_dtype(config, device),
        reshard_after_forward=config.reshard_after_forward,
        offload=config.offload == "all",
        deadline_s=config.dist_timeout_s,
    )
    load_shards(policy, files, torch.device("cpu") if config.offload == "all" else device, adapter)
    if device.type == "cuda" and compute_dtype(config, device) is not torch.float32:
        fuse_norms(model)
    expect_packed(policy, device, compute_dtype(config, device), config.seq_len)
    return policy
