"""Weights that are spread over the trainer's ranks, brought to rank 0 a bucket at a time: nobody holds the model.

    rank r's rows ──cast──▶ gather to rank 0 ──▶ whole tensors of one bucket ──▶ vLLM, or a file

Rows are cast to the dtype that is asked for before they travel. Rank 0 asks, bucket by bucket (Learner.gather); the
others answer whatever is asked, so a transfer that fails half-way, or walks the weights once for each of several vLLM
servers, needs no agreement on where it stands.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atroposlib.wire.bridge import Bucket, Manifest
from example_trainer.adapters import ADAPTER, saved_name, write_adapter
from example_trainer.policy import Policy
from example_trainer.shard import local
from example_trainer.weights.files import safetensors_header
from example_trainer.weights.source import WeightSource, pack, shapes_of
from example_trainer.weights.written import WHOLE_MODEL, Form, TrainedModel

# names and dtype -> each rank's flat rows of these tensors; nothing on ranks other than 0
Gather = Callable[[list[str], str], list[Tensor]]
Shape = tuple[int, ...]
FILE_BUCKET_BYTES = 256 << 20


def gather_rows(policy: Policy, names: Sequence[str], dtype: str) -> list[Tensor]:
    """On rank 0, what each rank that shards holds of `names`: flat, one tensor after the other, every rank's rows of a
    tensor filled up to as many. Every rank calls this.
    """
    parameters = dict(policy.model.named_parameters())
    of_first = parameters[names[0]]
    mesh = of_first.device_mesh  # type: ignore[attr-defined]  # a DTensor
    if mesh.ndim > 1 and mesh.get_local_rank(0) != 0:  # a replica of what the first ones send
        return []
    group, size = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    parts = []
    for name in names:
        rows = local(parameters[name].detach()).to(getattr(torch, dtype))
        missing = -(-parameters[name].shape[0] // size) - len(rows)
        parts += [rows.flatten(), rows.new_zeros(missing * math.prod(rows.shape[1:]))]
    mine = torch.cat(parts)
    leads = mesh.get_local_rank(mesh.ndim - 1) == 0
    found = [torch.empty_like(mine) for _ in range(size)] if leads else None
    dist.gather(mine, found, group_dst=0, group=group)
    return found or []


class GatheredWeights(WeightSource):
    """Of the model with these `shapes`, on rank 0."""

    collective = True

    def __init__(self, shapes: Mapping[str, Shape], gather: Gather) -> None:
        self._shapes = dict(shapes)
        self._gather = gather

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes)

    def bucket(self, bucket: Bucket) -> Tensor:
        wholes: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in bucket.tensors):
            wholes |= self.whole([tensor.name for tensor in bucket.tensors if tensor.dtype == dtype], dtype)
        return pack(bucket, wholes.__getitem__, next(iter(wholes.values())).device)

    def whole(self, names: list[str], dtype: str) -> dict[str, Tensor]:
        """These tensors, whole."""
        found = self._gather(names, dtype)
        start, wholes = 0, {}
        for name in names:
            rows, *others = self._shapes[name]
            chunk = -(-rows // len(found)) * math.prod(others)
            parts = torch.cat([part[start : start + chunk] for part in found])
            wholes[name] = parts[: math.prod(self._shapes[name])].view(self._shapes[name])
            start += chunk
        return wholes

    def walk(self, dtype: str, names: Sequence[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, or those of `names`, whole and in order; about FILE_BUCKET_BYTES of them exist at once."""
        bucket: list[str] = []
        for name in [*(self._shapes if names is None else names), None]:
            held = sum(math.prod(self._shapes[each]) * getattr(torch, dtype).itemsize for each in bucket)
            if bucket and (name is None or held >= FILE_BUCKET_BYTES):
                yield from self.whole(bucket, dtype).items()
                bucket = []
            if name is not None:
                bucket.append(name)


def write_safetensors(
    path: Path, shapes: Mapping[str, Shape], dtype: str, tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write `tensors`, which come in the order of `shapes`, as a safetensors file, without ever holding all of them."""
    header = {name: (shape, getattr(torch, dtype)) for name, shape in shapes.items()}
    with path.open("wb") as file:
        file.write(safetensors_header(header, {"format": "pt"}))
        for _, tensor in tensors:
            file.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)


def write_about_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write what a Hugging Face directory holds beside the weights, which are float32."""
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = "float32", [type(model).__name__]
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def whole_model(gather: Gather) -> Form:
    """The Hugging Face directory of a sharded model, in float32."""

    def write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        shapes = shapes_of(model)
        write_about_model(folder, model, tokenizer)
        write_safetensors(
            folder / "model.safetensors", shapes, "float32", GatheredWeights(shapes, gather).walk("float32")
        )

    return replace(WHOLE_MODEL, write=write)


def adapter_of_ranks(gather: Gather) -> Form:
    """The PEFT folder of a sharded adapter, as one rank writes it."""

    def write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        walk = GatheredWeights(shapes_of(model), gather).walk("float32", trained)
        write_adapter(folder, model, {saved_name(name): tensor.cpu() for name, tensor in walk})

    return replace(ADAPTER, write=write)


@dataclass(frozen=True, kw_only=True)
class ShardedModel(TrainedModel):
    """A model of which each rank holds rows, on rank 0, which asks the others by `gather` and `logprobs`."""

    sharded: Policy
    gather: Gather
    logprobs: Callable[[list[int]], Tensor]

    @functools.cached_property
    def policy(self) -> Policy:
        return self.sharded

    def source(self, manifest: Manifest) -> WeightSource:
        return GatheredWeights(shapes_of(self.model), self.gather)

    def prompt_logprobs(self, tokens: list[int]) -> Tensor:
        return self.logprobs(tokens)
