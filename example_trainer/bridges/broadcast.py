"""`--weight-bridge-mode shared_vllm --use-shared-memory`: broadcast to one updater thread per vLLM worker.

    parameters ─(views)─▶ flat buffer in wire order ──Gloo/NCCL broadcast──▶ staging on every worker ──commit──▶ served

The trainer's parameters are views into one flat fp32 buffer laid out like the wire image, so when vLLM holds fp32 nothing is packed:
the buffer itself is sent. For a bf16 server each bucket is cast on the way. The protocol is vllm_patching/protocol.py.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

import torch
from transformers import PreTrainedModel

from atroposlib.logs import get_logger, waiting
from example_trainer.bridges import BridgeError, SyncReport
from example_trainer.bridges.parity import parity
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.config import TrainerConfig
from example_trainer.model import load_model
from vllm_patching import transport
from vllm_patching.protocol import GOODBYE, Bucket, Manifest, ManifestMismatch, SessionOffer, ack_key, align, compare, go_key

log = get_logger(__name__)


class BroadcastBridge:
    """Trainer side of the broadcast; one session for its life."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        key = config.vllm_api_key.get_secret_value() if config.vllm_api_key else None
        self._vllm = VllmClient(config.vllm_host, config.vllm_port, key, config.bridge_timeout_s)
        self._session = uuid.uuid4().hex
        self._sequence = 0
        self._closed = threading.Event()
        self._lost: str | None = None
        self._groups: transport.Groups | None = None

    def connect(self, source: str, device: torch.device) -> PreTrainedModel:
        model = load_model(source, device, gradient_checkpointing=self._config.gradient_checkpointing)
        status = self._vllm.wait_until_ready(self._config.vllm_start_timeout)
        self._workers = int(status["tp_size"])
        self._manifest = Manifest.from_json(self._vllm.manifest())
        self.served_dtype = self._manifest.tensors[0].dtype
        self._model = model
        parameters = dict(model.named_parameters())
        try:
            compare(self._manifest, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
        except ManifestMismatch as mismatch:
            raise BridgeError(f"trainer and vLLM do not hold the same model: {mismatch}") from mismatch
        count = len(self._manifest.tensors)
        log.info("[Bridge] Mapped %d/%d params from vLLM to trainer", count, count)
        self._image = FlatParameters(self._manifest, parameters)
        self._buckets = self._manifest.buckets(self._config.bridge_bucket_mb << 20)
        self._form_groups()
        self._heart = threading.Thread(target=self._heartbeats, name="BridgeHeartbeat", daemon=True)
        self._heart.start()
        return model

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        groups = self._live_groups()
        start = time.perf_counter()
        update()
        update_s = time.perf_counter() - start
        timeout_s = self._config.bridge_timeout_s
        log.info("[Bridge] Broadcasting policy version %d: %.1f MB in %d buckets to %d worker(s) of %s, at most %.0f s a bucket",
                 policy_version, self._manifest.nbytes / 1e6, len(self._buckets), self._workers, self._vllm.url, timeout_s)  # fmt: skip
        start = time.perf_counter()
        acks = [ack_key(self._sequence, rank) for rank in range(self._workers)]
        try:
            self._store.set(go_key(self._sequence), str(policy_version))
            for bucket in self._buckets:
                groups.broadcast(self._image.bucket(bucket))
            self._store.wait(acks, timedelta(seconds=timeout_s))
        except RuntimeError as error:  # torch.distributed's errors for a dead or silent peer
            raise BridgeError(
                f"policy version {policy_version} did not reach every vLLM worker within {timeout_s:.0f} s: "
                f"{transport.describe(error)}. {self._worker_states()}"
            ) from error
        transfer_s = time.perf_counter() - start
        committed = self._vllm.commit(self._session, policy_version)
        self._sequence += 1
        log.info(
            "[Bridge] Policy version %d is served: transfer %.3f s, stall %.1f ms, apply %.1f ms",
            policy_version,
            transfer_s,
            committed["stall_s"] * 1e3,
            committed["apply_s"] * 1e3,
        )
        return SyncReport(
            policy_version, update_s, committed["stall_s"], transfer_s, committed["apply_s"], self._manifest.nbytes * self._workers
        )

    def parity_probe(self) -> float:
        return parity(self._model, self._vllm)

    def check(self) -> None:
        if self._lost is not None:
            raise BridgeError(f"the session with vLLM is lost: {self._lost}")

    def close(self) -> None:
        if self._groups is None:
            return
        self._closed.set()
        self._heart.join(self._config.bridge_timeout_s)
        try:
            self._store.set(go_key(self._sequence), GOODBYE)
            self._vllm.close_session(self._session)
        except (RuntimeError, BridgeError) as error:
            log.warning("[Bridge] Left session %s, but vLLM could not be told: %s", self._session, error)
        self._groups.close()
        # their C++ threads must end while the interpreter still lives
        self._groups = None
        del self._store

    def _form_groups(self) -> None:
        config = self._config
        backend = config.bridge_backend
        if backend == "auto":
            backend = "nccl" if self._image.buffer.is_cuda else "gloo"
        address = socket.gethostbyname(config.master_addr)
        world_size = 1 + self._workers
        try:
            self._store, port = transport.host_store(address, config.master_port, config.bridge_timeout_s)
        except transport.TransportError as error:
            raise BridgeError(str(error)) from error
        offer = SessionOffer(
            session=self._session,
            address=address,
            port=port,
            world_size=world_size,
            backend=backend,
            manifest_digest=self._manifest.digest(),
            bucket_bytes=config.bridge_bucket_mb << 20,
            timeout_s=config.bridge_timeout_s,
            lease_s=config.bridge_lease_s,
            trainer=f"{socket.gethostname()}:{os.getpid()}",
        )
        self._vllm.open_session(asdict(offer))
        arguments = (self._store, self._session, 0, world_size, config.bridge_timeout_s)
        log.info("[Bridge] Creating Gloo process group: rank 0 of %d at %s:%d", world_size, address, port)
        try:
            with waiting(log, f"{self._workers} weight updater(s)", peer=self._vllm.url, deadline_s=config.bridge_timeout_s):
                control = transport.make_control_group(*arguments)
            log.info("[Bridge] ✓ Gloo group created")
            data = transport.make_data_group(control, *arguments, backend)
            if backend == "nccl":
                log.info("[Bridge] ✓ NCCL group created")
            else:
                log.info("[Bridge] ✓ Data group is Gloo too (between GPUs: [Bridge] ✓ NCCL group created)")
            self._groups = transport.Groups(control, data, backend)
            self._groups.barrier()
        except RuntimeError as error:
            raise BridgeError(
                f"vLLM's {self._workers} weight updater(s) did not join at {address}:{port} within "
                f"{config.bridge_timeout_s:.0f} s: {transport.describe(error)}. {self._worker_states()}"
            ) from error
        log.info("[Bridge] ✓ All ranks synchronized and ready")

    def _heartbeats(self) -> None:
        while not self._closed.wait(self._config.bridge_lease_s / 3):
            try:
                self._vllm.heartbeat(self._session)
            except BridgeError as error:
                self._lost = str(error)
                if not self._closed.is_set():
                    log.warning("[Bridge] Heartbeat failed: %s", error)
            else:
                self._lost = None

    def _live_groups(self) -> transport.Groups:
        if self._groups is None:
            raise BridgeError("the bridge is not connected: call connect first")
        self.check()
        return self._groups

    def _worker_states(self) -> str:
        """What vLLM's workers say about it, for an error message."""
        try:
            workers = self._vllm.status()["workers"]
        except (OSError, BridgeError) as error:
            return f"The vLLM server at {self._vllm.url} does not answer either ({type(error).__name__}); see its log."
        return "Workers: " + "; ".join(
            f"TP{worker['rank']} {worker['state']}" + (f" ({worker['error']})" if worker["error"] else "") for worker in workers
        )


class FlatParameters:
    """The model's parameters as views into one flat fp32 buffer in wire order; `bucket` gives the bytes to send."""

    def __init__(self, manifest: Manifest, parameters: dict[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        tensors = manifest.tensors
        self._as_is = all(tensor.dtype == "float32" for tensor in tensors)
        device = next(iter(parameters.values())).device
        # same order as the wire; with fp32 on the wire also the same offsets
        starts = (
            [tensor.offset // 4 for tensor in tensors] if self._as_is else _compact_starts([parameters[t.name].numel() for t in tensors])
        )
        self.buffer = torch.zeros(starts[-1] + parameters[tensors[-1].name].numel(), dtype=torch.float32, device=device)
        for start, tensor in zip(starts, tensors, strict=True):
            parameter = parameters[tensor.name]
            view = self.buffer[start : start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        """Flat uint8 [end - start]: a view of the parameters themselves, or their cast to vLLM's dtype."""
        if self._as_is:
            return self.buffer.view(torch.uint8)[bucket.start : bucket.end]
        packed = torch.zeros(bucket.end - bucket.start, dtype=torch.uint8, device=self.buffer.device)
        for tensor in bucket.tensors:
            start = tensor.offset - bucket.start
            target = packed[start : start + tensor.nbytes].view(getattr(torch, tensor.dtype))
            target.copy_(self._parameters[tensor.name].detach().reshape(-1))
        return packed


def _compact_starts(sizes: list[int]) -> list[int]:
    starts, end = [], 0
    for size in sizes:
        end = align(4 * end) // 4
        starts.append(end)
        end += size
    return starts
