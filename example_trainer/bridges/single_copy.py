"""Mode single copy: the trainer's parameters are vLLM's own memory, so nothing is sent.

    pause ──▶ optimizer step on the live weights ──▶ resume        (vLLM's engines/single_copy.py watches in between)

Same machine, same user and, on GPUs, the same devices. CPU: vLLM's anonymous memory files, opened through /proc.
GPU: CUDA IPC. Where vLLM has several ranks, one process computes with the parts of all of them (weights/shared.py) and
copies what every rank has alike; or, with --tp-size, one trainer rank for each computes with its own
(weights/by_rank.py).
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch
from torch import nn

from atroposlib.errors import reading
from atroposlib.logs import get_logger
from atroposlib.processes.identity import this_process
from atroposlib.wire.bridge import Attached, Manifest, SharedRank, SingleCopyOffer
from example_trainer.bridges.base import BridgeError, Prepared, SyncReport
from example_trainer.bridges.session import Session, SessionBridge, matching_manifest, offered_by_us, told
from example_trainer.bridges.vllm_client import vllm_clients
from example_trainer.model.loading import check_packed_forward, meta_model
from example_trainer.model.memory_check import check_single_copy
from example_trainer.optim.bf16_masters import MasteredParameter
from example_trainer.ranks.partition import local
from example_trainer.settings.bridges import SingleCopy
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.by_rank import LiveModel, SharedRanks
from example_trainer.weights.shared import SharedWeights, StartWeights, copy_replicas, shared_tensors
from example_trainer.weights.source import WeightSource, shapes_of
from example_trainer.weights.written import TrainedModel
from vllm_patching.memory import cuda_ipc
from vllm_patching.memory.shared_buffer import SharedBufferError, open_buffer

log = get_logger(__name__)

DISK_BYTES_PER_S = 20e6  # the start weights are read under a pause; a disk slower than this counts as hung


def prepare(config: TrainerConfig, source: str, device: torch.device) -> Prepared:
    """Attach to vLLM's weights, where the model is to live. Raises BridgeError, or TrainerError if training does not
    fit beside them.
    """
    (vllm,) = vllm_clients(config)
    vllm.wait_until_ready(config.vllm_start_timeout)
    manifest = matching_manifest(vllm, shapes_of(meta_model(source)))
    if any(tensor.dtype == "float16" for tensor in manifest.tensors):
        raise BridgeError(
            "vLLM serves float16, in which weights cannot be trained in place: serve with --dtype float32 or bfloat16"
        )
    mode = config.mode(SingleCopy)
    offer = SingleCopyOffer(**offered_by_us(mode.lease_s), manifest_digest=manifest.digest(), process=this_process())
    workers = vllm.ask(Attached, "POST", "/v1/bridge/attach", offer).workers
    session = Session(vllm, offer)
    with ExitStack() as undo:
        undo.callback(session.close)
        if config.tp_size > 1:
            if config.tp_size != len(workers):
                alone = ", or --tp-size 1, with which one process trains the parts of all ranks"
                raise BridgeError(
                    f"--tp-size {config.tp_size}, but the vLLM server at {vllm.url} has {len(workers)} rank(s): give"
                    f" --tp-size {len(workers)}{alone if len(workers) > 1 else ''}"
                )
            _check_ranks_memory(config, len(workers), manifest, device)
            undo.pop_all()
            connect = partial(_connect_ranks, config, session, manifest)
            return Prepared(connect, session.close, SharedRanks(workers))
        buffers = [_open(worker) for worker in workers]
        if buffers[0].device.type != device.type:
            raise BridgeError(
                f"--device {device}: vLLM's weights are on {buffers[0].device}; give --device {buffers[0].device.type}"
            )
        _check_memory(config, buffers, manifest)
        storage = SharedWeights(shared_tensors(workers, buffers, partial(_as_parameter, mode.bf16_update)))
        start = StartWeights(source, storage.tensors.values())
        undo.pop_all()
    return Prepared(partial(_connect, config, session, manifest, storage, start), session.close, storage)


def _connect(
    config: TrainerConfig,
    session: Session,
    manifest: Manifest,
    storage: SharedWeights,
    start: StartWeights,
    trained: TrainedModel,
) -> "SingleCopyBridge":
    return SingleCopyBridge(config, session, manifest, storage, trained, OneProcess(start, trained, config.seq_len))


def _connect_ranks(
    config: TrainerConfig, session: Session, manifest: Manifest, trained: TrainedModel
) -> "SingleCopyBridge":
    assert isinstance(trained, LiveModel)
    return SingleCopyBridge(config, session, manifest, trained.source(manifest), trained, ByRanks(trained))


class Writer(Protocol):
    """Who writes to vLLM's memory."""

    def write_start(self) -> None:
        """Write the start weights."""

    def writes(self) -> int:
        """Changes with every write, and where another rank may have written."""

    def settle(self) -> int:
        """Complete the writes, on every device; bytes copied between vLLM's ranks."""

    def wait(self) -> None:
        """Return when this process has nothing under way on a device."""

    def check(self) -> None:
        """Raise ModelError unless the model computes as it should, after the first sync."""


