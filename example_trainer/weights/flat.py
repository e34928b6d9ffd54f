"""Weights of one device. For a float32 server they are views into one flat buffer in wire order.

Then a bucket is a view of that buffer, so nothing is packed or copied. For another dtype each bucket is cast on the way
and the parameters stay where they are.
"""

import torch
from torch import Tensor, nn

from atroposlib.wire.bridge import Bucket, Manifest
from example_trainer.weights.source import WeightSource, pack


class FlatWeights(WeightSource):
    """Serves the weights of `parameters`, which must be exactly the manifest's."""

    def __init__(self, manifest: Manifest, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._device = next(iter(parameters.values())).device
        self._image: Tensor | None = None  # flat uint8 [manifest.nbytes]: the parameters themselves
        if all(tensor.dtype == "float32" for tensor in manifest.tensors):
            self._image = torch.zeros(manifest.nbytes, dtype=torch.uint8, device=self._device)
            for tensor in manifest.tensors:
                parameter = parameters[tensor.name]
                view = self._image[tensor.offset :][: tensor.nbytes].view(torch.float32).view(parameter.shape)
                view.copy_(parameter.data)
                parameter.data = view

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def bucket(self, bucket: Bucket) -> Tensor:
        if self._image is not None:
            return self._image[bucket.start : bucket.end]
        return pack(bucket, self._parameters.__getitem__, self._device)
