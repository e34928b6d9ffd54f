"""Weights that are shared out over the trainer's ranks, gathered on rank 0 one bucket at a time: no rank holds the
whole model.

    rank r's part ──cast──▶ gather to rank 0 ──▶ whole tensors of one bucket ──▶ vLLM, or a file

Parts are cast to the requested dtype before they are sent. Rank 0 asks bucket by bucket (Learner.gather) and the others
answer each request, so a transfer that fails half-way, or that sends the weights once to each of several vLLM servers,
needs no agreement on its position.
"""

import copy
import functools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atroposlib.wire.bridge import BroadcastOffer, Bucket, Manifest
from atroposlib.wire.published import in_files
from example_trainer.model.files import safetensors_header
from example_trainer.model.policy import Policy
from example_trainer.ranks.partition import holders, local
from example_trainer.weights.lora import ADAPTER, saved_name, write_adapter
from example_trainer.weights.source import WeightSource, places, shapes_of
from example_trainer.weights.written import WHOLE_MODEL, Form, TrainedModel

# Fills flat tensors, by parameter name, with whole parameters cast to their dtype
Gather = Callable[[Mapping[str, Tensor]], None]
Shape = tuple[int, ...]
FILE_BUCKET_BYTES = 256 << 20
GATHER_BYTES = 64 << 20  # of a bridge's buckets at once


@dataclass(frozen=True)
class RankSends:
    """Holds what rank 0 has all ranks do that send their rows themselves (bridges/direct.py): the first two return a
    line for each rank that failed.
    """

    join: Callable[[BroadcastOffer, Manifest], list[str]]
    send: Callable[[str], list[str]]  # of a session
    leave: Callable[[str], None]


