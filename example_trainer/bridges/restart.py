"""Restarts, of a whole model or of an adapter: a checkpoint every `--vllm-restart-interval` policy versions, vLLM
started anew from it.

    parameters, or A and B ──▶ SAVE_PATH/served_N/ ──vLLM is ended and started from it──▶ served, labelled policy version N

If nothing listens at --vllm-port, the trainer starts example_trainer/vllm_api_server.py there itself, and only ever
ends that one. A server that is there already is never touched: its owner is asked, in one line, to restart it from
the checkpoint, and is waited for. Between two restarts vLLM goes on with the version it has, and `sync` says which.
Needs no bridge inside vLLM.
"""

import ipaddress
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
import torch
from transformers import PreTrainedModel

from atroposlib.clients.waiting import waiting
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import read_policy_version
from example_trainer.adapters import ADAPTER, load_adapted_model
from example_trainer.bridges.base import BridgeError, SyncReport
from example_trainer.bridges.parity import parity
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.checkpoint import WHOLE_MODEL, save_served_model
from example_trainer.config import TrainerConfig
from example_trainer.model import load_model, load_tokenizer
from example_trainer.modes import LoraRestart, Restarting
from example_trainer.server_process import ServerProcess

LAUNCHER = Path(__file__).parents[1] / "vllm_api_server.py"
GRACE_S = 3.0  # from TERM to KILL: vLLM takes about two; a launcher that ends the trainer grants it five
PORT_WAIT_S = 4.0  # for the port of a server that has just ended
POLL_S = 0.5
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
SHARED_GPU_FRACTION = "0.45"  # of the memory of a GPU that vLLM shares with the trainer

log = get_logger(__name__)


