"""Memory for the staging buffer: kept free on a GPU while vLLM sizes its KV cache, or locked in host memory before
that, and refused to who needs it where it is not.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from atroposlib.wire import bridge
from atroposlib.wire.bridge import BroadcastOffer
from tests.unit.vllm_patching.engine_with_workers import EngineWithWorkers, broadcast_offer, make_worker
from tests.unit.vllm_patching.memory.test_arena import manifest
from vllm_patching.engines import engines_of
from vllm_patching.engines.base import Refused, Serving
from vllm_patching.http.gate import Gate
from vllm_patching.memory import shared_buffer
from vllm_patching.memory.host_buffer import HostBuffer
from vllm_patching.memory.shared_buffer import SharedBufferError
from vllm_patching.worker import BridgeWorker

FOUND = 10_000  # bytes that vLLM finds for its KV cache


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker on a GPU, whose vLLM finds FOUND bytes."""
    monkeypatch.setattr(BridgeWorker.__mro__[1], "determine_available_memory", lambda self: FOUND)
    made: Any = make_worker(0, 1, tmp_path)
    made._arena = SimpleNamespace(device=torch.device("cuda"), nbytes=1_000, staging_on_host=False)
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    return made


def test_the_kv_cache_leaves_room_for_the_staging_buffer(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm")
    assert worker.determine_available_memory() == FOUND - 1_000
    assert "free for the staging buffer (--bridge-staging)" in caplog.text


def test_memory_that_nobody_will_stage_in_is_the_kv_caches(worker: Any) -> None:
    worker.vllm_config.additional_config["atropos_bridge"]["staging"] = "none"
    assert worker.determine_available_memory() == FOUND


def test_staging_in_host_memory_leaves_room_for_a_bucket(
    worker: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "NCCL_BUCKET", 64)
    caplog.set_level("INFO", logger="vllm")
    worker._arena.staging_on_host = True
    largest = max(tensor.nbytes for tensor in manifest().tensors)
    assert worker.determine_available_memory() == FOUND - largest
    monkeypatch.setattr(bridge, "NCCL_BUCKET", 2 * largest)
    assert worker.determine_available_memory() == FOUND - 2 * largest
    assert "free for a bucket of weights on its way to host memory (--bridge-staging)" in caplog.text


def test_a_cache_of_the_users_own_size_keeps_it(worker: Any) -> None:
    worker.cache_config.kv_cache_memory_bytes = FOUND
    assert worker.determine_available_memory() == FOUND


def test_on_a_cpu_the_cache_has_its_own_size(worker: Any) -> None:
    worker._arena.device = torch.device("cpu")
    assert worker.determine_available_memory() == FOUND


def test_a_gpu_without_room_for_both_is_refused_at_the_start(worker: Any) -> None:
    worker._arena.nbytes = FOUND
    remedies = r"use more GPUs \(--tensor-parallel-size\), --bridge-staging host or a .*; .*--bridge-staging none"
    with pytest.raises(RuntimeError, match=rf"0\.0 GB of GPU memory .*{remedies}"):
        worker.determine_available_memory()


def test_a_gpu_without_room_for_a_bucket_is_not_sent_where_it_is_already(worker: Any) -> None:
    worker._arena.staging_on_host = True
    with pytest.raises(RuntimeError, match=r"a bucket of the weight bridge takes 0\.3 GB") as refused:
        worker.determine_available_memory()
    assert "--bridge-staging host" not in str(refused.value)


async def test_a_server_without_a_staging_buffer_refuses_a_broadcast(tmp_path: Path) -> None:
    engine = EngineWithWorkers(tmp_path)
    serving = Serving(engine, Gate(), model="m", staging=False)
    offer = msgspec.convert(broadcast_offer(), BroadcastOffer)
    broadcast = engines_of(serving)[BroadcastOffer]
    with pytest.raises(Refused, match=r"--bridge-staging none.*single copy"):
        await broadcast.fits(offer)
    serving.staging = True
    await broadcast.fits(offer)


class Cudart:
    """In place of torch's module of the CUDA runtime: keeps what is asked of it."""

    asked: ClassVar[list[tuple[str, int, int]]] = []
    status: ClassVar[int] = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        Cudart.asked.append(("register", address, nbytes))
        return Cudart.status

    def cudaHostUnregister(self, address: int) -> int:
        Cudart.asked.append(("unregister", address, 0))
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> type[Cudart]:
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(Cudart, "asked", [])
    return Cudart


GPU, NBYTES = torch.device("cuda"), 12_345


def test_host_memory_is_locked_as_long_as_it_is_held_and_no_larger(cudart: type[Cudart]) -> None:
    buffer = HostBuffer(NBYTES, GPU)
    address = buffer.tensor.data_ptr()
    assert buffer.tensor.shape == (NBYTES,)
    assert cudart.asked == [("register", address, NBYTES)]
    del buffer
    assert cudart.asked[1:] == [("unregister", address, 0)]
    HostBuffer(NBYTES, torch.device("cpu"))
    assert len(cudart.asked) == 2, "without a GPU nothing is locked"


def test_locking_asks_cuda_what_pytorch_itself_asks(cudart: type[Cudart]) -> None:
    """A contract: this PyTorch's own locking goes by the same two calls, with the same arguments."""
    from torch.cuda import _pin_memory_utils as own

    buffer = HostBuffer(NBYTES, GPU)
    address = buffer.tensor.data_ptr()
    own.pin_memory(address, NBYTES)
    own.unpin_memory(address)
    del buffer
    assert cudart.asked[0] == cudart.asked[1]
    assert cudart.asked[2] == cudart.asked[3]


def test_memory_that_cuda_does_not_lock_is_refused_with_limit_and_remedy(
    cudart: type[Cudart], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudart, "status", 2)
    why = r"cannot page-lock 0\.0 GB \(cudaError 2; ulimit -l is .*\)"
    remedy = r"ulimit -l unlimited \(docker run --ulimit memlock=-1\), raise the container's memory limit"
    with pytest.raises(SharedBufferError, match=rf"{why}: .*{remedy}"):
        HostBuffer(NBYTES, GPU)


def test_host_memory_that_is_not_there_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_buffer, "available_memory", lambda: 1_000)
    with pytest.raises(SharedBufferError, match=r"--bridge-staging host: .* 0 MB are free; .*--bridge-staging device"):
        HostBuffer(NBYTES, GPU)
