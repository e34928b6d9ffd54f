"""All parameters of one rank in flat buffers: the live arena with which vLLM computes, and a staging arena that
receives.

    wire image (whole tensors) ──direct, TP=1──▶ staging arena ──commit──▶ live ◀──in place── trainer (single copy)
                 └── scratch ── this rank's shards ──▲

On a CPU both are shared buffers. A commit exchanges the two: parameters are re-pointed, no byte moves, and the
former live buffer becomes the next staging. On a GPU the live arena is one allocation, so that one CUDA IPC handle
shares it; captured graphs hold addresses, so a commit copies staging into it. Memory: the rank's weights once, twice
while a broadcasting trainer is joined.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from atroposlib.wire.bridge import Bucket, LiveShard, Manifest, Shard, align
from vllm_patching.memory.digest import digest
from vllm_patching.memory.shared_buffer import SharedBuffer

DEVICE_RESERVE = 256 << 20  # bytes that stay free on a GPU when the arena is made


@dataclass
class DeviceBuffer:
    """`tensor`: flat uint8 [nbytes] in one allocation of a GPU."""

    tensor: torch.Tensor


class Arena:
    """The live parameters of one rank, and the making and committing of staging buffers for them."""

    def __init__(self, model: nn.Module, manifest: Manifest, shards: list[Shard]) -> None:
        self._parameters = dict(model.named_parameters())
        self.manifest = manifest
        self.shards: dict[str, list[Shard]] = {}  # of each Hugging Face tensor
        for shard in shards:
            self.shards.setdefault(shard.name, []).append(shard)
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for name, parameter in self._parameters.items():
            self.offsets[name] = align(self.nbytes)
            self.nbytes = self.offsets[name] + parameter.numel() * parameter.element_size()
        covered = {name: 0 for name in self._parameters}
        for shard in shards:
            covered[shard.vllm_name] += shard.length * (math.prod(shard.full_shape) // shard.full_shape[shard.dim])
        # for example vocabulary rows that vLLM adds: never sent, so no received bytes may overwrite them
        self.padded = {name for name, parameter in self._parameters.items() if covered[name] < parameter.numel()}
        self.device = next(iter(self._parameters.values())).device
        self.live: SharedBuffer | DeviceBuffer | None = (
            None  # None: a GPU with too little memory for the move keeps separate tensors
        )
        if self.device.type == "cpu" or torch.cuda.mem_get_info(self.device)[0] >= self.nbytes + DEVICE_RESERVE:
            self.renew()

    def renew(self) -> None:
        """Move the live weights to a new buffer, which a process that has mapped the old one cannot reach. On a GPU
        only before graph capture.
        """
        self.live = self._copy_of_live()
        self._point_at(self.live.tensor)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the separate tensors that vLLM loaded into

    def make_staging(self) -> "Staging":
        """A buffer as large as the rank's weights, filled with the live ones so that padding rows keep their values."""
        return Staging(self, self._copy_of_live())

    def commit(self, staging: "Staging") -> float:
        """Make the staged weights the live ones; seconds taken. Called between forward steps only."""
        start = time.perf_counter()
        if isinstance(staging.memory, SharedBuffer):
            self._point_at(staging.buffer)
            self.live, staging.memory = staging.memory, self.live
        else:
            if self.live is not None:
                self.live.tensor.copy_(staging.buffer)
            else:
                for name, view in self.views(staging.buffer).items():
                    self._parameters[name].data.copy_(view)
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def layout(self) -> dict[str, tuple[int, tuple[int, ...], str]]:
        """Each parameter by vLLM's name: its offset in bytes, shape and dtype."""
        return {
            name: (self.offsets[name], tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
            for name, parameter in self._parameters.items()
        }

    def digests(self) -> list[LiveShard]:
        """The checksum of each Hugging Face tensor's live part."""
        found = []
        for shard in chain.from_iterable(self.shards.values()):
            live = self._parameters[shard.vllm_name].data
            part = live.narrow(shard.dim, shard.start, shard.length) if live.dim() else live
            found.append(LiveShard(shard.name, shard.dim, shard.full_start, shard.length, digest(part)))
        return found

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter of this rank, by vLLM's name, as a view into `buffer` (flat uint8 [nbytes])."""
        views = {}
        for name, parameter in self._parameters.items():
            flat = buffer[self.offsets[name] :][: parameter.numel() * parameter.element_size()]
            views[name] = flat.view(parameter.dtype).view(parameter.shape)
        return views

    def _copy_of_live(self) -> SharedBuffer | DeviceBuffer:
        memory: SharedBuffer | DeviceBuffer = (
            SharedBuffer(self.nbytes)
            if self.device.type == "cpu"
            else DeviceBuffer(torch.empty(self.nbytes, dtype=torch.uint8, device=self.device))
        )
        for name, view in self.views(memory.tensor).items():
            view.copy_(self._parameters[name].data)
        return memory

    def _point_at(self, buffer: torch.Tensor) -> None:
        for name, view in self.views(buffer).items():
            self._parameters[name].data = view


@dataclass
class Staging:
    """The buffer into which one session receives. A failed session keeps its own, so that its late bytes cannot reach
    another.
    """

    arena: Arena
    memory: SharedBuffer | DeviceBuffer

    @property
    def buffer(self) -> torch.Tensor:
        return self.memory.tensor

    def receive(self, bucket: Bucket, broadcast: Callable[[torch.Tensor], None]) -> None:
        """Receive one bucket; `broadcast` fills a flat uint8 buffer [end - start]."""
        start = self._direct_offset(bucket)
        if start is not None:
            broadcast(self.buffer[start : start + bucket.end - bucket.start])
            return
        scratch = torch.empty(bucket.end - bucket.start, dtype=torch.uint8, device=self.buffer.device)
        broadcast(scratch)
        views = self.arena.views(self.buffer)
        for tensor in bucket.tensors:
            target = views[tensor.vllm_name]
            offset = tensor.offset - bucket.start
            whole = scratch[offset : offset + tensor.nbytes].view(target.dtype).view(tensor.shape)
            for shard in self.arena.shards[tensor.name]:
                target.narrow(shard.dim, shard.start, shard.length).copy_(
                    whole.narrow(shard.dim, shard.full_start, shard.length)
                )

    def _direct_offset(self, bucket: Bucket) -> int | None:
        """The offset in the arena at which the bucket can be received unchanged, or None if it must be split up."""
        places = set()
        for tensor in bucket.tensors:
            shard = self.arena.shards[tensor.name][0]  # of several, none is whole
            if not shard.whole or shard.vllm_name in self.arena.padded:
                return None
            row_bytes = tensor.nbytes // tensor.shape[0]
            places.add(self.arena.offsets[shard.vllm_name] + shard.start * row_bytes - (tensor.offset - bucket.start))
        return places.pop() if len(places) == 1 else None
