"""A Hugging Face model whose parameters are views into the memory that vLLM computes with; no weight of its own is
ever allocated.

    rank 0's arena  ┌ q │ k │ v ┐┌ gate │ up ┐ ...    q_proj.weight, k_proj.weight, ... are slices of fused parameters
    rank 1's arena  └ q │ k │ v ┘└ gate │ up ┘ ...    with TP > 1 a weight is pieces (sharded.py); what every rank holds
                                                      alike is one parameter here and copied to the others after each
                                                      update

Padded vocabulary rows belong to no Hugging Face tensor and are never touched.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from atroposlib.wire.bridge import Bucket, Shard, SharedRank
from example_trainer.bf16 import set_value
from example_trainer.errors import TrainerError
from example_trainer.model import ModelError, prepare_for_training, reading_model
from example_trainer.weights.sharded import ShardedEmbedding, ShardedLinear
from example_trainer.weights.source import WeightSource, pack


@dataclass(frozen=True)
class Piece:
    """Rows or columns from `start` of a Hugging Face tensor: the parameter that is trained, and the same on other
    ranks.
    """

    start: int
    parameter: nn.Parameter
    replicas: tuple[Tensor, ...]


@dataclass(frozen=True)
class SharedTensor:
    """A whole Hugging Face tensor as its pieces in order along `dim`."""

    name: str
    dim: int
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class SharedWeights(WeightSource):
    """The shared weights as one process sees them: pieces in the memory of every rank, put together on demand."""

    def __init__(self, tensors: Mapping[str, SharedTensor]) -> None:
        self.tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def bucket(self, bucket: Bucket) -> Tensor:
        device = self.tensors[bucket.tensors[0].name].pieces[0].parameter.device

        def whole(name: str) -> Tensor:
            tensor = self.tensors[name]
            parts = [piece.parameter.detach().to(device) for piece in tensor.pieces]
            return torch.cat(parts, tensor.dim) if tensor.shape else parts[0]

        return pack(bucket, whole, device)


def shared_tensors(
    workers: list[SharedRank], buffers: list[Tensor], as_parameter: Callable[[Tensor], nn.Parameter]
) -> dict[str, SharedTensor]:
    """What the ranks' `bridge_attach` replies describe, as parameters over `buffers` (flat uint8, one per rank). Raises
    TrainerError.
    """
    parts: dict[str, dict[int, list[Tensor]]] = {}
    described: dict[str, Shard] = {}
    for worker, buffer in zip(workers, buffers, strict=True):
        for shard in worker.shards:
            described.setdefault(shard.name, shard)
            offset, shape, name = worker.layout[shard.vllm_name]
            dtype = getattr(torch, name)
            fused = buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            view = fused.narrow(shard.dim, shard.start, shard.length) if fused.dim() else fused
            parts.setdefault(shard.name, {}).setdefault(shard.full_start, []).append(view)
    return {name: _whole(described[name], views, as_parameter) for name, views in parts.items()}


def _whole(
    shard: Shard, views: dict[int, list[Tensor]], as_parameter: Callable[[Tensor], nn.Parameter]
) -> SharedTensor:
    dim, shape = shard.dim, shard.full_shape
    end = 0
    for start in sorted(views):
        if start != end:
            raise TrainerError(f"{shard.name}: vLLM's ranks hold nothing of rows or columns {end} to {start}")
        end += views[start][0].shape[dim] if shape else 1
    if shape and end != shape[dim]:
        raise TrainerError(f"{shard.name}: vLLM's ranks hold {end} of {shape[dim]} rows or columns")
    return SharedTensor(
        shard.name,
        dim,
        shape,
        tuple(Piece(start, as_parameter(same[0]), tuple(same[1:])) for start, same in sorted(views.items())),
    )


def bind(model: PreTrainedModel, tensors: Mapping[str, SharedTensor], *, gradient_checkpointing: bool) -> None:
    """Put the shared parameters in the place of those of a meta model, in training mode. The names were compared
    before.
    """
    # tied ones once; kept until the end, so that an id stays one parameter's
    originals = dict(model.named_parameters())
    shared = {id(original): tensors[name] for name, original in originals.items()}
    for name, module in list(model.named_modules()):
        own = {leaf: shared[id(parameter)] for leaf, parameter in module.named_parameters(recurse=False)}
        if all(len(tensor.pieces) == 1 for tensor in own.values()):
            for leaf, tensor in own.items():
                setattr(module, leaf, tensor.pieces[0].parameter)
        else:
            model.set_submodule(name, _sharded(name, module, own))
    # what a meta model could not compute: the rotary embeddings' tables, which are in no weight file
    device = next(model.parameters()).device
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            if "RotaryEmbedding" not in type(module).__name__:
                raise ModelError(
                    f"{name} is a {type(module).__name__} with a buffer that no weight file holds: use"
                    " --use-shared-memory"
                )
            with torch.device(device):
                model.set_submodule(name, type(module)(module.config))
    prepare_for_training(model, gradient_checkpointing=gradient_checkpointing)


def _sharded(name: str, module: nn.Module, own: dict[str, SharedTensor]) -> nn.Module:
    weights = [piece.parameter for piece in own["weight"].pieces]
    if isinstance(module, nn.Embedding):
        return ShardedEmbedding(weights, module.padding_idx)
    if isinstance(module, nn.Linear):
        biases = [piece.parameter for piece in own["bias"].pieces] if "bias" in own else []
        return ShardedLinear(weights, own["weight"].dim, biases)
    raise ModelError(
        f"{name} is a {type(module).__name__}, which single copy cannot train in pieces: start vLLM with TP=1"
    )


class StartWeights:
    """The safetensors files of `source` (hub id or folder), read tensor by tensor. Raises ModelError where one is
    missing.
    """

    def __init__(self, source: str, tensors: Iterable[SharedTensor]) -> None:
        folder = Path(source)
        if not folder.is_dir():
            with reading_model(source):
                folder = Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
        self.tensors = list(tensors)
        self._file_of: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    self._file_of[name] = path
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        for tensor in self.tensors:
            if shapes.get(tensor.name) != tensor.shape:
                found = list(shapes[tensor.name]) if tensor.name in shapes else "nothing of that name"
                raise ModelError(
                    f"{folder} holds {found} for {tensor.name} {list(tensor.shape)}: single copy starts from"
                    " safetensors"
                )

    def write(self) -> None:
        """Write them into the shared parameters."""
        for tensor in self.tensors:
            with safe_open(self._file_of[tensor.name], "pt") as file:
                content = file.get_slice(tensor.name)
                for piece in tensor.pieces:
                    if tensor.shape:
                        end = piece.start + piece.parameter.shape[tensor.dim]
                        part = content[piece.start : end] if tensor.dim == 0 else content[:, piece.start : end]
                    else:
                        part = torch.as_tensor(content[...])
                    set_value(piece.parameter, part)


@torch.no_grad()
def copy_replicas(tensors: Iterable[SharedTensor]) -> int:
    """Give the other ranks what they hold alike; bytes copied."""
    copied = 0
    for tensor in tensors:
        for piece in tensor.pieces:
            for replica in piece.replicas:
                replica.copy_(piece.parameter)
                copied += replica.nbytes
    return copied
