"""Restarts, of a whole model or of an adapter: a checkpoint every `--vllm-restart-interval` policy versions, vLLM
started again from it.

    parameters, or A and B ──▶ SAVE_PATH/served_N/ ──vLLM is ended and started from it──▶ served as policy version N

If nothing listens at --vllm-port, the trainer starts example_trainer/vllm_api_server.py there itself, and never ends
any other server. It does not touch a server that already runs: a log line asks its owner to restart it from the
checkpoint, and the trainer waits for that. Between two restarts vLLM keeps serving its version, which `sync` reports.
Needs no bridge inside vLLM.
"""

import ipaddress
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import torch

from atroposlib.addresses import resolved
from atroposlib.clients.waiting import NotYet, Wait, wait_for
from atroposlib.logs import get_logger
from atroposlib.processes.child_group import ChildGroup, StillRunning
from atroposlib.processes.malloc import give_back_freed_memory
from atroposlib.wire.bridge import ServerStatus, read_policy_version
from atroposlib.wire.folders import is_sharded
from example_trainer.bridges.base import BridgeError, Prepared, SyncReport, WeightBridge, remove_replaced
from example_trainer.bridges.parity import parity
from example_trainer.bridges.vllm_client import VllmClient, vllm_clients
from example_trainer.ranks.place import without_ranks
from example_trainer.settings.bridges import Adapter, Restarting
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.export import export
from example_trainer.weights.written import TrainedModel, remove_folder

LAUNCHER = Path(__file__).parents[1] / "vllm_api_server.py"
GRACE_S = 3.0  # from TERM to KILL: vLLM takes about two; a launcher that ends the trainer grants it five
PORT_WAIT_S = 4.0  # for the port of a server that has just ended
POLL_S = 0.5
RESTARTS = 3  # of a vLLM that has ended by itself, within STEADY_S, as the launcher grants other servers
STEADY_S = 600.0
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
SHARED_GPU_FRACTION = "0.45"  # of the memory of a GPU that vLLM shares with the trainer

log = get_logger(__name__)


class ServedModel(msgspec.Struct):
    """One name that clients may ask for."""

    id: str


class ServedModels(msgspec.Struct):
    """GET /v1/models."""

    data: list[ServedModel]


def prepare(config: TrainerConfig, source: str, device: torch.device, launcher: Path = LAUNCHER) -> Prepared:
    """Find the server, or start one, which loads while the trainer does."""
    server = VllmServer(config, device, launcher)
    if server.owned:
        server.start(servable(config, source), read_policy_version(source), config.model_name)
    else:
        log.info(
            "[Bridge] %s is already in use: the trainer leaves that server alone and asks its owner to restart it",
            server.client.url,
        )
    return Prepared(partial(RestartBridge, config, server), server.stop)


def servable(config: TrainerConfig, source: str) -> str:
    """Return what vLLM can load: a sharded checkpoint is exported as a whole model, as if this run had served it
    before.
    """
    if not is_sharded(Path(source)):
        return source
    folder = config.save_path / f"served_{read_policy_version(source)}"
    log.info("[Bridge] Exporting %s to %s", source, folder)
    remove_folder(folder, "remove it by hand, then start the trainer again", BridgeError)
    export(Path(source), folder)
    return str(folder.resolve())


