"""Weights of one device, as bytes bucket by bucket. For a float32 server they are views into one flat buffer in wire
order.

Then a bucket is a view of that buffer, so nothing is packed or copied. For another dtype each bucket is cast on the way
and the parameters stay where they are.
"""

import torch
from torch import Tensor, nn

from atroposlib.wire.bridge import Bucket, Manifest


class FlatWeights:
    """Of `parameters` by their Hugging Face names, tied ones once, which must be exactly the manifest's."""

    def __init__(self, manifest: Manifest, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._device = next(iter(parameters.values())).device
        self._image: Tensor | None = None  # flat uint8 [manifest.nbytes]: the parameters themselves
        if all(tensor.dtype == "float32" for tensor in manifest.tensors):
            self._image = torch.zeros(manifest.nbytes, dtype=torch.uint8, device=self._device)
            for tensor in manifest.tensors:
                parameter = parameters[tensor.name]
                content = self._image[tensor.offset : tensor.offset + tensor.nbytes]
                view = content.view(torch.float32).view(parameter.shape)
                view.copy_(parameter.data)
                parameter.data = view

    def bucket(self, bucket: Bucket) -> Tensor:
        """Flat uint8 [end - start]: the bucket's tensors at their offsets, cast to the dtype that vLLM serves, with
        zeros in the gaps.

        It may be a view of the weights themselves, so nobody writes to it, and it is sent before they change. Threads
        that feed several servers may call it at once.
        """
        if self._image is not None:
            return self._image[bucket.start : bucket.end]
        packed = torch.zeros(bucket.end - bucket.start, dtype=torch.uint8, device=self._device)
        for tensor in bucket.tensors:
            start = tensor.offset - bucket.start
            target = packed[start : start + tensor.nbytes].view(getattr(torch, tensor.dtype))
            target.copy_(self._parameters[tensor.name].detach().reshape(-1))
        return packed
