"""The broadcast bridge's link to one vLLM server: a session, its own process groups, and a heartbeat.

A link fails alone: a dead, silent or refusing peer ends this session and no other. After BridgeError no method is
called again; `drop` ends the rest.
"""

import ipaddress
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from atroposlib.addresses import resolved
from atroposlib.clients.waiting import waiting
from atroposlib.errors import AtroposError, reading
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import GOODBYE, Announced, BroadcastOffer, Bucket, Manifest, ack_key, go_key
from example_trainer.bridges.base import BridgeError
from example_trainer.bridges.direct import Direct, with_layouts
from example_trainer.bridges.session import Session, offered_by_us, told
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.settings.bridges import Grouped
from example_trainer.settings.config import TrainerConfig
from vllm_patching import delta, transport

log = get_logger(__name__)


class Rendezvous:
    """Holds the listener that the workers of all servers come to, each session under its own keys."""

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._listener: dist.TCPStore | None
        self._listener, self.port = transport.host_store(address, port, timeout_s)

    def close(self) -> None:
        """Stop listening; its C++ thread must end while the interpreter still lives."""
        self._listener = None


def listen(config: TrainerConfig, mode: Grouped) -> Rendezvous:
    """Listen where the workers of all servers will come. Raises BridgeError if a server on another machine could
    not.
    """
    address = _resolve(mode.master_addr, "MASTER_ADDR")
    for host, _ in config.vllm_servers:
        expect_reach(host, address, mode)
    return Rendezvous(address, mode.master_port, config.bridge_timeout_s)


def expect_reach(host: str, address: str, mode: Grouped) -> None:
    """Raise BridgeError if the server on `host` cannot reach the trainer, which listens at `address`."""
    if not ipaddress.ip_address(address).is_loopback:
        return
    server = _resolve(host, "vLLM server" if not mode.external else "SGLang server")
    own = transport.address_towards(server)
    if own != server and not ipaddress.ip_address(server).is_loopback:
        raise BridgeError(
            f"the server on {host} runs on another machine and cannot reach MASTER_ADDR={mode.master_addr}"
            f" ({address}): set --master-addr to an address of this machine that it can reach, probably {own}"
        )


def _resolve(host: str, what: str) -> str:
    with reading(f"{what} {host} cannot be resolved to an address", BridgeError):
        return resolved(host)