class OneProcess:
    """This process writes to every rank of vLLM."""

    def __init__(self, start: StartWeights, trained: TrainedModel, longest: int) -> None:
        self._start = start
        self._longest = longest  # sequences, in tokens
        self._parameters = [piece.parameter for tensor in start.tensors for piece in tensor.pieces]
        self._trained = trained

    def write_start(self) -> None:
        self._start.write()

    def writes(self) -> int:
        return sum(parameter._version for parameter in self._parameters)  # rises with every write to a tensor

    def settle(self) -> int:
        copied = copy_replicas(self._start.tensors)
        self.wait()
        return copied

    def wait(self) -> None:
        # nothing else orders this process's writes with vLLM's kernels
        for device in {parameter.device for parameter in self._parameters}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def check(self) -> None:
        check_packed_forward(self._trained.policy, self._trained.model.device, longest=self._longest)


class ByRanks:
    """Each trainer rank writes to its own rank of vLLM."""

    def __init__(self, trained: LiveModel) -> None:
        self._trained = trained
        self._begun = 0

    def write_start(self) -> None:
        self._begun += 1
        self._trained.write_start()

    def writes(self) -> int:
        own = sum(local(parameter.detach())._version for parameter in self._trained.model.parameters())
        # a rank that failed before its first write may have been alone in that
        return own + self._begun + self._trained.parted()

    def settle(self) -> int:
        self._trained.settle(False)
        return 0

    def wait(self) -> None:
        if self._trained.device.type == "cuda":
            torch.cuda.synchronize(self._trained.device)

    def check(self) -> None:
        self._trained.settle(True)


class SingleCopyBridge(SessionBridge):
    """Trainer side of single copy; one session for its life."""

    def __init__(
        self,
        config: TrainerConfig,
        session: Session,
        manifest: Manifest,
        source: WeightSource,
        trained: TrainedModel,
        writer: Writer,
    ) -> None:
        super().__init__(session, trained, manifest.tensors[0].dtype, (source, manifest))
        self._timeout_s = config.bridge_timeout_s
        self._first_s = manifest.nbytes / DISK_BYTES_PER_S
        self._writer = writer
        self._first = True  # until a sync has written the start weights

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        self.check()
        deadline_s = self._timeout_s + (self._first_s if self._first else 0)
        log.info(
            "[Bridge] Pausing %s to write policy version %d into its memory, at most %.0f s",
            self._vllm.url,
            policy_version,
            deadline_s,
        )
        self._vllm.pause(self._session.id, policy_version, deadline_s)
        untouched = self._writer.writes()
        try:
            start = time.perf_counter()
            if first := self._first:
                self._writer.write_start()
                self._first = False
            update()
            update_s = time.perf_counter() - start
            copied = self._writer.settle()
        except BaseException:
            self._give_up(written=self._writer.writes() != untouched)
            raise
        reply = self._vllm.resume(self._session.id, policy_version)
        log.info(
            "[Bridge] Policy version %d is served: stall %.1f ms, of which update %.1f ms,"
            " copied between ranks %d bytes",
            policy_version,
            reply.stall_s * 1e3,
            update_s * 1e3,
            copied,
        )
        if first:
            self._writer.check()
        return SyncReport(policy_version, reply.stall_s, 0.0, reply.update_s, copied)

    def _give_up(self, *, written: bool) -> None:
        with told("could not notify vLLM that the update failed"):
            self._writer.wait()
            if written:
                self.close()  # so that vLLM refuses to serve what is half written
            else:
                self._vllm.resume(self._session.id, None)


def _as_parameter(bf16_update: str, storage: torch.Tensor) -> nn.Parameter:
    if storage.dtype == torch.bfloat16 and bf16_update == "master":
        return MasteredParameter.over(storage)
    return nn.Parameter(storage)


def _check_memory(config: TrainerConfig, buffers: list[torch.Tensor], manifest: Manifest) -> None:
    is_half = any(tensor.dtype == "bfloat16" for tensor in manifest.tensors)
    count = sum(math.prod(tensor.shape) for tensor in manifest.tensors)
    for device in dict.fromkeys(buffer.device for buffer in buffers):
        ranks = sum(buffer.device == device for buffer in buffers)
        check_single_copy(config, count * ranks // manifest.tp_size, is_half, device)


def _check_ranks_memory(config: TrainerConfig, ranks: int, manifest: Manifest, device: torch.device) -> None:
    """The same for one trainer rank on each device; on a CPU all of them share its memory."""
    count = sum(math.prod(tensor.shape) for tensor in manifest.tensors)
    if device.type == "cpu":
        check_single_copy(config, count, False, device, ranks)
    else:
        check_single_copy(config, count // ranks, False, device)


def _open(worker: SharedRank) -> torch.Tensor:
    with reading(f"the weights of vLLM's rank {worker.rank} cannot be shared", BridgeError, also=(SharedBufferError,)):
        if worker.ipc is not None:
            return cuda_ipc.open_handle(worker.ipc)
        assert worker.fd is not None
        return open_buffer(worker.process, worker.fd, worker.nbytes)
