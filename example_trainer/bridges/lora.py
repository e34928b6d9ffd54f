"""Mode lora: a LoRA adapter in a directory that vLLM loads while it continues generating.

    A, B ──▶ SAVE_PATH/adapters/policy-v7-3f2a91/ ──POST /v1/bridge/adapter──▶ served

Running requests keep their adapter.
Every version has its own directory and name. The suffix is this trainer's session, because vLLM's prefix cache must
never see the same name twice. Trainer and vLLM see the directory under the same path: one machine, or a shared file
system.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from atroposlib.logs import get_logger
from atroposlib.processes.identity import this_process
from atroposlib.wire.bridge import AdapterLoaded, AdapterOffer
from example_trainer.bridges.base import Prepared, SyncReport, remove_replaced
from example_trainer.bridges.session import Session, SessionBridge, offered_by_us
from example_trainer.bridges.vllm_client import ADAPTER_SESSIONS, VllmClient, vllm_clients
from example_trainer.settings.bridges import Lora
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.written import TrainedModel, remove_leftovers

log = get_logger(__name__)


def prepare(config: TrainerConfig, source: str, device: torch.device) -> Prepared:
    """Hold the server's adapter bridge. Raises BridgeError, also for a server that takes no adapters."""
    (vllm,) = vllm_clients(config)
    status = vllm.wait_until_ready(config.vllm_start_timeout, lora=True)
    session = _opened(config, vllm)
    return Prepared(partial(LoraBridge, config, session, status.dtype), session.close)


def _opened(config: TrainerConfig, vllm: VllmClient) -> Session:
    mode = config.mode(Lora)
    offer = AdapterOffer(**offered_by_us(mode.lease_s), model=config.model_name, rank=mode.r, process=this_process())
    vllm.open_session(offer, ADAPTER_SESSIONS)
    return Session(vllm, offer, ADAPTER_SESSIONS)


class LoraBridge(SessionBridge):
    """Trainer side of the adapter bridge; one session for its life."""

    def __init__(self, config: TrainerConfig, session: Session, served_dtype: str, trained: TrainedModel) -> None:
        super().__init__(session, trained, served_dtype)
        mode = config.mode(Lora)
        self._config = config
        self._folder = config.save_path.resolve() / "adapters"
        self._served = "what it served"  # the adapter that vLLM samples from, once we have put one there
        remove_leftovers(self._folder)
        if mode.dropout > 0:
            log.warning(
                "--lora-dropout %g: vLLM samples without dropout, so probability ratios carry its noise even on-policy "
                "(logprob_diff_mean shows how much); 0 is exact",
                mode.dropout,
            )
        log.info(
            "[Bridge] Training a LoRA adapter of %.1f MB (rank %d, alpha %d, on %s)",
            trained.nbytes / 1e6,
            mode.r,
            mode.alpha,
            ", ".join(mode.target_modules),
        )

    def reconnect(self) -> None:
        self._session.abandon()
        self._session = _opened(self._config, self._vllm)

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        self.check()
        update()
        updated = time.perf_counter()
        folder = self.write_version(self._folder, policy_version, None, self._served)
        written = time.perf_counter()
        loaded = self._vllm.ask(
            AdapterLoaded,
            "POST",
            "/v1/bridge/adapter",
            {
                "session": self._session.id,
                "name": folder.name,
                "path": str(folder),
                "policy_version": policy_version,
            },
        )
        served = time.perf_counter()
        log.info(
            "[Bridge] Policy version %d is served as %s: written in %.3f s, served %.3f s later",
            policy_version,
            folder.name,
            written - updated,
            served - written,
        )
        self._served = folder.name
        # adapters that no request can use any more, those of earlier runs in this --save-path among them
        remove_replaced(
            [old for old in self._folder.glob("policy-v*") if old.name not in loaded.needed], policy_version
        )
        return SyncReport(
            policy_version=policy_version,
            stall_s=loaded.load_s,  # the engine makes no step while its workers read the adapter
            transfer_s=written - updated,
            apply_s=loaded.load_s,
            bytes_moved=self._trained.nbytes,
        )
