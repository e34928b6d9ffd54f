"""Weights that are spread over the trainer's ranks, brought to rank 0 a bucket at a time: nobody holds the model.

    rank r's rows ──cast──▶ gather to rank 0 ──▶ whole tensors of one bucket ──▶ vLLM, or a file

Rows are cast to the dtype that is asked for before they travel. Rank 0 asks, bucket by bucket (Learner.gather); the
others answer whatever is asked, so a transfer that fails half-way, or walks the weights once for each of several vLLM
servers, needs no agreement on where it stands.
"""

import copy
import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
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
from example_trainer.weights.source import WeightSource, places, shapes_of
from example_trainer.weights.written import WHOLE_MODEL, Form, TrainedModel

# names and dtype -> each rank's flat rows of these tensors; nothing on ranks other than 0
Gather = Callable[[list[str], str], list[Tensor]]
Shape = tuple[int, ...]
FILE_BUCKET_BYTES = 256 << 20


class RowGather:
    """Every rank's part in bringing rows of `policy` to rank 0. The memory they lie in is kept for the next ones."""

    def __init__(self, policy: Policy) -> None:
        self._parameters = dict(policy.model.named_parameters())
        self._memory: defaultdict[int, Memory] = defaultdict(Memory)  # by rank

    def rows(self, names: Sequence[str], dtype: str) -> list[Tensor]:
        """On rank 0, what each rank that shards holds of `names`: flat, one tensor after the other, valid until the
        next call. Every rank calls this.
        """
        asked = [self._parameters[name] for name in names]
        mesh, kind = asked[0].device_mesh, getattr(torch, dtype)  # type: ignore[attr-defined]  # a DTensor
        if mesh.ndim > 1 and mesh.get_local_rank(0) != 0:  # a replica of what the first ones send
            return []
        shard = mesh.ndim - 1
        group, rank, size = mesh.get_group(shard), mesh.get_local_rank(shard), mesh.size(shard)
        lengths = [sum(part_of(weight.shape, other, size)[1] for weight in asked) for other in range(size)]
        here = range(size) if rank == 0 else [rank]
        found = [self._memory[other].of(lengths[other] * kind.itemsize, asked[0].device).view(kind) for other in here]
        kept = [local(weight.detach()).flatten() for weight in asked]
        mine = found[0]
        for rows, place in zip(kept, mine.split([len(rows) for rows in kept]), strict=True):
            place.copy_(rows)  # cast before it travels
        if rank > 0:
            exchange([dist.P2POp(dist.isend, mine, group=group, group_peer=0)])
            return []
        exchange([dist.P2POp(dist.irecv, found[n], group=group, group_peer=n) for n in range(1, size)])
        return found


class Memory:
    """Memory for one tensor after the other, which grows to the largest of them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, nbytes: int, device: torch.device) -> Tensor:
        """Flat uint8 [nbytes], with whatever was there."""
        if len(self._bytes) < nbytes:
            del self._bytes  # before the larger one comes
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._bytes[:nbytes]


def part_of(shape: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """Where the values of one of `size` ranks begin in a flat tensor of that shape, and how many they are."""
    rows, *others = shape
    chunk = -(-rows // size)
    first = min(rank * chunk, rows)
    return first * math.prod(others), (min(first + chunk, rows) - first) * math.prod(others)


def exchange(messages: list[dist.P2POp]) -> None:
    """Send and receive, but for messages without a byte."""
    some = [message for message in messages if message.tensor.numel()]
    for work in dist.batch_isend_irecv(some) if some else []:
        work.wait()


class GatheredWeights(WeightSource):
    """Of the model with these `shapes`, on rank 0."""

    collective = True

    def __init__(self, shapes: Mapping[str, Shape], gather: Gather) -> None:
        self._shapes = dict(shapes)
        self._gather = gather
        self._memory = (Memory(), Memory())  # of the bucket that is sent, and of the next

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes)

    def bucket(self, bucket: Bucket) -> Tensor:
        return self._packed(bucket, Memory())

    def stream(self, buckets: Sequence[Bucket]) -> Generator[Tensor, None, None]:
        """While one bucket is sent the ranks gather the next one."""
        with ThreadPoolExecutor(1, thread_name_prefix="NextBucket") as ranks:  # its end waits for the last gather
            gathered: deque[Future[Tensor]] = deque()
            for bucket, memory in zip(buckets, cycle(self._memory), strict=False):
                gathered.append(ranks.submit(self._packed, bucket, memory))
                if len(gathered) == len(self._memory):
                    yield gathered.popleft().result()
            for last in gathered:
                yield last.result()

    def _packed(self, bucket: Bucket, memory: Memory) -> Tensor:
        place: dict[str, Tensor] = {}
        packed = torch.empty(0)
        for dtype in dict.fromkeys(tensor.dtype for tensor in bucket.tensors):
            found = dict(self._parts([tensor.name for tensor in bucket.tensors if tensor.dtype == dtype], dtype))
            if not place:  # the gather says on which device
                packed = memory.of(bucket.end - bucket.start, next(iter(found.values()))[0].device)
                place = {tensor.name: there for tensor, there in places(bucket, packed)}
            for name, parts in found.items():
                torch.cat(parts, out=place[name])
        return packed

    def whole(self, names: list[str], dtype: str) -> dict[str, Tensor]:
        """These tensors, whole."""
        return {name: torch.cat(parts).view(self._shapes[name]) for name, parts in self._parts(names, dtype)}

    def _parts(self, names: list[str], dtype: str) -> Iterator[tuple[str, list[Tensor]]]:
        """Each of these tensors by name, as the flat values of each rank, which the next gather overwrites."""
        found = self._gather(names, dtype)
        starts = [0] * len(found)
        for name in names:
            parts = []
            for rank, held in enumerate(found):
                length = part_of(self._shapes[name], rank, len(found))[1]
                parts.append(held[starts[rank] : starts[rank] + length])
                starts[rank] += length
            yield name, parts

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
