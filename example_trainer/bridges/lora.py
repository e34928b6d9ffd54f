"""Mode lora: a LoRA adapter in a folder that vLLM loads while it goes on generating.

    A, B ──▶ SAVE_PATH/adapters/policy-v7-3f2a91/ ──POST /v1/bridge/adapter──▶ served; requests that run keep the adapter they have

Every version has a folder and a name of its own; the suffix is this trainer's session, because vLLM's prefix cache
must never see a name twice. Trainer and vLLM see the folder under the same path: one machine, or a shared file
system.
"""

import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from atroposlib.logs import get_logger
from atroposlib.wire.bridge import AdapterOffer
from atroposlib.wire.processes import this_process
from example_trainer.adapters import adapter_nbytes, load_adapted_model, write_adapter
from example_trainer.bridges.base import BridgeError, SyncReport
from example_trainer.bridges.heartbeat import Heartbeat
from example_trainer.bridges.parity import parity
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.checkpoint import CheckpointError, remove_leftovers
from example_trainer.config import TrainerConfig
from example_trainer.modes import Lora

log = get_logger(__name__)


class LoraBridge:
    """Trainer side of the adapter bridge; one session for its life."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._mode = config.mode(Lora)
        key = config.vllm_api_key.get_secret_value() if config.vllm_api_key else None
        self._vllm = VllmClient(config.vllm_host, config.vllm_port, key, config.bridge_timeout_s)
        self._session = uuid.uuid4().hex
        self._folder = config.save_path.resolve() / "adapters"
        self._served: str | None = None  # name of the adapter that vLLM samples from, once we have put one there
        self._heart: Heartbeat | None = None

    def connect(self, source: str, device: torch.device) -> PreTrainedModel:
        config, mode = self._config, self._mode
        status = self._vllm.wait_until_ready(config.vllm_start_timeout, lora=True)
        self.served_dtype = str(status["dtype"])
        self._open_session()
        if mode.dropout > 0:
            log.warning("--lora-dropout %g: vLLM samples without dropout, so probability ratios carry its noise even on-policy "
                        "(logprob_diff_mean shows how much); 0 is exact", mode.dropout)  # fmt: skip
        self._model = load_adapted_model(source, config, device)
        remove_leftovers(self._folder)
        log.info("[Bridge] Training a LoRA adapter of %.1f MB (rank %d, alpha %d, on %s)", adapter_nbytes(self._model) / 1e6,
                 mode.r, mode.alpha, ", ".join(mode.target_modules))  # fmt: skip
        return self._model

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        self.check()
        start = time.perf_counter()
        update()
        updated = time.perf_counter()
        folder = self._write(policy_version)
        written = time.perf_counter()
        loaded = self._vllm.load_adapter(self._session, folder.name, str(folder), policy_version)
        served = time.perf_counter()
        log.info("[Bridge] Policy version %d is served as %s: written in %.3f s, served %.3f s after",
                 policy_version, folder.name, written - updated, served - written)  # fmt: skip
        self._served = folder.name
        self._prune(loaded["needed"])
        return SyncReport(
            policy_version=policy_version,
            update_s=updated - start,
            stall_s=loaded["load_s"],  # the engine makes no step while its workers read the adapter
            transfer_s=written - updated,
            apply_s=loaded["load_s"],
            bytes_moved=adapter_nbytes(self._model),
        )

    def parity_probe(self) -> float:
        was_training = self._model.training
        self._model.eval()  # no dropout, as in vLLM
        try:
            return parity(self._model, self._vllm)
        finally:
            self._model.train(was_training)

    def check(self) -> None:
        if self._heart is not None and self._heart.lost is not None:
            raise BridgeError(f"the session with vLLM is lost: {self._heart.lost}")

    def close(self) -> None:
        if self._heart is None:
            return
        self._heart.stop(self._config.bridge_timeout_s)
        self._heart = None
        try:
            self._vllm.close_adapter_session(self._session)
        except BridgeError as error:
            log.warning("[Bridge] Left session %s, but vLLM could not be told: %s", self._session, error)

    def _open_session(self) -> None:
        config = self._config
        self._vllm.open_adapter_session(
            AdapterOffer(
                session=self._session,
                trainer=f"{socket.gethostname()}:{os.getpid()}",
                lease_s=self._mode.lease_s,
                model=config.model_name,
                rank=self._mode.r,
                process=this_process(),
            )
        )
        self._heart = Heartbeat(lambda: self._vllm.adapter_heartbeat(self._session), self._mode.lease_s / 3)

    def _write(self, policy_version: int) -> Path:
        folder = self._folder / f"policy-v{policy_version}-{self._session[:6]}"
        try:
            write_adapter(folder, self._model)
        except CheckpointError as error:
            raise BridgeError(f"{error}. vLLM goes on with {self._served or 'what it served'}") from error
        return folder

    def _prune(self, needed: list[str]) -> None:
        """Remove adapters that no request can use any more, those of earlier runs in this --save-path among them."""
        for folder in self._folder.glob("policy-v*"):
            if folder.name not in needed:
                shutil.rmtree(folder)
