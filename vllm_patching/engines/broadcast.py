"""Weights by broadcast: the trainer sends whole tensors over Gloo or NCCL to the updater thread of every worker.

trainer                          worker r: BroadcastReceiver on WeightUpdater_TP{r}
   │ store[id/go/k] = version  ───▶│
   │ bucket 0, bucket 1, ...   ───▶│ into the staging buffer, while generation continues
   │◀─── store[id/ack/k/r] ────────┤
   │ POST /v1/bridge/commit    ───▶ BroadcastEngine.apply: all ranks between the same two forward passes
"""

import time
from contextlib import ExitStack

import torch

from atroposlib.wire.bridge import GOODBYE, BroadcastOffer, Bucket, ack_key, go_key
from vllm_patching import transport
from vllm_patching.engines.base import Receiver, Refused, StagingEngine, log

POLL_S = 0.01  # seconds between two looks for a transfer


class BroadcastEngine(StagingEngine):
    """The server's half: as for every mode that stages in the workers, and a check of the number of ranks."""

    feeds_several = True

    async def fits(self, offer: BroadcastOffer) -> None:
        workers = self.serving.tp_size
        if offer.world_size != 1 + workers:
            raise Refused(
                f"world_size {offer.world_size}: this server has {workers} worker(s), so it must be {1 + workers}", 422
            )
        await super().fits(offer)


class BroadcastReceiver(Receiver):
    """Rank `rank` + 1 of the trainer's groups. The trainer announces each transfer in its store, which this side polls:
    unlike a collective, polling has no deadline.
    """

    offer: BroadcastOffer

    def __init__(self, offer: BroadcastOffer, rank: int) -> None:
        super().__init__(offer, rank)
        self._held = ExitStack()

    def join(self) -> None:
        offer, rank = self.offer, self.rank
        log.info(
            "Joining session %s of trainer %s at %s:%d as rank %d of %d, at most %.0f s",
            offer.session,
            offer.trainer,
            offer.address,
            offer.port,
            rank + 1,
            offer.world_size,
            offer.timeout_s,
        )
        start = time.monotonic()
        self.bucket_bytes = offer.bucket_bytes
        self._sequence = 0
        self._store = transport.join_store(offer.address, offer.port, offer.timeout_s)
        ranks = (self._store, offer.session, rank + 1, offer.world_size, offer.timeout_s)
        control = transport.make_control_group(*ranks, transport.address_towards(offer.address))
        self._groups = transport.Groups(
            control, transport.make_data_group(control, *ranks, offer.backend), offer.backend
        )
        self._held.callback(self._groups.close)
        self._groups.barrier()
        log.info(
            "Joined session %s after %.1f s; receiving in buckets of %.0f MiB",
            offer.session,
            time.monotonic() - start,
            offer.bucket_bytes / 2**20,
        )

    def next_version(self, wait_s: float) -> int | None:
        key, end = go_key(self.offer.session, self._sequence), time.monotonic() + wait_s
        while not self._store.check([key]):  # a wait that times out writes two lines to vLLM's log
            if time.monotonic() > end:
                return None
            time.sleep(POLL_S)
        announced = self._store.get(key).decode()
        self.over = announced == GOODBYE
        return None if self.over else int(announced)

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        self._groups.broadcast(buffer)

    def staged(self, seconds: float) -> None:
        self._store.set(ack_key(self.offer.session, self._sequence, self.rank), f"{seconds:.6f}")
        self._sequence += 1

    def leave(self) -> None:
        self._held.close()