class RestartBridge:
    """Trainer side of the legacy mode. `launcher` is the program that serves a model folder."""

    form = WHOLE_MODEL

    def __init__(self, config: TrainerConfig, launcher: Path = LAUNCHER) -> None:
        self._config = config
        self._mode = config.mode(Restarting)
        self._launcher = launcher
        key = config.vllm_api_key.get_secret_value() if config.vllm_api_key else None
        self._vllm = VllmClient(config.vllm_host, config.vllm_port, key, config.bridge_timeout_s)
        self._server: ServerProcess | None = None  # ours; None before it is started and while somebody else's serves
        self._owns = False
        self._served: int | None = None  # policy version that vLLM serves, once a sync has made sure of it
        self._folder: Path | None = None  # what vLLM was restarted from last
        self.served_dtype = ""

    def connect(self, source: str, device: torch.device) -> PreTrainedModel:
        config = self._config
        self._device = device
        self._owns = not _listens(config.vllm_host, config.vllm_port)
        if self._owns:
            self._start(source, read_policy_version(source))  # loads while the trainer does
        else:
            log.info(
                "[Bridge] %s is in use already: that server is never touched, its owner will be asked to restart it",
                self._vllm.url,
            )
        self._model = self._load(source, device)
        self._tokenizer = load_tokenizer(source)
        status = self._await_server(None)
        self._version_at_start = int(status["policy_version"])
        self.served_dtype = str(status["dtype"])
        return self._model

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        self.check()
        start = time.perf_counter()
        update()
        update_s = time.perf_counter() - start
        if self._served is None and self._version_at_start == policy_version:
            self._served = policy_version  # started from these very weights
        if self._served is not None and not self._is_due(policy_version):
            return SyncReport(self._served, update_s, stall_s=0.0, transfer_s=0.0, apply_s=0.0, bytes_moved=0)
        return self._serve(policy_version, update_s)

    def parity_probe(self) -> float:
        return parity(self._model, self._vllm)

    def check(self) -> None:
        if self._server is None:
            return
        end = self._server.end()
        if end is not None:
            raise BridgeError(
                f"the vLLM server that this trainer started (pid {self._server.pid}, {self._vllm.url}) ended by itself:"
                f" {end}. Last lines of {self._server.log_path}:\n{self._server.last_lines()}"
            )

    def close(self) -> None:
        self._stop()

    def _is_due(self, policy_version: int) -> bool:
        """Every multiple of the interval, and the last version, whose evaluation environments wait for."""
        config = self._config
        return policy_version != self._served and (
            policy_version % self._mode.restart_interval == 0 or policy_version == config.training_steps
        )

    def _serve(self, policy_version: int, update_s: float) -> SyncReport:
        """Have vLLM serve the model as it is now; generation goes on until the checkpoint is on the disk."""
        start = time.perf_counter()
        folder = save_served_model(
            self._config.save_path, self._model, self._tokenizer, policy_version, self.form
        ).resolve()
        transfer_s = time.perf_counter() - start
        log.info("[Bridge] Policy version %d is in %s after %.1f s", policy_version, folder, transfer_s)
        start = time.perf_counter()
        if self._owns:
            self._stop()
            stopped = time.perf_counter()
            self._start(str(folder), policy_version)
        else:
            stopped = start
            command = shlex.join(["python", "-u", *self._command(str(folder), policy_version, self._vllm.models()[0])])
            log.warning(
                "[Bridge] Restart the vLLM server at %s now, its other flags as they were: %s", self._vllm.url, command
            )
        self._await_server((str(folder), policy_version))
        end = time.perf_counter()
        self._served = policy_version
        if self._folder is not None and self._folder != folder:
            shutil.rmtree(self._folder)
        self._folder = folder
        log.info("[Bridge] Policy version %d is served: stall %.1f s", policy_version, end - start)
        return SyncReport(policy_version, update_s, end - start, transfer_s, end - stopped, _folder_bytes(folder))

    def _start(self, source: str, policy_version: int) -> None:
        config = self._config
        if not _is_loopback(config.vllm_host):
            raise BridgeError(
                f"nothing listens at {self._vllm.url}, and this trainer starts vLLM on its own loopback only: "
                "start example_trainer/vllm_api_server.py there first, or drop --vllm-host"
            )
        _await_free_port(config.vllm_host, config.vllm_port, PORT_WAIT_S)
        command = [
            "-u",
            *self._command(source, policy_version, config.model_name),
            *self._defaults(),
            *shlex.split(self._mode.vllm_flags),
        ]
        self._server = ServerProcess([sys.executable, *command], config.log_dir / "vllm.log", self._environment())
        log.info(
            "[Bridge] Started vLLM (pid %d, log %s): python %s",
            self._server.pid,
            self._server.log_path,
            shlex.join(command),
        )

    def _stop(self) -> None:
        if self._server is not None:
            log.info("[Bridge] Ending the vLLM server that this trainer started (process group %d)", self._server.pid)
            self._server.stop(GRACE_S)
            self._server = None

    def _load(self, source: str, device: torch.device) -> PreTrainedModel:
        return load_model(source, device, gradient_checkpointing=self._config.gradient_checkpointing)

    def _model_flags(self, source: str, policy_version: int) -> list[str]:
        """How the launcher is told what to serve: the model, or a folder of the form that is trained."""
        return ["--model", source]

    def _serves(self, status: dict[str, Any], source: str, policy_version: int) -> bool:
        return Path(status["model"]).resolve() == Path(source) and status["policy_version"] == policy_version

    def _command(self, source: str, policy_version: int, served_name: str) -> list[str]:
        """What serves `source`: under the name that clients know, and in the dtype served so far, though a checkpoint
        is float32.
        """
        words = [str(self._launcher), *self._model_flags(source, policy_version)]
        words += ["--served-model-name", served_name, "--port", str(self._config.vllm_port)]
        return [*words, "--dtype", self.served_dtype] if self.served_dtype else words

    def _defaults(self) -> list[str]:
        """Flags of our own server that --vllm-flags may replace."""
        words = ["--max-model-len", "auto"]  # as long as the model allows and the KV cache holds
        shares_gpu = self._device.type == "cuda" and self._mode.vllm_gpu is None
        return [*words, "--gpu-memory-utilization", SHARED_GPU_FRACTION] if shares_gpu else words

    def _environment(self) -> dict[str, str]:
        config = self._config
        changes = {"VLLM_ENABLE_SHARED_WEIGHTS": "0"}
        if config.vllm_api_key is not None:
            changes["VLLM_API_KEY"] = config.vllm_api_key.get_secret_value()
        if self._mode.vllm_gpu is not None:
            changes["CUDA_VISIBLE_DEVICES"] = self._mode.vllm_gpu
        return os.environ | changes

    def _await_server(self, wanted: tuple[str, int] | None) -> dict[str, Any]:
        """The server's status once it answers, and serves the `wanted` folder and version if one is given."""
        deadline_s = self._config.vllm_start_timeout
        what = "vLLM" if wanted is None else f"vLLM with policy version {wanted[1]}"
        with waiting(log, what, peer=self._vllm.url, deadline_s=deadline_s):
            end = time.monotonic() + deadline_s
            while True:
                found = self._ask(wanted)
                if isinstance(found, dict):
                    return found
                if time.monotonic() > end:
                    raise BridgeError(
                        f"{what} is not at {self._vllm.url} after {deadline_s:.0f} s: {found}; see its log, or raise"
                        " --vllm-start-timeout"
                    )
                time.sleep(POLL_S)

    def _ask(self, wanted: tuple[str, int] | None) -> dict[str, Any] | str:
        """The status, or what is not as wanted yet. Raises BridgeError if our own server has ended or serves something
        else.
        """
        self.check()
        try:
            status = self._vllm.status()
        except requests.RequestException as error:
            return f"no answer ({type(error).__name__})"
        except BridgeError as error:
            if wanted is None:
                raise
            return str(error)  # a server that is being restarted by hand may refuse on its way down
        if wanted is None or self._serves(status, *wanted):
            return status
        found = f"it serves {status['served_model']} as policy version {status['policy_version']}"
        if self._owns:
            raise BridgeError(
                f"vLLM was started from {wanted[0]} (policy version {wanted[1]}), but {found}: check --vllm-flags"
            )
        return found


class LoraRestartBridge(RestartBridge):
    """The same with a LoRA adapter: vLLM starts with the base model and with the adapter, which it samples from."""

    form = ADAPTER

    def _load(self, source: str, device: torch.device) -> PreTrainedModel:
        return load_adapted_model(source, self._config, device)

    def _model_flags(self, source: str, policy_version: int) -> list[str]:
        rank = next(rank for rank in VLLM_LORA_RANKS if rank >= self._config.mode(LoraRestart).r)
        flags = ["--model", self._config.model_name, "--enable-lora", "--max-lora-rank", str(rank)]
        adapter = (
            [] if source == self._config.model_name else ["--lora-modules", f"{_adapter_name(policy_version)}={source}"]
        )
        return [*flags, *adapter]

    def _serves(self, status: dict[str, Any], source: str, policy_version: int) -> bool:
        return (status["served_model"], status["policy_version"]) == (_adapter_name(policy_version), policy_version)


def _adapter_name(policy_version: int) -> str:
    """By which the server knows the version of an adapter that it was started with (engines/adapters.py in vllm_patching)."""
    return f"policy-v{policy_version}"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def _await_free_port(host: str, port: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while _listens(host, port):
        if time.monotonic() > end:
            raise BridgeError(
                f"port {port} on {host} is taken by another process now: stop that one, or choose another --vllm-port"
            )
        time.sleep(POLL_S)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
