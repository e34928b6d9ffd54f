"""All parameters of one rank in flat buffers: the live arena with which vLLM computes, and a staging arena that
receives.

    wire image (whole tensors) ──direct, TP=1──▶ staging arena ──commit──▶ live ◀──in place── trainer (single copy)
                 └── scratch ── this rank's shards ──▲

On a CPU both are shared buffers. A commit exchanges the two: parameters are re-pointed, no byte moves, and the
former live buffer becomes the next staging. On a GPU the live arena is one allocation, so that one CUDA IPC handle
shares it; captured graphs hold addresses, so a commit copies staging into it. So it does for staging in host memory
(--bridge-staging host), on a CPU, too. Memory: the rank's weights once, twice while a broadcasting trainer is joined;
host staging is allocated once, at the start, and serves one session after the other. Only while a frozen trainer's
session holds it does the next one get memory of its own.
"""

import logging
import math
import queue
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from atroposlib.wire.bridge import Bucket, LiveShard, Manifest, Shard, align
from vllm_patching.memory.digest import digest
from vllm_patching.memory.host_buffer import HostBuffer
from vllm_patching.memory.shared_buffer import SharedBuffer

log = logging.getLogger("vllm.atropos_bridge")

HANDOVER_S = 6.0  # for a session that was replaced to let go of host memory, unless it waits for a frozen trainer
DEVICE_RESERVE = 256 << 20  # bytes that stay free on a GPU when the arena is made


@dataclass
class DeviceBuffer:
    """`tensor`: flat uint8 [nbytes] in one allocation of a GPU."""

    tensor: torch.Tensor


class Arena:
    """The live parameters of one rank, and the making and committing of staging buffers for them."""

    def __init__(
        self, model: nn.Module, manifest: Manifest, shards: list[Shard], *, staging_on_host: bool = False
    ) -> None:
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
        self.staging_on_host = staging_on_host
        self._unused: queue.SimpleQueue[HostBuffer] = queue.SimpleQueue()  # of no session: one at most
        if staging_on_host:
            self._unused.put(HostBuffer(self.nbytes, self.device))

    def renew(self) -> None:
        """Move the live weights to a new buffer, which a process that has mapped the old one cannot reach. On a GPU
        only before graph capture.
        """
        self.live = self._copy_of_live()
        self._point_at(self.live.tensor)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the separate tensors that vLLM loaded into

    def make_staging(self) -> "Staging":
        """A buffer as large as the rank's weights, filled with the live ones so that padding rows keep their values.
        Raises SharedBufferError where a former session does not let go of its own and there is no memory for another.
        """
        if not self.staging_on_host:
            return Staging(self, self._copy_of_live())
        memory = self._unused_host_buffer()
        self._copy_live_into(memory.tensor)
        staging = Staging(self, memory)
        weakref.finalize(staging, self._keep, memory)  # once nothing can write to it or read from it
        return staging

    def _unused_host_buffer(self) -> HostBuffer:
        if self._unused.empty():
            log.info("Waiting for a former session to release the staging buffer, at most %.0f s", HANDOVER_S)
        try:
            return self._unused.get(timeout=HANDOVER_S)
        except queue.Empty:
            log.info("A former session still waits for its trainer: allocating another %.1f GB", self.nbytes / 1e9)
            return HostBuffer(self.nbytes, self.device)

    def _keep(self, memory: HostBuffer) -> None:
        if self._unused.empty():
            self._unused.put(memory)

    def commit(self, staging: "Staging") -> float:
        """Make the staged weights the live ones; seconds taken. Called between forward steps only."""
        start = time.perf_counter()
        if isinstance(staging.memory, SharedBuffer):
            assert isinstance(self.live, SharedBuffer)
            self._point_at(staging.buffer)
            self.live, staging.memory = staging.memory, self.live
        else:
            if self.live is not None:
                self.live.tensor.copy_(staging.buffer, non_blocking=True)
            else:
                for name, view in self.views(staging.buffer).items():
                    self._parameters[name].data.copy_(view, non_blocking=True)
            if self.device.type == "cuda":
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
        shards = []
        for shard in chain.from_iterable(self.shards.values()):
            part = digest(self.live_part(shard))
            shards.append(LiveShard(shard.name, shard.dim, shard.full_start, shard.length, part))
        return shards

    def live_part(self, shard: Shard) -> torch.Tensor:
        """Return what vLLM computes with, of one shard."""
        live = self._parameters[shard.vllm_name].data
        return live.narrow(shard.dim, shard.start, shard.length) if live.dim() else live

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
        self._copy_live_into(memory.tensor)
        return memory

    def _copy_live_into(self, buffer: torch.Tensor) -> None:
        for name, view in self.views(buffer).items():
            view.copy_(self._parameters[name].data)

    def _point_at(self, buffer: torch.Tensor) -> None:
        for name, view in self.views(buffer).items():
            self._parameters[name].data = view


@dataclass
class Staging:
    """The buffer into which one session receives. A failed session keeps its own, so that its late bytes cannot reach
    another.
    """

    arena: Arena
    memory: SharedBuffer | DeviceBuffer | HostBuffer

    @property
    def buffer(self) -> torch.Tensor:
        return self.memory.tensor

    def receive(
        self,
        bucket: Bucket,
        fill: Callable[[torch.Tensor], Callable[[], None] | None],
        *,
        on_live: bool = False,
        on_device: bool = False,
    ) -> Callable[[], None]:
        """Begin to receive one bucket; what completes it. `fill` fills a flat uint8 buffer [end - start], or returns
        what completes that. The buffer holds the rank's live weights if `on_live`, and is on vLLM's device if
        `on_device`.
        """
        start, nbytes = self._direct_offset(bucket), bucket.end - bucket.start
        device = self.arena.device if on_device else self.buffer.device
        if start is not None and device == self.buffer.device:
            buffer = self.buffer[start : start + nbytes]
        else:
            buffer, start = torch.empty(nbytes, dtype=torch.uint8, device=device), None
        if on_live:
            for part, shard in self._parts(bucket, buffer):
                part.copy_(self.arena.live_part(shard))
        filled = fill(buffer)

        def complete() -> None:
            if filled is not None:
                filled()
            if start is None:
                views = self.arena.views(self.buffer)
                for part, shard in self._parts(bucket, buffer):
                    views[shard.vllm_name].narrow(shard.dim, shard.start, shard.length).copy_(part)

        return complete

    def _parts(self, bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, Shard]]:
        """This rank's shards of a bucket's tensors, as views into the bucket's bytes."""
        for tensor in bucket.tensors:
            start = tensor.offset - bucket.start
            whole = buffer[start : start + tensor.nbytes].view(getattr(torch, tensor.dtype)).view(tensor.shape)
            for shard in self.arena.shards[tensor.name]:
                yield whole.narrow(shard.dim, shard.full_start, shard.length), shard

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
