"""Mode single copy: the trainer's parameters are vLLM's own memory, so nothing is
sent.

    pause ──▶ optimizer step on the live weights ──▶ resume          (vllm_patching/engines/single_copy.py watches us in between)

Same machine, same user and, on GPUs, the same devices. CPU: vLLM's anonymous memory files, opened through /proc.
GPU: CUDA IPC. With TP > 1 what every rank holds alike (norms, biases of row-split layers, shared key/value heads) is
stepped once and copied.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from atroposlib.logs import get_logger
from atroposlib.wire.bridge import Manifest, ManifestMismatch, SharedRank, SingleCopyOffer, compare
from atroposlib.wire.processes import this_process
from example_trainer.bf16 import MasteredParameter
from example_trainer.bridges.base import BridgeError, SyncReport
from example_trainer.bridges.heartbeat import Heartbeat
from example_trainer.bridges.parity import parity
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.config import TrainerConfig
from example_trainer.memory import check_memory, free_bytes, memory_table, needs
from example_trainer.model import check_packed_forward
from example_trainer.modes import SingleCopy
from example_trainer.weights.shared import StartWeights, bind, copy_replicas, meta_model, shared_tensors
from vllm_patching.memory import cuda_ipc
from vllm_patching.memory.shared_buffer import SharedBufferError, open_buffer

log = get_logger(__name__)

DISK_BYTES_PER_S = 20e6  # the start weights are read under a pause; a disk slower than this counts as hung


class SingleCopyBridge:
    """Trainer side of single copy; one session for its life."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._mode = config.mode(SingleCopy)
        key = config.vllm_api_key.get_secret_value() if config.vllm_api_key else None
        self._vllm = VllmClient(config.vllm_host, config.vllm_port, key, config.bridge_timeout_s)
        self._session = uuid.uuid4().hex
        self._heartbeat: Heartbeat | None = None

    def connect(self, source: str, device: torch.device) -> PreTrainedModel:
        status = self._vllm.wait_until_ready(self._config.vllm_start_timeout)
        manifest = self._vllm.manifest()
        self.served_dtype = manifest.tensors[0].dtype
        if any(tensor.dtype == "float16" for tensor in manifest.tensors):
            raise BridgeError(
                "vLLM serves float16, in which weights cannot be trained in place: serve with --dtype float32 or"
                " bfloat16"
            )
        model = meta_model(source)
        try:
            compare(manifest, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
        except ManifestMismatch as mismatch:
            raise BridgeError(f"trainer and vLLM do not hold the same model: {mismatch}") from mismatch
        workers = self._attach(manifest)
        self._heartbeat = Heartbeat(partial(self._vllm.heartbeat, self._session), self._mode.lease_s / 3)
        buffers = [_open(worker) for worker in workers]
        if buffers[0].device.type != device.type:
            raise BridgeError(
                f"--device {device}: vLLM's weights are on {buffers[0].device}; give --device {buffers[0].device.type}"
            )
        self._show_memory(buffers, manifest, status["tp_size"])
        self._tensors = list(shared_tensors(workers, buffers, self._as_parameter).values())
        self._start: StartWeights | None = StartWeights(source, self._tensors)
        bind(
            model,
            {tensor.name: tensor for tensor in self._tensors},
            gradient_checkpointing=self._config.gradient_checkpointing,
        )
        count = len(manifest.tensors)
        log.info("[Bridge] Mapped %d/%d params from vLLM to trainer", count, count)
        self._model, self._nbytes = model, manifest.nbytes
        return model

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        self.check()
        deadline_s = self._config.bridge_timeout_s + (self._nbytes / DISK_BYTES_PER_S if self._start else 0)
        log.info(
            "[Bridge] Pausing %s to make policy version %d in its memory, at most %.0f s",
            self._vllm.url,
            policy_version,
            deadline_s,
        )
        self._vllm.pause(self._session, policy_version, deadline_s)
        untouched = self._writes()
        try:
            start = time.perf_counter()
            first = self._start is not None
            if self._start is not None:
                self._start.write()
                self._start = None
            update()
            update_s = time.perf_counter() - start
            copied = copy_replicas(self._tensors)
            self._wait_for_devices()
        except BaseException:
            self._give_up(written=self._writes() != untouched)
            raise
        reply = self._vllm.resume(self._session, policy_version)
        log.info("[Bridge] Policy version %d is served: stall %.1f ms, of which update %.1f ms, copied between ranks %d bytes",
                 policy_version, reply["stall_s"] * 1e3, update_s * 1e3, copied)  # fmt: skip
        if first:
            check_packed_forward(self._model)
        return SyncReport(policy_version, update_s, reply["stall_s"], 0.0, reply["update_s"], copied)

    def parity_probe(self) -> float:
        return parity(self._model, self._vllm)

    def check(self) -> None:
        if self._heartbeat is not None and self._heartbeat.lost is not None:
            raise BridgeError(f"the session with vLLM is lost: {self._heartbeat.lost}")

    def close(self) -> None:
        if self._heartbeat is None:
            return
        self._heartbeat.stop(self._config.bridge_timeout_s)
        self._heartbeat = None
        try:
            self._vllm.close_session(self._session)
        except BridgeError as error:
            log.warning("[Bridge] Left session %s, but vLLM could not be told: %s", self._session, error)

    def _attach(self, manifest: Manifest) -> list[SharedRank]:
        offer = SingleCopyOffer(
            session=self._session,
            manifest_digest=manifest.digest(),
            lease_s=self._mode.lease_s,
            trainer=f"{socket.gethostname()}:{os.getpid()}",
            process=this_process(),
        )
        return self._vllm.attach(offer).workers

    def _as_parameter(self, storage: torch.Tensor) -> nn.Parameter:
        if storage.dtype == torch.bfloat16 and self._mode.bf16_update == "master":
            return MasteredParameter.over(storage)
        return nn.Parameter(storage)

    def _show_memory(self, buffers: list[torch.Tensor], manifest: Manifest, tp_size: int) -> None:
        for device in dict.fromkeys(buffer.device for buffer in buffers):
            ranks = sum(buffer.device == device for buffer in buffers)
            shapes = [
                torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
                for tensor in manifest.tensors
            ]
            lines = needs(shapes, self._config, reference=self._config.kl_coef > 0)
            share = [type(line)(line.what, line.nbytes * ranks // tp_size, line.shared) for line in lines]
            free = free_bytes(device)
            log.info("%s", memory_table(share, device, free))
            check_memory(share, device, free)

    def _writes(self) -> int:
        """Rises with every write to a shared parameter."""
        return sum(piece.parameter._version for tensor in self._tensors for piece in tensor.pieces)

    def _wait_for_devices(self) -> None:
        """Writes by this process are ordered with vLLM's kernels by nothing but this."""
        for device in {piece.parameter.device for tensor in self._tensors for piece in tensor.pieces}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _give_up(self, *, written: bool) -> None:
        """After a failed update: serve on if nothing was written, else have vLLM refuse to serve what is half
        written.
        """
        try:
            self._wait_for_devices()
            if written:
                self.close()
            else:
                self._vllm.resume(self._session, None)
        except (BridgeError, RuntimeError) as error:
            log.warning("[Bridge] vLLM could not be told that the update failed: %s", error)


def _open(worker: SharedRank) -> torch.Tensor:
    """One rank's live weights, flat uint8. Raises BridgeError."""
    try:
        if worker.ipc is not None:
            return cuda_ipc.open_handle(worker.ipc)
        assert worker.fd is not None
        return open_buffer(worker.process, worker.fd, worker.nbytes)
    except (SharedBufferError, cuda_ipc.CudaIpcError) as error:
        raise BridgeError(f"the weights of vLLM's rank {worker.rank} cannot be shared: {error}") from error
