"""Mode broadcast: weights go to one updater thread per vLLM worker, of one server or of several.

    parameters ─(views)─▶ flat buffer in wire order ──Gloo/NCCL broadcast──▶ staging on every worker ──commit──▶ served
    several ranks' rows ──gathered on rank 0, or each rank its own (direct.py)──▶ the same

The trainer's parameters are views into one flat fp32 buffer laid out like the wire image, so when vLLM holds fp32
nothing is packed: the buffer itself is sent. For a bf16 server each bucket is cast on the way. The protocol is
atroposlib/wire/bridge.py.

Each of several servers has its own link. After a sync all of them serve the same version. A server that fails is fenced
off, named in a warning and skipped; it returns when it answers again. Training ends if all servers fail.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import torch

from atroposlib.addresses import server_address
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import Manifest
from example_trainer.bridges.base import BridgeError, Prepared, SyncReport, WeightBridge
from example_trainer.bridges.digest import differing
from example_trainer.bridges.direct import chosen
from example_trainer.bridges.each_server import ServerThreads, in_turn
from example_trainer.bridges.parity import parity
from example_trainer.bridges.server_link import Rendezvous, ServerLink, expect_reach, listen
from example_trainer.bridges.session import matching_manifest
from example_trainer.bridges.vllm_client import VllmClient, vllm_client, vllm_clients
from example_trainer.settings.bridges import Broadcast
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.source import shapes_of
from example_trainer.weights.written import TrainedModel

log = get_logger(__name__)

T = TypeVar("T")
READMIT_S = 30.0  # between two looks at servers that were left out


def prepare(config: TrainerConfig, source: str, device: torch.device) -> Prepared:
    """Listen where vLLM's workers will come. Raises BridgeError if a server on another machine could not reach it, or
    if none answers in time where the trainer is to load onto a GPU: while vLLM starts, it measures what its GPU has
    free, and would count the trainer's weights there as its own.
    """
    rendezvous = listen(config, config.mode(Broadcast))
    if device.type == "cuda":
        with ExitStack() as undo:
            undo.callback(rendezvous.close)
            until_ready(vllm_clients(config), config.vllm_start_timeout)
            undo.pop_all()
    return Prepared(partial(BroadcastBridge, config, rendezvous), rendezvous.close)


def until_ready(servers: Sequence[VllmClient], deadline_s: float) -> None:
    """Return once all of them answer. Raises BridgeError for one that does not by the deadline, which they share."""
    give_up = time.monotonic() + deadline_s
    for vllm in servers:
        vllm.wait_until_ready(max(0.0, give_up - time.monotonic()))


class BroadcastBridge(WeightBridge):
    """Trainer side of the broadcast: one link per server, all of one `source`."""

    def __init__(self, config: TrainerConfig, rendezvous: Rendezvous, trained: TrainedModel) -> None:
        self._trained = trained
        self._rendezvous = rendezvous
        self._servers = vllm_clients(config)
        self._mode = config.mode(Broadcast)
        self._links: list[ServerLink] = []
        self._left_out: list[VllmClient] = []
        self._next_look = 0.0
        self._threads = ServerThreads()
        self._config = config
        self._new: list[VllmClient] = []  # that joined, and have had no sync
        self._joined: list[VllmClient] = []  # and that have
        until_ready(self._servers, config.vllm_start_timeout)
        self._backend = self._chosen_backend(trained.model.device)
        self._manifest = matching_manifest(self._servers[0], shapes_of(trained.model))
        self._source = trained.source(self._manifest)
        protocols = {vllm.url: vllm.status().protocol for vllm in self._servers}
        self._direct = chosen(
            self._mode.sends_by, trained, self._backend, rendezvous.address, protocols, self._mode.delta
        )
        self.served_dtype = self._manifest.tensors[0].dtype
        manifests = [self._manifest, *map(self._matching_manifest, self._servers[1:])]
        with ExitStack() as undo:
            undo.callback(self.close)
            for vllm, manifest in zip(self._servers, manifests, strict=True):
                self._links.append(self._link(vllm, manifest))
            undo.pop_all()
        log.info("[Bridge] ✓ All ranks synchronized and ready")

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        self._readmit()
        self._on_each(lambda link: link.session.check())
        update()
        updated = time.perf_counter()
        # several NCCL communicators of one device take turns, and so do walks that all trainer ranks make; Gloo's
        # groups are sockets of their own
        self._on_each(
            lambda link: link.transfer(policy_version, self._source.stream),
            at_once=self._backend == "gloo" and not self._source.collective,
        )
        transferred = time.perf_counter()
        commits = self._on_each(lambda link: link.vllm.commit(link.session.id, policy_version))
        if self._new:
            self._on_each(lambda link: self._expect_right(link, policy_version), at_once=False)
        changed = [link.words_changed for link in self._links if link.words_changed is not None]
        stall_s, apply_s = max(commit.stall_s for commit in commits), max(commit.apply_s for commit in commits)
        log.info(
            "[Bridge] Policy version %d is served%s: transfer %.3f s, stall %.1f ms, apply %.1f ms",
            policy_version,
            f" by {len(self._links)} of {len(self._servers)} servers" if len(self._servers) > 1 else "",
            transferred - updated,
            stall_s * 1e3,
            apply_s * 1e3,
        )
        return SyncReport(
            policy_version=policy_version,
            stall_s=stall_s,
            transfer_s=transferred - updated,
            apply_s=apply_s,
            bytes_moved=sum(link.bytes_sent for link in self._links),
            bytes_whole=sum(link.bytes_whole for link in self._links) if self._mode.delta else None,
            words_changed=max(changed, default=None),
            servers=len(self._links),
        )

    def admit(self, url: str) -> None:
        if self._named(url):
            return
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0
        expect_reach(host, self._rendezvous.address, self._mode)
        vllm = vllm_client(self._config, host, port)
        self._servers.append(vllm)
        self._left_out.append(vllm)
        self._new.append(vllm)
        self._next_look = 0.0
        log.info("[Bridge] %s joins: it gets the policy with the next sync", url)

    def release(self, url: str, gone: bool = False) -> None:
        if (vllm := self._named(url)) is None:
            return
        if self._is_alone(vllm):  # one that was left out, or has just joined, may take its place
            self._next_look = 0.0
            self._readmit()
        if self._is_alone(vllm):
            raise BridgeError(f"{url} is the only vLLM server that is connected: without it nothing can be sampled")
        for link in [link for link in self._links if link.vllm is vllm]:
            self._links.remove(link)
            if gone:
                link.abandon()
            else:
                link.close()
        for clients in (self._servers, self._left_out, self._new, self._joined):
            if vllm in clients:
                clients.remove(vllm)
        left = len(self._servers)
        log.info("[Bridge] %s leaves: %d server%s the next sync", url, left, " gets" if left == 1 else "s get")

    def joined(self) -> Sequence[VllmClient]:
        return tuple(self._joined)

    def _is_alone(self, vllm: VllmClient) -> bool:
        return all(link.vllm is vllm for link in self._links)

    def _named(self, url: str) -> VllmClient | None:
        return next((vllm for vllm in self._servers if server_address(vllm.url) == server_address(url)), None)

    def _expect_right(self, link: ServerLink, policy_version: int) -> None:
        """Raise BridgeError if a server that joined computes with other words than the trainer's."""
        if link.vllm in self._new:
            if names := differing(self._source, self._manifest, link.vllm, policy_version):
                raise BridgeError(f"{len(names)} of its tensors are not the trainer's, among them {names[0]}")
            self._new.remove(link.vllm)
            self._joined.append(link.vllm)

    def decoders(self) -> Sequence[VllmClient]:
        return [link.vllm for link in self._links]

    def parity_probe(self) -> float:
        return max(self._on_each(lambda link: parity(self._trained, link.vllm), at_once=False))

    def differing_tensors(self, policy_version: int) -> list[str] | None:
        of_servers = self._on_each(
            lambda link: differing(self._source, self._manifest, link.vllm, policy_version), at_once=False
        )
        return sorted({name for names in of_servers for name in names})

    def check(self) -> None:
        lost = [link.session.heart.lost for link in self._links if link.session.heart.lost is not None]
        if lost and len(lost) == len(self._links):
            raise BridgeError(f"the session with vLLM is lost: {'; '.join(lost)}")

    def sessions(self) -> set[str]:
        return {link.session.id for link in self._links}

    def reconnect(self) -> None:
        for link in self._links:
            link.abandon()
        self._links, self._left_out, self._next_look = [], [*self._servers], 0.0
        self._readmit()
        if not self._links:
            raise BridgeError("no vLLM server could be joined again; the warnings before this have the reasons")

    def close(self) -> None:
        self._threads.close()
        for link in self._links:
            link.close()
        self._links.clear()
        self._rendezvous.close()

    def _on_each(self, act: Callable[[ServerLink], T], at_once: bool = True) -> list[T]:
        """Return what `act` returns for each live server. A server for which it fails is dropped; raises BridgeError
        when none is left.
        """
        if not self._links:
            raise BridgeError("no vLLM server is connected; the warnings before this have the reasons")
        on_each = self._threads.at_once if at_once and len(self._links) > 1 else in_turn
        outcomes = on_each(act, self._links)
        failed = [
            (link, outcome)
            for link, outcome in zip(self._links, outcomes, strict=True)
            if isinstance(outcome, BridgeError)
        ]
        if len(failed) == len(self._links):
            lost = f"all {len(self._servers)} vLLM servers are lost: " if len(self._servers) > 1 else ""
            raise BridgeError(lost + "; ".join(str(error) for _, error in failed)) from failed[0][1]
        for link, error in failed:
            self._links.remove(link)
            self._left_out.append(link.vllm)
            self._next_look = time.monotonic() + READMIT_S
            log.warning(
                "[Bridge] %s is fenced off, training continues with %d of %d servers: %s",
                link.vllm.url,
                len(self._links),
                len(self._servers),
                error,
            )
            link.drop(f"left out of the weight sync: {error}"[:1000])
        return [outcome for outcome in outcomes if not isinstance(outcome, BridgeError)]

    def _readmit(self) -> None:
        if not self._left_out or time.monotonic() < self._next_look:
            return
        for vllm in tuple(self._left_out):
            try:
                vllm.status()
                # the sync that follows brings it up to date
                self._links.append(self._link(vllm, self._matching_manifest(vllm)))
            except BridgeError as error:
                log.warning("[Bridge] %s stays out, next attempt in %.0f s: %s", vllm.url, READMIT_S, error)
            else:
                self._left_out.remove(vllm)
                log.info("[Bridge] %s is back", vllm.url)
        self._next_look = time.monotonic() + READMIT_S

    def _chosen_backend(self, device: torch.device) -> str:
        """--bridge-backend, or what suits `device`. A server with --batch-invariant fixes NCCL's settings in its
        workers; a group whose members have other settings hangs (by vLLM's source), so it is fed over Gloo.
        """
        exact = next((vllm.url for vllm in self._servers if vllm.status().batch_invariant), None)
        if self._mode.backend == "auto":
            return "nccl" if device.type == "cuda" and exact is None else "gloo"
        if self._mode.backend == "nccl" and exact is not None:
            raise BridgeError(
                f"--bridge-backend nccl: the vLLM server at {exact} runs with --batch-invariant, which gives its"
                " workers other NCCL settings than the trainer has; use gloo or auto"
            )
        return self._mode.backend

    def _link(self, vllm: VllmClient, manifest: Manifest) -> ServerLink:
        return ServerLink(
            vllm,
            manifest,
            self._rendezvous,
            backend=self._backend,
            bucket_bytes=self._mode.bucket_bytes(self._backend),
            lease_s=self._mode.lease_s,
            direct=self._direct,
            only_changes=self._mode.delta,
        )

    def _matching_manifest(self, vllm: VllmClient) -> Manifest:
        manifest = matching_manifest(vllm, self._source.shapes())
        if manifest.digest() != self._manifest.digest():
            raise BridgeError(
                f"{vllm.url} stores its weights differently ({manifest.tensors[0].dtype}) than {self._servers[0].url}"
                f" ({self.served_dtype}): start all vLLM servers with the same --model and --dtype"
            )
        return manifest
