"""A Hugging Face model whose parameters are views into the memory that vLLM computes with; it allocates no weights
itself.

    rank 0's arena  ┌ q │ k │ v ┐┌ gate │ up ┐ ...    q_proj.weight, k_proj.weight, ... are slices of fused parameters
    rank 1's arena  └ q │ k │ v ┘└ gate │ up ┘ ...    with TP > 1 a weight is pieces (sharded.py); what every rank holds
                                                      alike is one parameter here and copied to the others after each
                                                      update

Padded vocabulary rows belong to no Hugging Face tensor and are never touched.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from atroposlib.wire.bridge import Bucket, Shard, SharedRank
from example_trainer.errors import TrainerError
from example_trainer.model.loading import ModelError, prepare_for_training, rebuild_buffers
from example_trainer.optim.bf16_masters import set_value
from example_trainer.weights.sharded import ShardedEmbedding, ShardedLinear
from example_trainer.weights.shards import open_weights
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
    """Return what the ranks' `bridge_attach` replies describe, as parameters over `buffers` (flat uint8, one per
    rank). Raises TrainerError.
    """
    parts: dict[str, dict[int, list[Tensor]]] = {}
    described: dict[str, Shard] = {}
    for worker, buffer in zip(workers, buffers, strict=True):
        for shard, view in shared_views(worker, buffer):
            described.setdefault(shard.name, shard)
            parts.setdefault(shard.name, {}).setdefault(shard.full_start, []).append(view)
    return {name: _whole(described[name], views, as_parameter) for name, views in parts.items()}


def shared_views(worker: SharedRank, buffer: Tensor) -> Iterator[tuple[Shard, Tensor]]:
    """Yield what a rank's `bridge_attach` reply describes, as views into its memory."""
    for shard in worker.shards:
        offset, shape, name = worker.layout[shard.vllm_name]
        dtype = getattr(torch, name)
        fused = buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        yield shard, fused.narrow(shard.dim, shard.start, shard.length) if fused.dim() else fused


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


def bind(
    model: PreTrainedModel,
    tensors: Mapping[str, SharedTensor],
    *,
    gradient_checkpointing: bool,
    longest: int | None = None,
) -> None:
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
    rebuild_buffers(model, next(model.parameters()).device)
    prepare_for_training(model, gradient_checkpointing=gradient_checkpointing, longest=longest)


def _sharded(name: str, module: nn.Module, own: dict[str, SharedTensor]) -> nn.Module:
    if type(module) not in (nn.Embedding, nn.Linear):  # a subclass, such as Gemma's embedding, computes more
        raise ModelError(
            f"{name} is a {type(module).__name__}, which single copy cannot train in pieces: start vLLM with"
            " --tensor-parallel-size 1"
        )
    weights = [piece.parameter for piece in own["weight"].pieces]
    if isinstance(module, nn.Embedding):
        return ShardedEmbedding(weights)
    biases = [piece.parameter for piece in own["bias"].pieces] if "bias" in own else []
    return ShardedLinear(weights, own["weight"].dim, biases)


class StartWeights:
    """The weights of `source` (hub id or directory) that a single copy starts from. Raises ModelError where one is
    missing.
    """

    def __init__(self, source: str, tensors: Iterable[SharedTensor]) -> None:
        self._files = open_weights(source)
        self.tensors = list(tensors)
        for tensor in self.tensors:
            self._files.expect(tensor.name, tensor.shape)

    def write(self) -> None:
        """Write them into the shared parameters."""
        for tensor in self.tensors:
            for piece in tensor.pieces:
                length = piece.parameter.shape[tensor.dim] if tensor.shape else 1
                set_value(piece.parameter, self._files.part(tensor.name, tensor.dim, piece.start, length))


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
