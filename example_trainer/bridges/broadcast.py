"""Mode broadcast: to one updater thread per vLLM worker, of one
server or of several.

    parameters ─(views)─▶ flat buffer in wire order ──Gloo/NCCL broadcast──▶ staging on every worker ──commit──▶ served

The trainer's parameters are views into one flat fp32 buffer laid out like the wire image, so when vLLM holds fp32
nothing is packed: the buffer itself is sent. For a bf16 server each bucket is cast on the way. The protocol is
atroposlib/wire/bridge.py.

Several servers each have their own link. After a sync all of them serve the same version; one that failed is fenced
off, named in a warning and left out, and let in again when it answers. Training ends when none is left.
"""

import ipaddress
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import requests
import torch
from transformers import PreTrainedModel

from atroposlib.logs import get_logger
from atroposlib.wire.bridge import Manifest, ManifestMismatch, compare
from example_trainer.bridges.base import BridgeError, SyncReport
from example_trainer.bridges.parity import parity
from example_trainer.bridges.server_link import LinkSettings, Rendezvous, ServerLink
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.config import TrainerConfig
from example_trainer.model import load_model
from example_trainer.modes import Broadcast
from example_trainer.weights.flat import FlatWeights
from vllm_patching import transport

log = get_logger(__name__)

T = TypeVar("T")
READMIT_S = 30.0  # between two looks at servers that were left out