class ServerLink:
    """Joins the workers of `vllm` at `rendezvous`; raises BridgeError if they do not come in time.

    `backend` is the data group's: gloo | nccl. With `direct`, the trainer's ranks join and send for themselves. With
    `only_changes` each transfer after the first sends what has changed since the last one, of which this link keeps a
    copy in host memory; not with both.
    """

    def __init__(
        self,
        vllm: VllmClient,
        manifest: Manifest,
        rendezvous: Rendezvous,
        *,
        backend: str,
        bucket_bytes: int,
        lease_s: float,
        direct: Direct | None = None,
        only_changes: bool = False,
    ) -> None:
        self.vllm = vllm
        self._direct = direct
        self._groups: transport.Groups | None = None
        self.bytes_whole = manifest.nbytes * manifest.tp_size  # every worker receives whole tensors
        self.bytes_sent = self.bytes_whole  # of the last transfer
        self.words_changed: float | None = None  # share in it, where the receiver had a version before
        self._sent_last = torch.empty(manifest.nbytes, dtype=torch.uint8) if only_changes else None
        self._base: int | None = None  # its version
        self._manifest = manifest
        self._buckets = manifest.buckets(bucket_bytes)
        self._timeout_s = rendezvous.timeout_s
        self._sequence = 0
        # a connection of its own, so that a wait on one link holds up no other
        self._store = transport.join_store(rendezvous.address, rendezvous.port, self._timeout_s)
        offer = BroadcastOffer(
            **offered_by_us(lease_s),
            address=rendezvous.address,
            port=rendezvous.port,
            world_size=1 + manifest.tp_size,
            backend=backend,
            manifest_digest=manifest.digest(),
            bucket_bytes=bucket_bytes,
            timeout_s=self._timeout_s,
            senders=None if direct is None else with_layouts(direct.senders, manifest, bucket_bytes),
            delta=only_changes,
        )
        vllm.open_session(offer)
        self.session = Session(vllm, offer)
        with ExitStack() as undo:
            undo.callback(self.session.close)
            if direct is None:
                self._groups = self._form_groups(offer)
            else:
                undo.callback(direct.ranks.leave, offer.session)
                self._join_directly(direct, offer)
            undo.pop_all()

    def transfer(self, version: int, read: Callable[[Sequence[Bucket]], Generator[torch.Tensor, None, None]]) -> None:
        """Send all of `version` and wait until every worker has staged it; generation continues meanwhile."""
        size = f"{self._manifest.nbytes / 1e6:.1f} MB"
        log.info(
            "[Bridge] Broadcasting policy version %d%s in %d buckets to %d worker(s) of %s, at most %.0f s per bucket",
            version,
            f": {size}" if self._base is None else f" (changes since {self._base}; {size} in all)",
            len(self._buckets),
            self._manifest.tp_size,
            self.vllm.url,
            self._timeout_s,
        )
        acks = [ack_key(self.session.id, self._sequence, rank) for rank in range(self._manifest.tp_size)]
        go = go_key(self.session.id, self._sequence)
        with self._reaching_workers(f"policy version {version} did not reach every worker of {self.vllm.url}"):
            self._store.set(go, Announced(version, self._base).encoded())
            if self._groups is None:
                self._send_directly()
            else:
                with closing(read(self._buckets)) as stream:
                    self._send(self._groups, stream)
            self._store.wait(acks, timedelta(seconds=self._timeout_s))
            for key in (go, *acks):  # a long run must not fill the store
                self._store.delete_key(key)
        self._sequence += 1
        if self._sent_last is not None:
            self._base = version

    def _send(self, groups: transport.Groups, stream: Iterable[torch.Tensor]) -> None:
        if self._sent_last is None:
            for packed in stream:
                groups.broadcast(packed)
            return
        sent = delta.Sent()
        for bucket, packed in zip(self._buckets, stream, strict=True):
            before = self._sent_last[bucket.start : bucket.end]
            sent += delta.send(groups, packed, before, whole=self._base is None)
        self.bytes_sent = sent.nbytes * self._manifest.tp_size
        self.words_changed = None if self._base is None else sent.changed / sent.words
        log.info(
            "[Bridge] Sent %.1f of %.1f MB to each worker of %s: %s",
            sent.nbytes / 1e6,
            self._manifest.nbytes / 1e6,
            self.vllm.url,
            "all weights, in the first sync of this session"
            if self.words_changed is None
            else f"{self.words_changed:.2%} of the words changed",
        )

    def drop(self, reason: str) -> None:
        """End a link that failed, and fence off its server."""
        self.session.fence(reason)
        self._release()

    def abandon(self) -> None:
        """Forget a link whose server is gone."""
        self.session.abandon()
        self._release()

    def close(self) -> None:
        """End the session."""
        with told(f"Left session {self.session.id}, but could not notify its workers"):
            self._store.set(go_key(self.session.id, self._sequence), GOODBYE)
        self.session.close()
        self._release()

    def _release(self) -> None:
        if self._groups is not None:
            self._groups.close()
        if self._direct is not None:
            with told(f"Not every trainer rank has left session {self.session.id}"):
                self._direct.ranks.leave(self.session.id)
        del self._groups, self._store  # for their C++ threads, as above

    def _join_directly(self, direct: Direct, offer: BroadcastOffer) -> None:
        where, count = f"{offer.address}:{offer.port}", direct.senders.count
        log.info(
            "[Bridge] Creating %d Gloo process groups of %d at %s, one for each trainer rank that sends",
            count,
            offer.world_size,
            where,
        )
        workers = f"{self._manifest.tp_size} weight updater(s) of {self.vllm.url}"
        with self._reaching_workers(f"the {workers} did not join {count} trainer ranks at {where}"):
            _expect_none(direct.ranks.join(offer, self._manifest))
        log.info("[Bridge] ✓ %d %s groups created", count, {"gloo": "Gloo", "nccl": "NCCL"}[offer.backend])

    def _send_directly(self) -> None:
        assert self._direct is not None
        _expect_none(self._direct.ranks.send(self.session.id))

    def _form_groups(self, offer: BroadcastOffer) -> transport.Groups:
        updaters, where = f"{self._manifest.tp_size} weight updater(s)", f"{offer.address}:{offer.port}"
        log.info("[Bridge] Creating Gloo process group: rank 0 of %d at %s", offer.world_size, where)
        arguments = (self._store, offer.session, 0, offer.world_size, self._timeout_s)
        with self._reaching_workers(f"the {updaters} of {self.vllm.url} did not join at {where}"):
            with waiting(log, updaters, peer=self.vllm.url, deadline_s=self._timeout_s):
                control = transport.make_control_group(*arguments, offer.address)
            log.info("[Bridge] ✓ Gloo group created")
            data = transport.make_data_group(control, *arguments, offer.backend)
            if offer.backend == "nccl":
                log.info("[Bridge] ✓ NCCL group created")
            else:
                log.info("[Bridge] ✓ Data group is Gloo too (between GPUs: [Bridge] ✓ NCCL group created)")
            groups = transport.Groups(control, data, offer.backend)
            groups.barrier()
        return groups

    @contextmanager
    def _reaching_workers(self, failed: str) -> Iterator[None]:
        try:
            yield
        except AtroposError:  # from reading the weights, for example because a trainer rank is gone
            raise
        except RuntimeError as error:  # torch.distributed's, for a dead or silent peer
            raise BridgeError(
                f"{failed} within {self._timeout_s:.0f} s: {transport.describe(error)}. {self._worker_states()}"
            ) from error

    def _worker_states(self) -> str:
        try:
            workers = self.vllm.status().workers
        except BridgeError as error:
            return f"The vLLM server at {self.vllm.url} does not answer either ({error}); see its log."
        return "Workers: " + "; ".join(
            f"TP{worker.rank} {worker.state}" + (f" ({worker.error})" if worker.error else "") for worker in workers
        )


def _expect_none(failures: list[str]) -> None:
    if failures:
        raise transport.PeerLost("; ".join(failures))