class VllmServer:
    """The vLLM server at --vllm-port: the trainer's own (`owned`), which it starts and ends, or somebody else's.

    `launcher` is the program that serves a model directory.
    """

    def __init__(self, config: TrainerConfig, device: torch.device, launcher: Path) -> None:
        self._config = config
        self._mode = config.mode(Restarting)
        self._device = device
        self._launcher = launcher
        (self.client,) = vllm_clients(config)
        self.owned = not _listens(config.vllm_host, config.vllm_port)
        self.process: ChildGroup | None = None  # ours, while it runs
        self._started_from: tuple[str, int, str] | None = None
        self._deaths: list[float] = []
        self.dtype = ""  # which it has served so far, and keeps, though a checkpoint is float32

    def start(self, source: str, policy_version: int, served_name: str) -> None:
        """Start our own from `source`: the model, or a directory that holds `policy_version`."""
        config = self._config
        self._started_from = source, policy_version, served_name
        if not ipaddress.ip_address(resolved(config.vllm_host)).is_loopback:
            raise BridgeError(
                f"nothing listens at {self.client.url}, but this trainer starts vLLM only on its own loopback: "
                "start example_trainer/vllm_api_server.py there first, or drop --vllm-host"
            )
        _await_free_port(config.vllm_host, config.vllm_port)
        give_back_freed_memory()  # vLLM takes a share of what is free
        command = ["-u", *self.command(source, policy_version, served_name)]
        command += ["--max-model-len", "auto"]  # as long as the model allows and the KV cache holds
        environment = without_ranks(os.environ) | {"VLLM_ENABLE_SHARED_WEIGHTS": "0"}
        if config.vllm_api_key is not None:
            environment["VLLM_API_KEY"] = config.vllm_api_key.get_secret_value()
        if self._mode.vllm_gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._mode.vllm_gpu
        elif self._device.type == "cuda":
            command += ["--gpu-memory-utilization", SHARED_GPU_FRACTION]
        command += shlex.split(self._mode.vllm_flags)  # which may replace what stands before them
        self.process = ChildGroup([sys.executable, *command], config.log_dir / "vllm.log", environment)
        log.info(
            "[Bridge] Started vLLM (pid %d, log %s): python %s",
            self.process.pid,
            self.process.log_path,
            shlex.join(command),
        )

    def stop(self) -> None:
        """End it if it is ours and runs. Raises BridgeError if it outlives SIGKILL."""
        if self.process is not None:
            log.info("[Bridge] Ending the vLLM server that this trainer started (process group %d)", self.process.pid)
            try:
                self.process.stop(GRACE_S)
            except StillRunning as error:
                raise BridgeError(str(error)) from None
            self.process = None

    def revive(self) -> None:
        """Start our own again, from what it served, if it has ended by itself. Raises BridgeError at the last of
        RESTARTS deaths within STEADY_S.
        """
        try:
            self.check()
        except BridgeError as error:
            now = time.monotonic()
            self._deaths = [*(death for death in self._deaths if now - death < STEADY_S), now]
            if len(self._deaths) > RESTARTS or self._started_from is None:
                raise
            log.warning("[Bridge] Starting vLLM again (%d of %d): %s", len(self._deaths), RESTARTS, error)
            self.stop()
            source, policy_version, served_name = self._started_from
            self.start(source, policy_version, served_name)
            self.wait()

    def check(self) -> None:
        """Raise BridgeError if it is ours and has ended by itself."""
        if self.process is not None and (end := self.process.end()) is not None:
            raise BridgeError(
                f"the vLLM server that this trainer started (pid {self.process.pid}, {self.client.url}) ended by"
                f" itself: {end}. Last lines of {self.process.log_path}:\n{self.process.last_lines()}"
            )

    def wait(self, folder: str | None = None, policy_version: int = 0) -> ServerStatus:
        """Return the server's status once it answers, and serves `folder` as `policy_version` if one is given.
        Raises BridgeError at --vllm-start-timeout, and at once if our own server has ended or serves something else.
        """
        deadline_s = self._config.vllm_start_timeout
        what = "vLLM" if folder is None else f"vLLM with policy version {policy_version}"

        def late(reason: str) -> BridgeError:
            return BridgeError(
                f"{what} is not at {self.client.url} after {deadline_s:.0f} s: {reason}; see its log, or raise"
                " --vllm-start-timeout"
            )

        def attempt() -> ServerStatus:
            self.check()
            try:
                status = self.client.ask_status()
            except BridgeError as error:
                if folder is None:
                    raise
                raise NotYet(str(error)) from error  # one that is being restarted by hand may refuse on its way down
            if folder is None or _serves(self._config, status, folder, policy_version):
                return status
            state = f"it serves {status.served_model} as policy version {status.policy_version}"
            if self.owned:
                raise BridgeError(
                    f"vLLM was started from {folder} (policy version {policy_version}), but {state}: check --vllm-flags"
                )
            raise NotYet(state)

        return wait_for(attempt, Wait(what, self.client.url, deadline_s, late, POLL_S, POLL_S))

    def command(self, source: str, policy_version: int, served_name: str) -> list[str]:
        """Return the command that serves `source` under the name that clients know, in the dtype served so far."""
        config, words = self._config, [str(self._launcher)]
        if isinstance(config.bridge, Adapter):
            # the base model, with an adapter that it samples from
            rank = next(rank for rank in VLLM_LORA_RANKS if rank >= config.bridge.r)
            words += ["--model", config.model_name, "--enable-lora", "--max-lora-rank", str(rank)]
            if source != config.model_name:
                words += ["--lora-modules", f"{_adapter_name(policy_version)}={source}"]
        else:
            words += ["--model", source]
        words += ["--served-model-name", served_name, "--port", str(self._config.vllm_port)]
        return [*words, "--dtype", self.dtype] if self.dtype else words


