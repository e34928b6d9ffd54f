"""The thread that receives weights inside a vLLM worker, one a worker: `WeightUpdater_TP{r}`.

It only ever writes a staging buffer; live parameters change in `take`, which the worker calls between two forward
steps. The thread waits for sessions offered through the guarded HTTP endpoint, so it connects to nobody by itself. A
failed session is dropped with its buffer; if its thread hangs in a collective, a new thread of the same name serves
the next session and the old one ends at its deadline without touching anything.
"""

import queue
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from atroposlib.wire.bridge import GOODBYE, BroadcastOffer, WorkerStatus, ack_key, go_key
from vllm_patching import transport
from vllm_patching.compat import init_logger
from vllm_patching.memory.arena import Arena, Staging

log = init_logger("vllm.atropos_bridge")

IDLE_POLL_S = 5.0  # a store wait that times out poisons nothing, unlike a collective


@dataclass
class _Staged:
    session: str
    version: int
    staging: Staging


class WeightUpdater:
    """Owns the thread and the staged weights of one worker (`rank` = its TP rank)."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._staged: _Staged | None = None
        self._status = WorkerStatus(rank)
        self._offers: queue.Queue[BroadcastOffer] = queue.Queue()
        self._start_thread()

    @property
    def thread_name(self) -> str:
        return f"WeightUpdater_TP{self._status.rank}"

    def status(self) -> WorkerStatus:
        return self._status

    def open(self, offer: BroadcastOffer) -> None:
        """Join `offer` in the background; whatever an earlier session had staged is dropped."""
        with self._lock:
            self._leave_current()
            self._status = WorkerStatus(self._status.rank, "joining", offer.session)
            self._offers.put(offer)

    def leave(self) -> None:
        """Forget the session, if any; its thread drops the staging buffer within IDLE_POLL_S."""
        with self._lock:
            self._leave_current()
            self._status = WorkerStatus(self._status.rank)

    def take(self, session: str, version: int) -> Staging | None:
        """The staging buffer holding `version` of `session`, or None if that is not what is staged."""
        with self._lock:
            staged = self._staged
            return staged.staging if staged and (staged.session, staged.version) == (session, version) else None

    def committed(self) -> None:
        with self._lock:
            self._staged = None
            if self._status.state == "staged":
                self._status.state = "joined"

    def _leave_current(self) -> None:
        self._staged = None
        if self._status.state in ("joining", "joined", "receiving", "staged"):
            log.info("Session %s is replaced", self._status.session)
            self._start_thread()

    def _start_thread(self) -> None:
        self._offers = queue.Queue()
        threading.Thread(target=self._run, args=(self._offers,), name=self.thread_name, daemon=True).start()

    def _run(self, offers: "queue.Queue[BroadcastOffer]") -> None:
        while offers is self._offers:
            offer = offers.get()
            try:
                self._serve(offer)
            except (RuntimeError, OSError) as error:  # torch.distributed raises RuntimeError for dead and silent peers
                self._fail(offer, error)

    def _serve(self, offer: BroadcastOffer) -> None:
        rank = self._status.rank
        peer = f"{offer.address}:{offer.port}"
        log.info(
            "Joining session %s of trainer %s at %s as rank %d of %d, at most %.0f s",
            offer.session,
            offer.trainer,
            peer,
            rank + 1,
            offer.world_size,
            offer.timeout_s,
        )
        start = time.monotonic()
        staging = self._arena.make_staging()
        store = transport.join_store(offer.address, offer.port, offer.timeout_s)
        own_address = transport.address_towards(offer.address)
        control = transport.make_control_group(
            store, offer.session, rank + 1, offer.world_size, offer.timeout_s, own_address
        )
        data = transport.make_data_group(
            control, store, offer.session, rank + 1, offer.world_size, offer.timeout_s, offer.backend
        )
        groups = transport.Groups(control, data, offer.backend)
        groups.barrier()
        self._show(offer, "joined")
        log.info(
            "Joined session %s after %.1f s; receiving in buckets of %.0f MiB",
            offer.session,
            time.monotonic() - start,
            offer.bucket_bytes / 2**20,
        )
        buckets = self._arena.manifest.buckets(offer.bucket_bytes)
        sequence = 0
        while (version := self._next_version(store, offer, sequence)) is not None:
            self._begin_receiving(offer)
            log.info(
                "Receiving policy version %d (%.1f MB, %d buckets) from %s, at most %.0f s a bucket",
                version,
                self._arena.manifest.nbytes / 1e6,
                len(buckets),
                peer,
                offer.timeout_s,
            )
            begun = time.perf_counter()
            for bucket in buckets:
                staging.receive(bucket, groups.broadcast)
            if staging.buffer.is_cuda:
                torch.cuda.current_stream(staging.buffer.device).synchronize()
            seconds = time.perf_counter() - begun
            with self._lock:
                if self._status.session != offer.session:
                    raise RuntimeError(f"session {offer.session} was replaced while it was receiving")
                self._staged = _Staged(offer.session, version, staging)
                self._status = WorkerStatus(rank, "staged", offer.session, version, round(seconds, 4))
            log.info("Staged policy version %d after %.3f s", version, seconds)
            store.set(ack_key(offer.session, sequence, rank), f"{seconds:.6f}")
            sequence += 1
        groups.close()
        log.info("Session %s of trainer %s ended after %d transfers", offer.session, offer.trainer, sequence)
        self._show(offer, "idle")

    def _next_version(self, store: dist.TCPStore, offer: BroadcastOffer, sequence: int) -> int | None:
        """Block until the trainer announces transfer `sequence`; None when it says goodbye or the session was
        replaced.
        """
        while self._status.session == offer.session:
            try:
                store.wait([go_key(offer.session, sequence)], timedelta(seconds=IDLE_POLL_S))
            except dist.DistStoreError:  # nothing announced yet
                continue
            announced = store.get(go_key(offer.session, sequence)).decode()
            return None if announced == GOODBYE else int(announced)
        return None

    def _begin_receiving(self, offer: BroadcastOffer) -> None:
        """What the staging buffer holds is about to be overwritten."""
        with self._lock:
            self._staged = None
        self._show(offer, "receiving")

    def _show(self, offer: BroadcastOffer, state: str) -> None:
        with self._lock:
            if self._status.session == offer.session:
                self._status.state = state

    def _fail(self, offer: BroadcastOffer, error: Exception) -> None:
        message = transport.describe(error)
        log.warning(
            "Session %s of trainer %s failed (%s); serving goes on with the last committed weights, a new trainer may"
            " join",
            offer.session,
            offer.trainer,
            message,
        )
        with self._lock:
            if (
                self._status.session == offer.session
            ):  # a version that is staged whole stays: its commit may be under way
                self._status.state = "failed"
                self._status.error = message
