"""What a bridge asks of the trainer's weights, whatever their layout: names with shapes, and bytes bucket by bucket.

parameters on one device, or sharded over ranks ──bucket(b)──▶ flat uint8 [end - start] of the wire image ──▶ vLLM
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from atroposlib.wire.bridge import Bucket, WireTensor


class WeightSource(Protocol):
    """The weights of one trainer, over all of its ranks.

    Names are Hugging Face's, tied weights once. A bridge walks the buckets of a transfer in wire order (rising
    `start`), on rank 0 alone; where ranks share the weights, each bucket is something that rank 0 has them all do,
    whatever came of the previous one. Weights must not change between the first and the last bucket of a transfer.
    """

    collective: bool = False  # a bucket takes all ranks: the walks of several servers take turns

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of the whole tensor, never a shard's."""

    def bucket(self, bucket: Bucket) -> Tensor:
        """Flat uint8 [end - start]: the bucket's tensors at their offsets, cast to the dtype that vLLM serves.

        It may be a view of the weights themselves, so nobody writes to it, and it is sent before they change. The next
        bucket may take its memory.
        """

    def stream(self, buckets: Sequence[Bucket]) -> Generator[Tensor, None, None]:
        """The bytes of these buckets, in order, each of which is sent before the next is asked for. Close it when a
        transfer fails half-way.
        """
        yield from map(self.bucket, buckets)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def pack(bucket: Bucket, whole: Callable[[str], Tensor], device: torch.device) -> Tensor:
    """The bytes of a bucket, made of the `whole` tensors by name; the gaps between parameters are zero."""
    packed = torch.empty(bucket.end - bucket.start, dtype=torch.uint8, device=device)
    for tensor, place in places(bucket, packed):
        place.copy_(whole(tensor.name).detach().reshape(-1))
    return packed


def places(bucket: Bucket, packed: Tensor) -> Iterator[tuple[WireTensor, Tensor]]:
    """Each tensor of the bucket with its place in `packed`, flat and in its dtype; the gaps become zero."""
    end = 0
    for tensor in bucket.tensors:
        start = tensor.offset - bucket.start
        packed[end:start].zero_()
        end = start + tensor.nbytes
        yield tensor, packed[start:end].view(getattr(torch, tensor.dtype))
    packed[end:].zero_()
