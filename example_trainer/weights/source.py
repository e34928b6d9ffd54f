"""What a bridge asks of the trainer's weights, whatever their layout: names with shapes, and bytes bucket by bucket.

parameters on one device, or sharded over ranks ──bucket(b)──▶ flat uint8 [end - start] of the wire image ──▶ vLLM
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from atroposlib.wire.bridge import Bucket


class WeightSource(Protocol):
    """The weights of one trainer, on each of its ranks.

    Names are Hugging Face's, tied weights once. `bucket` is collective by contract: every rank of the trainer calls it
    for every bucket of a transfer, in wire order (rising `start`), also a rank that sends nothing and one whose send
    has failed. Weights must not change between the first and the last bucket of a transfer. Each server's transfer
    walks all buckets: those of a source with one rank may overlap in threads, those of several ranks take turns.
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of the whole tensor, never a shard's."""

    def bucket(self, bucket: Bucket) -> Tensor:
        """Flat uint8 [end - start]: the bucket's tensors at their offsets, cast to the dtype that vLLM serves.

        It may be a view of the weights themselves, so nobody writes to it, and it is sent before they change.
        """


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def pack(bucket: Bucket, whole: Callable[[str], Tensor], device: torch.device) -> Tensor:
    """The bytes of a bucket, made of the `whole` tensors by name; the gaps between parameters are zero."""
    packed = torch.zeros(bucket.end - bucket.start, dtype=torch.uint8, device=device)
    for tensor in bucket.tensors:
        start = tensor.offset - bucket.start
        packed[start : start + tensor.nbytes].view(getattr(torch, tensor.dtype)).copy_(
            whole(tensor.name).detach().reshape(-1)
        )
    return packed