class RestartBridge(WeightBridge):
    """Trainer side of the modes that restart vLLM."""

    def __init__(self, config: TrainerConfig, server: VllmServer, trained: TrainedModel) -> None:
        self._config = config
        self._server = server
        self._trained = trained
        self.last_version = config.training_steps
        status = server.wait()
        self._version_at_start = status.policy_version
        self._served: int | None = None  # policy version that vLLM serves, once a sync has made sure of it
        self.served_dtype = server.dtype = status.dtype

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        self.check()
        update()
        if self._served is None and self._version_at_start == policy_version:
            self._served = policy_version  # started from these very weights
        # every multiple of the interval is served, and the last version, whose evaluation environments wait for
        due = (
            policy_version % self._config.mode(Restarting).restart_interval == 0 or policy_version == self.last_version
        )
        if self._served is not None and (policy_version == self._served or not due):
            return SyncReport(self._served, stall_s=0.0, transfer_s=0.0, apply_s=0.0, bytes_moved=0)
        return self._serve(policy_version)

    def decoders(self) -> Sequence[VllmClient]:
        return [self._server.client]

    def parity_probe(self) -> float:
        return parity(self._trained, self._server.client)

    def check(self) -> None:
        self._server.revive()

    def close(self) -> None:
        self._server.stop()

    def _serve(self, policy_version: int) -> SyncReport:
        server, start = self._server, time.perf_counter()  # generation continues until the checkpoint is on the disk
        folder = self._trained.write(self._config.save_path / f"served_{policy_version}", policy_version).resolve()
        transfer_s = time.perf_counter() - start
        log.info("[Bridge] Policy version %d is in %s after %.1f s", policy_version, folder, transfer_s)
        start = stopped = time.perf_counter()
        if server.owned:
            server.stop()
            stopped = time.perf_counter()
            server.start(str(folder), policy_version, self._config.model_name)
        else:
            served = server.client.ask(ServedModels, "GET", "/v1/models").data
            command = server.command(str(folder), policy_version, served[0].id)
            log.warning(
                "[Bridge] Restart the vLLM server at %s now, with its other flags unchanged: %s",
                server.client.url,
                shlex.join(["python", "-u", *command]),
            )
        server.wait(str(folder), policy_version)
        end = time.perf_counter()
        self._served = policy_version
        # those of earlier processes of the run among them, but not what a user started from
        needed = (folder, Path(self._config.model_name).resolve())
        remove_replaced([old for old in folder.parent.glob("served_[0-9]*") if old not in needed], policy_version)
        log.info("[Bridge] Policy version %d is served: stall %.1f s", policy_version, end - start)
        return SyncReport(
            policy_version,
            stall_s=end - start,
            transfer_s=transfer_s,
            apply_s=end - stopped,
            bytes_moved=sum(path.stat().st_size for path in folder.iterdir()),
        )


def _serves(config: TrainerConfig, status: ServerStatus, folder: str, policy_version: int) -> bool:
    return status.policy_version == policy_version and (
        status.served_model == _adapter_name(policy_version)
        if config.bridge.trains_adapter
        else Path(status.model).resolve() == Path(folder)
    )


def _adapter_name(policy_version: int) -> str:
    return f"policy-v{policy_version}"  # by which vllm_patching/engines knows the version


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def _await_free_port(host: str, port: int) -> None:
    def free() -> None:
        if _listens(host, port):
            raise NotYet("it is in use")

    def taken(reason: str) -> BridgeError:
        return BridgeError(
            f"port {port} on {host} is now in use by another process: stop it, or choose another --vllm-port"
        )

    wait_for(free, Wait(f"port {port}", host, PORT_WAIT_S, taken, POLL_S, POLL_S))