class BroadcastBridge:
    """Trainer side of the broadcast."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._mode = config.mode(Broadcast)
        key = config.vllm_api_key.get_secret_value() if config.vllm_api_key else None
        self._servers = [VllmClient(host, port, key, config.bridge_timeout_s) for host, port in config.vllm_servers]
        self._links: list[ServerLink] = []
        self._left_out: list[VllmClient] = []
        self._next_look = 0.0
        self._rendezvous: Rendezvous | None = None

    def connect(self, source: str, device: torch.device) -> PreTrainedModel:
        address = _reachable_address(self._config)
        self._model = model = load_model(source, device, gradient_checkpointing=self._config.gradient_checkpointing)
        give_up = time.monotonic() + self._config.vllm_start_timeout
        for vllm in self._servers:
            vllm.wait_until_ready(max(0.0, give_up - time.monotonic()))
        self._manifest = self._servers[0].manifest()
        self.served_dtype = self._manifest.tensors[0].dtype
        manifests = [self._matching_manifest(vllm) for vllm in self._servers]
        count = len(self._manifest.tensors)
        log.info("[Bridge] Mapped %d/%d params from vLLM to trainer", count, count)
        self._image = FlatWeights(self._manifest, dict(model.named_parameters()))
        self._settings = self._link_settings()
        self._rendezvous = Rendezvous(address, self._mode.master_port, self._config.bridge_timeout_s)
        for vllm, manifest in zip(self._servers, manifests, strict=True):
            self._links.append(ServerLink(vllm, manifest, self._rendezvous, self._settings))
        log.info("[Bridge] ✓ All ranks synchronized and ready")
        return model

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        if self._rendezvous is None:
            raise BridgeError("the bridge is not connected: call connect first")
        self._readmit(self._rendezvous)
        self._on_each(ServerLink.check_alive)
        start = time.perf_counter()
        update()
        updated = time.perf_counter()
        # several NCCL communicators of one device take turns; Gloo's groups are sockets of their own
        self._on_each(
            lambda link: link.transfer(policy_version, self._image.bucket), at_once=self._settings.backend == "gloo"
        )
        transferred = time.perf_counter()
        commits = self._on_each(lambda link: link.commit(policy_version))
        stall_s, apply_s = (max(commit[part] for commit in commits) for part in ("stall_s", "apply_s"))
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
            update_s=updated - start,
            stall_s=stall_s,
            transfer_s=transferred - updated,
            apply_s=apply_s,
            bytes_moved=sum(link.bytes_sent for link in self._links),
            servers=len(self._links),
        )

    def parity_probe(self) -> float:
        return max(self._on_each(lambda link: parity(self._model, link.vllm), at_once=False))

    def check(self) -> None:
        lost = [link.lost for link in self._links if link.lost is not None]
        if lost and len(lost) == len(self._links):
            raise BridgeError(f"the session with vLLM is lost: {'; '.join(lost)}")

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._links.clear()
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def _on_each(self, act: Callable[[ServerLink], T], at_once: bool = True) -> list[T]:
        """What `act` returns for each server that lives. One for which it fails is dropped; raises BridgeError when
        none is left.
        """

        def attempt(link: ServerLink) -> T | BridgeError:
            try:
                return act(link)
            except BridgeError as error:
                return error

        with ThreadPoolExecutor(len(self._links) if at_once else 1, thread_name_prefix="BridgeLink") as pool:
            outcomes = list(pool.map(attempt, self._links))
        failed = [
            (link, outcome)
            for link, outcome in zip(self._links, outcomes, strict=True)
            if isinstance(outcome, BridgeError)
        ]
        if len(failed) == len(self._links):
            lost = f"no vLLM server of {len(self._servers)} is left: " if len(self._servers) > 1 else ""
            raise BridgeError(lost + "; ".join(str(error) for _, error in failed)) from failed[0][1]
        for link, error in failed:
            self._leave_out(link, error)
        return [outcome for outcome in outcomes if not isinstance(outcome, BridgeError)]

    def _leave_out(self, link: ServerLink, error: BridgeError) -> None:
        self._links.remove(link)
        self._left_out.append(link.vllm)
        self._next_look = time.monotonic() + READMIT_S
        log.warning("[Bridge] %s is fenced off, training goes on with %d of %d servers: %s",
                    link.vllm.url, len(self._links), len(self._servers), error)  # fmt: skip
        link.drop(f"left out of the weight sync: {error}"[:1000])

    def _readmit(self, rendezvous: Rendezvous) -> None:
        """Open a new session with every server that was left out and answers again; the sync that follows brings it up
        to date.
        """
        if not self._left_out or time.monotonic() < self._next_look:
            return
        for vllm in tuple(self._left_out):
            try:
                vllm.status()
                link = ServerLink(vllm, self._matching_manifest(vllm), rendezvous, self._settings)
            except (requests.RequestException, BridgeError) as error:
                log.warning("[Bridge] %s stays out, next look in %.0f s: %s", vllm.url, READMIT_S, error)
                continue
            self._left_out.remove(vllm)
            self._links.append(link)
            log.info("[Bridge] %s is back", vllm.url)
        self._next_look = time.monotonic() + READMIT_S

    def _matching_manifest(self, vllm: VllmClient) -> Manifest:
        """What `vllm` holds. Raises BridgeError unless it is the trainer's model, laid out as on the first server."""
        manifest = vllm.manifest()
        try:
            compare(manifest, {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()})
        except ManifestMismatch as mismatch:
            raise BridgeError(
                f"trainer and the vLLM server at {vllm.url} do not hold the same model: {mismatch}"
            ) from mismatch
        if manifest.digest() != self._manifest.digest():
            raise BridgeError(
                f"{vllm.url} holds its weights otherwise ({manifest.tensors[0].dtype}) than {self._servers[0].url}"
                f" ({self.served_dtype}): start all vLLM servers with the same --model and --dtype"
            )
        return manifest

    def _link_settings(self) -> LinkSettings:
        backend = self._mode.backend
        if backend == "auto":
            backend = "nccl" if self._image.buffer.is_cuda else "gloo"
        timeout_s = self._config.bridge_timeout_s
        return LinkSettings(backend, self._mode.bucket_mb << 20, timeout_s, self._mode.lease_s)


def _reachable_address(config: TrainerConfig) -> str:
    """The address that the trainer listens at. Raises BridgeError if a server on another machine could not reach it."""
    master = config.mode(Broadcast).master_addr
    address = _resolve(master, "MASTER_ADDR")
    if not ipaddress.ip_address(address).is_loopback:
        return address
    for host, _ in config.vllm_servers:
        server = _resolve(host, "vLLM server")
        own = transport.address_towards(server)
        if own != server and not ipaddress.ip_address(server).is_loopback:
            raise BridgeError(
                f"the vLLM server on {host} is another machine and cannot reach MASTER_ADDR={master}"
                f" ({address}): set --master-addr to an address of this machine that it can reach, probably {own}"
            )
    return address


def _resolve(host: str, what: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise BridgeError(f"{what} {host} cannot be resolved to an address: {error}") from error
