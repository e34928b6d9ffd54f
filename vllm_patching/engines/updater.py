"""The thread that receives weights in a vLLM worker, one per worker: `WeightUpdater_TP{r}`.

It writes staging buffers only. Between two forward passes the worker takes a staged version (`take`) and swaps it in.
Sessions come through the guarded HTTP endpoint, each with the `Receiver` of its mode. A failed session is dropped with
its buffer. If its thread hangs in a collective, a new thread of the same name serves the next session, and the old one
ends at its deadline without touching anything.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from atroposlib.wire.bridge import WorkerState, WorkerStatus
from vllm_patching import transport
from vllm_patching.engines.base import Receiver, log
from vllm_patching.memory.arena import Arena, Staging


class WeightUpdater:
    """Owns the thread and the staged weights of one worker (`rank` = its TP rank)."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._staged: Staging | None = None  # has the version of `status`
        self._committed: tuple[str | None, int | None] | None = None  # session and version of the live weights
        self._receiver: Receiver | None = None
        self.status = WorkerStatus(rank)
        self._start_thread()

    @property
    def thread_name(self) -> str:
        return f"WeightUpdater_TP{self.status.rank}"

    def open(self, receiver: Receiver) -> None:
        """Join a session in the background; whatever an earlier session had staged is dropped."""
        with self._lock:
            self._leave_current()
            self.status = WorkerStatus(self.status.rank, "joining", receiver.offer.session)
            self._receiver = receiver
            self._sessions.put(receiver)

    def now(self) -> WorkerStatus:
        """Return a copy of the status: its state and its error belong together."""
        with self._lock:
            return msgspec.structs.replace(self.status)

    def request(self, session: str, version: int, request: Any) -> None:
        """Hand `session`'s receiver what the server was asked to stage. Raises RuntimeError if it is not current."""
        receiver, status = self._receiver, self.now()
        if receiver is None or receiver.offer.session != session or status.state == "failed":
            raise RuntimeError(f"session {session} is not open on rank {status.rank}: {status.error}")
        receiver.request(version, request)

    def leave(self) -> None:
        """Forget the session, if any. Its thread drops the staging buffer at once, unless it waits for a peer."""
        with self._lock:
            self._leave_current()
            self.status = WorkerStatus(self.status.rank)

    def take(self, session: str, version: int) -> Staging | None:
        """The staging buffer with `version` of `session`, or None if that is not what is staged."""
        with self._lock:
            return self._staged if (self.status.session, self.status.staged_version) == (session, version) else None

    def committed(self) -> None:
        with self._lock:
            self._staged = None
            self._committed = (self.status.session, self.status.staged_version)
            if self.status.state == "staged":
                self.status.state = "joined"

    def _leave_current(self) -> None:
        if self._receiver is not None:
            self._receiver.end()
        self._staged = self._receiver = None
        if self.status.state in ("joining", "joined", "receiving", "staged"):
            log.info("Session %s is replaced", self.status.session)
            self._start_thread()

    def _start_thread(self) -> None:
        self._sessions: queue.Queue[Receiver] = queue.Queue()
        threading.Thread(target=self._run, args=(self._sessions,), name=self.thread_name, daemon=True).start()

    def _run(self, sessions: "queue.Queue[Receiver]") -> None:
        if self._arena.device.type == "cuda":
            torch.cuda.set_device(self._arena.device)  # the current device is a thread's own, GPU 0 at first
        while sessions is self._sessions:
            receiver = sessions.get()
            try:
                self._serve(receiver)
            except (RuntimeError, OSError) as error:  # torch.distributed raises RuntimeError for dead and silent peers
                self._fail(receiver, transport.describe(error))
            except Exception as error:
                log.exception("Session %s met a fault", receiver.offer.session)
                self._fail(receiver, transport.describe(error))
            finally:
                self._let_go(receiver)

    def _serve(self, receiver: Receiver) -> None:
        offer = receiver.offer
        staging = self._arena.make_staging()
        receiver.join()
        self._show(receiver, "joined")
        transfers = 0
        while (version := receiver.next_version()) is not None:
            self._receive(receiver, staging, version)
            transfers += 1
        log.info("Session %s of trainer %s ended after %d transfers", offer.session, offer.trainer, transfers)
        self._show(receiver, "idle")

    def _receive(self, receiver: Receiver, staging: Staging, version: int) -> None:
        offer, rank = receiver.offer, self.status.rank
        buckets = self._arena.manifest.buckets(receiver.bucket_bytes)
        with self._lock:  # the content of the staging buffer is about to be overwritten
            self._staged = None
            committed = self._committed
        if receiver.base is not None and committed != (offer.session, receiver.base):
            raise RuntimeError(
                f"policy version {version} was sent as changes since {receiver.base}, which rank {rank} does not serve:"
                " a new session sends all weights"
            )
        self._show(receiver, "receiving")
        log.info(
            "Receiving policy version %d (%.1f MB, %d buckets) of trainer %s",
            version,
            self._arena.manifest.nbytes / 1e6,
            len(buckets),
            offer.trainer,
        )
        receiver.arriving = version
        begun = time.perf_counter()
        under_way: deque[tuple[int, Callable[[], None]]] = deque()  # the start of a bucket, and what completes it
        for bucket in buckets:
            while under_way and bucket.end - under_way[0][0] > receiver.window:
                under_way.popleft()[1]()
            complete = staging.receive(
                bucket,
                partial(receiver.fill, bucket),
                on_live=receiver.base is not None,
                on_device=receiver.on_device,
            )
            under_way.append((bucket.start, complete))
        while under_way:
            under_way.popleft()[1]()
        if self._arena.device.type == "cuda":
            torch.cuda.current_stream(self._arena.device).synchronize()
        seconds = time.perf_counter() - begun
        with self._lock:
            if self.status.session != offer.session:
                raise RuntimeError(f"session {offer.session} was replaced while it was receiving")
            self._staged = staging
            self.status = WorkerStatus(rank, "staged", offer.session, version, round(seconds, 4))
        receiver.arriving = None
        log.info("Staged policy version %d after %.3f s", version, seconds)
        receiver.staged(seconds)

    def _let_go(self, receiver: Receiver) -> None:
        try:
            receiver.leave()
        except RuntimeError as error:
            log.warning("Session %s could not be left: %s", receiver.offer.session, transport.describe(error))

    def _show(self, receiver: Receiver, state: WorkerState) -> None:
        with self._lock:
            if self.status.session == receiver.offer.session:
                self.status.state = state

    def _fail(self, receiver: Receiver, reason: str) -> None:
        offer = receiver.offer
        arriving = "" if receiver.arriving is None else f"; receiving policy version {receiver.arriving}"
        log.warning(
            "Session %s of trainer %s failed (%s%s); serving continues with the last committed weights, a new trainer"
            " may join",
            offer.session,
            offer.trainer,
            reason,
            arriving,
        )
        with self._lock:
            # a version that is completely staged stays: its commit may be in progress
            if self.status.session == offer.session:
                self.status.state = "failed"
                self.status.error = reason
