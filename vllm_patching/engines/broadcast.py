"""Weights by broadcast: the trainer sends tensors over Gloo or NCCL to the updater thread of every worker.

trainer                          worker r: BroadcastReceiver on WeightUpdater_TP{r}
   │ store[id/go/k] = Announced ──▶│
   │ bucket 0, bucket 1, ...   ───▶│ into the staging buffer, while generation continues; with --bridge-delta what has
   │                               │ changed of each, on top of the live words
   │◀─── store[id/ack/k/r] ────────┤
   │ POST /v1/bridge/commit    ───▶ BroadcastEngine.apply: all ranks between the same two forward passes

Rank 0 of the trainer sends whole tensors, or several ranks send the parts that they hold, at the same time
(atroposlib/wire/senders.py).
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from atroposlib.wire.bridge import GOODBYE, Announced, BroadcastOffer, Bucket, ack_key, go_key
from atroposlib.wire.senders import expect_layouts, group_name, sender_ack_key
from vllm_patching import delta, transport
from vllm_patching.engines.base import Receiver, Refused, StagingEngine, log
from vllm_patching.several_senders import SeveralSenders

POLL_S = 0.01  # seconds between two looks for a transfer
WINDOW = 4  # buckets that senders may send at once: with fewer, they wait for their turn
MAX_SENDERS = 1024  # a worker has a group with each


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
        if offer.senders is not None:
            if offer.delta:
                raise Refused("--bridge-delta needs one sender: use --bridge-sends gathered", 422)
            if offer.senders.count > MAX_SENDERS:
                raise Refused(f"{offer.senders.count} senders: a server takes at most {MAX_SENDERS}", 422)
            try:
                manifest = await self.serving.manifest()
                await asyncio.to_thread(expect_layouts, manifest, offer.bucket_bytes, offer.senders)
            except ValueError as error:
                raise Refused(str(error), 422) from error


class BroadcastReceiver(Receiver):
    """Rank `rank` + 1 of the trainer's groups. The trainer announces each transfer in its store, which this side polls:
    unlike a collective, polling has no deadline.
    """

    offer: BroadcastOffer

    def __init__(self, offer: BroadcastOffer, rank: int) -> None:
        super().__init__(offer, rank)
        self._groups: list[transport.Groups] = []  # with each sender
        self._held = ExitStack()

    def join(self) -> None:
        offer, senders = self.offer, self.offer.senders
        log.info(
            "Joining session %s of trainer %s (%d sender(s)) at %s:%d as rank %d of %d, at most %.0f s each",
            offer.session,
            offer.trainer,
            1 if senders is None else senders.count,
            offer.address,
            offer.port,
            self.rank + 1,
            offer.world_size,
            offer.timeout_s,
        )
        start = time.monotonic()
        self.bucket_bytes = offer.bucket_bytes
        self.on_device = offer.backend == "nccl"
        self._sequence = 0
        self._store = transport.join_store(offer.address, offer.port, offer.timeout_s)
        self._held.callback(self._groups.clear)  # so that senders notice at once that a session is over
        if senders is None:
            self._join(offer.session)
        else:
            for sender in range(senders.count):
                with transport.naming(f"trainer rank {sender} of {senders.count} did not join"):
                    self._join(group_name(offer.session, sender))
            self._several = SeveralSenders(senders, self._groups)
            self.window = WINDOW * offer.bucket_bytes if offer.backend == "gloo" else 0
        log.info(
            "Joined session %s after %.1f s; receiving in buckets of %.0f MiB",
            offer.session,
            time.monotonic() - start,
            offer.bucket_bytes / 2**20,
        )

    def next_version(self) -> int | None:
        key = go_key(self.offer.session, self._sequence)
        while not self.over and not self._store.check([key]):  # a wait that times out writes two lines to vLLM's log
            time.sleep(POLL_S)
        if self.over or (message := self._store.get(key)) == GOODBYE.encode():
            self.over = True
            return None
        announced = Announced.decoded(message)
        self.base = announced.base
        return announced.version

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> Callable[[], None] | None:
        if self.offer.senders is not None:
            return self._several.begin(bucket, buffer)
        if self.offer.delta:
            delta.receive(self._groups[0], buffer, has_base=self.base is not None)
        else:
            self._groups[0].broadcast(buffer)
        return None

    def staged(self, seconds: float) -> None:
        session, senders = self.offer.session, self.offer.senders
        for sender in range(0 if senders is None else senders.count):
            self._store.set(sender_ack_key(session, self._sequence, self.rank, sender), "")
        self._store.set(ack_key(session, self._sequence, self.rank), f"{seconds:.6f}")
        self._sequence += 1

    def leave(self) -> None:
        self._held.close()

    def _join(self, name: str) -> None:
        offer = self.offer
        groups = transport.join_groups(
            self._store,
            name,
            self.rank + 1,
            offer.world_size,
            offer.timeout_s,
            offer.backend,
            transport.address_towards(offer.address),
        )
        self._held.callback(groups.close)
        self._groups.append(groups)
