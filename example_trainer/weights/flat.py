"""Weights of one device: the parameters are views into one flat float32 buffer in wire order.

When vLLM serves float32 a bucket is a view of that buffer, so nothing is packed or copied; otherwise it is cast on the
way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atroposlib.wire.bridge import Bucket, Manifest, align
from example_trainer.weights.source import WeightSource, pack, shapes_of


class FlatWeights(WeightSource):
    """Moves `parameters`, which must be exactly the manifest's, into `buffer` ([elements], float32)."""

    def __init__(self, manifest: Manifest, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        tensors = manifest.tensors
        self._as_is = all(tensor.dtype == "float32" for tensor in tensors)
        device = next(iter(parameters.values())).device
        # same order as the wire; with fp32 on the wire also the same offsets
        starts = (
            [tensor.offset // 4 for tensor in tensors]
            if self._as_is
            else _compact_starts([parameters[t.name].numel() for t in tensors])
        )
        self.buffer = torch.zeros(starts[-1] + parameters[tensors[-1].name].numel(), dtype=torch.float32, device=device)
        for start, tensor in zip(starts, tensors, strict=True):
            parameter = parameters[tensor.name]
            view = self.buffer[start : start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes_of(self._parameters)

    def bucket(self, bucket: Bucket) -> Tensor:
        if self._as_is:
            return self.buffer.view(torch.uint8)[bucket.start : bucket.end]
        return pack(bucket, self._parameters.__getitem__, self.buffer.device)


def _compact_starts(sizes: Sequence[int]) -> list[int]:
    starts, end = [], 0
    for size in sizes:
        end = align(4 * end) // 4
        starts.append(end)
        end += size
    return starts
