"""Mode reload: the whole model in a directory per version, which the running vLLM reads and swaps in.

    parameters ──▶ SAVE_PATH/reload/policy-v7-3f2a91/ ──POST /v1/bridge/reload──▶ read beside the old one, then served

Needs no network but HTTP: trainer and vLLM see the directory under the same path, on one machine or on a shared file
system. A directory is complete or absent. vLLM checks it before reading it, and generates meanwhile.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from atroposlib.logs import get_logger
from atroposlib.processes.identity import this_process
from atroposlib.wire.bridge import Committed, Manifest, ReloadOffer
from example_trainer.bridges.base import Prepared, SyncReport, remove_replaced
from example_trainer.bridges.session import Session, SessionBridge, matching_manifest, offered_by_us
from example_trainer.bridges.vllm_client import VllmClient, vllm_clients
from example_trainer.settings.bridges import Reload
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.source import shapes_of
from example_trainer.weights.written import TrainedModel, remove_leftovers

log = get_logger(__name__)


def prepare(config: TrainerConfig, source: str, device: torch.device) -> Prepared:
    """Wait for the server. Raises BridgeError, also for one that takes no whole weights."""
    (vllm,) = vllm_clients(config)
    vllm.wait_until_ready(config.vllm_start_timeout)
    return Prepared(partial(ReloadBridge, config, vllm), lambda: None)


class ReloadBridge(SessionBridge):
    """Trainer side of the files; one session for its life."""

    def __init__(self, config: TrainerConfig, vllm: VllmClient, trained: TrainedModel) -> None:
        manifest = matching_manifest(vllm, shapes_of(trained.model))
        self._config = config
        session = self._opened(vllm, manifest)
        super().__init__(session, trained, manifest.tensors[0].dtype, (trained.source(manifest), manifest))
        self._folder = config.save_path.resolve() / "reload"
        remove_leftovers(self._folder)

    def _opened(self, vllm: VllmClient, manifest: Manifest) -> Session:
        offer = ReloadOffer(
            **offered_by_us(self._config.mode(Reload).lease_s),
            manifest_digest=manifest.digest(),
            timeout_s=min(self._config.bridge_timeout_s, 3600.0),
            process=this_process(),
        )
        vllm.open_session(offer)
        return Session(vllm, offer)

    def reconnect(self) -> None:
        self._session.abandon()
        self._session = self._opened(self._vllm, matching_manifest(self._vllm, shapes_of(self._trained.model)))

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        self.check()
        update()
        updated = time.perf_counter()
        folder = self.write_version(self._folder, policy_version, policy_version, "the version before")
        written = time.perf_counter()
        committed = self._vllm.ask(
            Committed,
            "POST",
            "/v1/bridge/reload",
            {"session": self._session.id, "policy_version": policy_version, "path": str(folder)},
        )
        served = time.perf_counter()
        log.info(
            "[Bridge] Policy version %d is served: written in %.3f s, read in %.3f s, stall %.1f ms, apply %.1f ms",
            policy_version,
            written - updated,
            served - written - committed.stall_s,
            committed.stall_s * 1e3,
            committed.apply_s * 1e3,
        )
        remove_replaced([old for old in self._folder.glob("policy-v*") if old != folder], policy_version)
        return SyncReport(
            policy_version=policy_version,
            stall_s=committed.stall_s,
            transfer_s=served - updated - committed.stall_s,
            apply_s=committed.apply_s,
            bytes_moved=self._trained.nbytes,
        )