class RowExchange:
    """One rank's part in bringing what the ranks of `mesh` hold of `policy` to rank 0; it travels between the ranks'
    `device`s.
    """

    def __init__(self, policy: Policy, device: torch.device, mesh: DeviceMesh) -> None:
        self._parameters = dict(policy.model.named_parameters())
        self._device = device
        self._holders = {name: list(holders(parameter, mesh)) for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def bring(self, names: Sequence[str], dtypes: Sequence[str], places: Mapping[str, Tensor]) -> None:
        """Cast this rank's part of each of `names` to its dtype and send it to rank 0, which puts those of all ranks
        into `places`. Every rank calls this.
        """
        rank = dist.get_rank()
        messages: list[dist.P2POp] = []
        landed: list[tuple[Tensor, Tensor]] = []
        for name, dtype in zip(names, dtypes, strict=True):
            parameter = self._parameters[name]
            own = local(parameter)
            for holder, held in self._holders[name]:
                if holder == 0 == rank:
                    held.of(places[name].view(parameter.shape)).copy_(own)
                elif holder == rank:
                    sent = own.to(self._device, getattr(torch, dtype)).contiguous()
                    messages.append(dist.P2POp(dist.isend, sent, 0))
                elif rank == 0:
                    place = held.of(places[name].view(parameter.shape))
                    arrives = place if place.is_contiguous() else torch.empty_like(place).contiguous()
                    landed += [(place, arrives)] if arrives is not place else []
                    messages.append(dist.P2POp(dist.irecv, arrives, holder))
        messages = [message for message in messages if message.tensor.numel()]
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        for place, arrived in landed:
            place.copy_(arrived)


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


def _gathers(buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Buckets that are gathered at once: to ask the ranks takes milliseconds, however little they bring."""
    several: list[Bucket] = []
    for bucket in buckets:
        if several and bucket.end - several[0].start > GATHER_BYTES:
            yield several
            several = []
        several.append(bucket)
    if several:
        yield several


def _joined(several: Sequence[Bucket]) -> Bucket:
    return Bucket(several[0].start, several[-1].end, tuple(tensor for bucket in several for tensor in bucket.tensors))


def _cut(several: Sequence[Bucket], packed: Future[Tensor]) -> Iterator[Tensor]:
    start = several[0].start
    return (packed.result()[bucket.start - start : bucket.end - start] for bucket in several)


class GatheredWeights(WeightSource):
    """Serves the weights of the model with these `shapes`, on rank 0."""

    collective = True

    def __init__(self, shapes: Mapping[str, Shape], gather: Gather, device: torch.device) -> None:
        self._shapes = dict(shapes)
        self._gather = gather
        self._device = device
        self._memory = (Memory(), Memory())  # of the bucket that is sent, and of the next

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes)

    def bucket(self, bucket: Bucket) -> Tensor:
        return self._packed(bucket, self._memory[0])

    def stream(self, buckets: Sequence[Bucket]) -> Generator[Tensor, None, None]:
        """While some buckets are sent the ranks gather the next ones."""
        gathered: deque[Iterator[Tensor]] = deque()
        gathers = [(several, _joined(several)) for several in _gathers(buckets)]
        for memory in self._memory:  # at once: it cannot grow while the bytes of a bucket are still looked at
            memory.of(max((whole.end - whole.start for _, whole in gathers), default=0), self._device)
        with ThreadPoolExecutor(1, thread_name_prefix="NextBuckets") as ranks:  # its end waits for the last gather
            for (several, whole), memory in zip(gathers, cycle(self._memory), strict=False):
                gathered.append(_cut(several, ranks.submit(self._packed, whole, memory)))
                if len(gathered) == len(self._memory):
                    yield from gathered.popleft()
            for last in gathered:
                yield from last

    def _packed(self, bucket: Bucket, memory: Memory) -> Tensor:
        packed = memory.of(bucket.end - bucket.start, self._device)
        self._gather({tensor.name: place for tensor, place in places(bucket, packed)})
        return packed

    def _whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        tensors = {
            name: torch.empty(math.prod(self._shapes[name]), dtype=torch.float32, device=self._device) for name in names
        }
        self._gather(tensors)
        return {name: flat.view(self._shapes[name]) for name, flat in tensors.items()}

    def walk(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, or those of `names`, whole, in order and in float32; about FILE_BUCKET_BYTES of them exist at
        once.
        """
        bucket: list[str] = []
        for name in [*(self._shapes if names is None else names), None]:
            held = sum(math.prod(self._shapes[each]) * torch.float32.itemsize for each in bucket)
            if bucket and (name is None or held >= FILE_BUCKET_BYTES):
                yield from self._whole(bucket).items()
                bucket = []
            if name is not None:
                bucket.append(name)


def write_safetensors(
    path: Path, shapes: Mapping[str, Shape], tensors: Iterator[tuple[str, Tensor]], model_type: str
) -> None:
    """Write `tensors`, float32 and in the order of `shapes`, as a safetensors file, without ever holding all of them.
    They get the names that published models of the type have.
    """
    parts = {name: list(in_files(name, shape, model_type)) for name, shape in shapes.items()}
    header = {part.name: (part.shape, torch.float32) for of_name in parts.values() for part in of_name}
    with path.open("wb") as file:
        file.write(safetensors_header(header, {"format": "pt"}))
        for name, tensor in tensors:
            for part in parts[name]:
                file.write(tensor[part.index].cpu().contiguous().view(torch.uint8).numpy().data)


def write_about_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write what a Hugging Face directory holds beside the weights, which are float32."""
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = "float32", [type(model).__name__]
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def whole_model(gather: Gather, device: torch.device) -> Form:
    """The Hugging Face directory of a sharded model, in float32."""

    def write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        shapes = shapes_of(model)
        write_about_model(folder, model, tokenizer)
        walk = GatheredWeights(shapes, gather, device).walk()
        write_safetensors(folder / "model.safetensors", shapes, walk, model.config.model_type)

    return replace(WHOLE_MODEL, write=write)


def adapter_of_ranks(gather: Gather, device: torch.device) -> Form:
    """The PEFT directory of a sharded adapter, as one rank writes it."""

    def write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        walk = GatheredWeights(shapes_of(model), gather, device).walk(trained)
        write_adapter(folder, model, {saved_name(name): tensor.cpu() for name, tensor in walk})

    return replace(ADAPTER, write=write)


@dataclass(frozen=True, kw_only=True)
class ShardedModel(TrainedModel):
    """A model of which each rank holds a part, on rank 0, which asks the others by `gather`, `sends` and `logprobs`."""

    sharded: Policy
    gather: Gather
    sends: RankSends
    device: torch.device
    logprobs: Callable[[list[int]], Tensor]

    @functools.cached_property
    def policy(self) -> Policy:
        return self.sharded

    def source(self, manifest: Manifest) -> WeightSource:
        return GatheredWeights(shapes_of(self.model), self.gather, self.device)

    def prompt_logprobs(self, tokens: list[int]) -> Tensor:
        return self.logprobs(tokens)
