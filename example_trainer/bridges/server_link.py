"""One vLLM server as the broadcast bridge holds it: a session, process groups of its own, and a heartbeat.

A link fails alone: what breaks it (a dead, silent or refusing peer) ends this session and touches no other server's.
A method that raised BridgeError is not called again; `drop` ends what is left.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from atroposlib.clients.waiting import waiting
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import GOODBYE, BroadcastOffer, Bucket, Committed, Manifest, ack_key, go_key
from example_trainer.bridges.base import BridgeError
from example_trainer.bridges.session import Session, offer, told
from example_trainer.bridges.vllm_client import VllmClient
from vllm_patching import transport

log = get_logger(__name__)


@dataclass(frozen=True)
class LinkSettings:
    """What the trainer wants of every link."""

    backend: str  # of the data group: gloo | nccl
    bucket_bytes: int
    timeout_s: float
    lease_s: float


class Rendezvous:
    """Where the trainer listens: the workers of all servers come here, each session under its own keys."""

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._listener: dist.TCPStore | None
        self._listener, self.port = transport.host_store(address, port, timeout_s)

    def connection(self) -> dist.TCPStore:
        """A connection of its own, so that a wait on one link holds up no other."""
        return transport.join_store(self.address, self.port, self._timeout_s)

    def close(self) -> None:
        """Stop listening; its C++ thread must end while the interpreter still lives."""
        self._listener = None


class ServerLink:
    """Joins the workers of `vllm` at `rendezvous`; raises BridgeError if they do not come in time."""

    def __init__(self, vllm: VllmClient, manifest: Manifest, rendezvous: Rendezvous, settings: LinkSettings) -> None:
        self.vllm = vllm
        self._workers = manifest.tp_size
        self._nbytes = manifest.nbytes
        self._buckets = manifest.buckets(settings.bucket_bytes)
        self._settings = settings
        self._sequence = 0
        self._store = rendezvous.connection()
        offered = self._offer(manifest, rendezvous)
        vllm.open_session(offered)
        self.session = Session(vllm, offered)
        with ExitStack() as undo:
            undo.callback(self.session.close)
            self._groups = self._form_groups(rendezvous)
            undo.pop_all()

    @property
    def bytes_sent(self) -> int:
        """Of one transfer; every worker receives whole tensors."""
        return self._nbytes * self._workers

    def transfer(self, version: int, read: Callable[[Bucket], torch.Tensor]) -> None:
        """Send all of `version` and wait until every worker has staged it; generation goes on meanwhile."""
        timeout_s = self._settings.timeout_s
        log.info(
            "[Bridge] Broadcasting policy version %d: %.1f MB in %d buckets to %d worker(s) of %s,"
            " at most %.0f s a bucket",
            version,
            self._nbytes / 1e6,
            len(self._buckets),
            self._workers,
            self.vllm.url,
            timeout_s,
        )
        acks = [ack_key(self.session.id, self._sequence, rank) for rank in range(self._workers)]
        go = go_key(self.session.id, self._sequence)
        try:
            self._store.set(go, str(version))
            for bucket in self._buckets:
                self._groups.broadcast(read(bucket))
            self._store.wait(acks, timedelta(seconds=timeout_s))
            for key in (go, *acks):  # a long run must not fill the store
                self._store.delete_key(key)
        except RuntimeError as error:  # torch.distributed's errors for a dead or silent peer
            raise BridgeError(
                f"policy version {version} did not reach every worker of {self.vllm.url} within {timeout_s:.0f} s: "
                f"{transport.describe(error)}. {self._worker_states()}"
            ) from error
        self._sequence += 1

    def commit(self, version: int) -> Committed:
        """Make the staged version the served one; what it took, in seconds."""
        return self.vllm.commit(self.session.id, version)

    def drop(self, reason: str) -> None:
        """End a link that failed; ask the server, if it still listens, not to sample from a version that the others
        have left.
        """
        self.session.fence(reason)
        self._release()

    def close(self) -> None:
        """Leave in an orderly way."""
        with told(f"Left session {self.session.id}, but its workers could not be told"):
            self._store.set(go_key(self.session.id, self._sequence), GOODBYE)
        self.session.close()
        self._release()

    def _release(self) -> None:
        self._groups.close()
        del self._groups, self._store  # for their C++ threads, as above

    def _offer(self, manifest: Manifest, rendezvous: Rendezvous) -> BroadcastOffer:
        make = partial(
            BroadcastOffer,
            address=rendezvous.address,
            port=rendezvous.port,
            world_size=1 + self._workers,
            backend=self._settings.backend,
            manifest_digest=manifest.digest(),
            bucket_bytes=self._settings.bucket_bytes,
            timeout_s=self._settings.timeout_s,
        )
        return offer(make, self._settings.lease_s)

    def _form_groups(self, rendezvous: Rendezvous) -> transport.Groups:
        backend, timeout_s, world_size = self._settings.backend, self._settings.timeout_s, 1 + self._workers
        where = f"{rendezvous.address}:{rendezvous.port}"
        log.info("[Bridge] Creating Gloo process group: rank 0 of %d at %s", world_size, where)
        arguments = (self._store, self.session.id, 0, world_size, timeout_s)
        try:
            with waiting(log, f"{self._workers} weight updater(s)", peer=self.vllm.url, deadline_s=timeout_s):
                control = transport.make_control_group(*arguments, rendezvous.address)
            log.info("[Bridge] ✓ Gloo group created")
            data = transport.make_data_group(control, *arguments, backend)
            if backend == "nccl":
                log.info("[Bridge] ✓ NCCL group created")
            else:
                log.info("[Bridge] ✓ Data group is Gloo too (between GPUs: [Bridge] ✓ NCCL group created)")
            groups = transport.Groups(control, data, backend)
            groups.barrier()
        except RuntimeError as error:
            raise BridgeError(
                f"the {self._workers} weight updater(s) of {self.vllm.url} did not join at {where} within "
                f"{timeout_s:.0f} s: {transport.describe(error)}. {self._worker_states()}"
            ) from error
        return groups

    def _worker_states(self) -> str:
        """What vLLM's workers report, for an error message."""
        try:
            workers = self.vllm.status().workers
        except BridgeError as error:
            return f"The vLLM server at {self.vllm.url} does not answer either ({error}); see its log."
        return "Workers: " + "; ".join(
            f"TP{worker.rank} {worker.state}" + (f" ({worker.error})" if worker.error else "") for worker in workers
        )
