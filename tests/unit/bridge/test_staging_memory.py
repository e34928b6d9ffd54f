"""GPU memory for the staging buffer: kept free while vLLM sizes its KV cache, and refused to who needs it where it is
not.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atroposlib.wire.bridge import BroadcastOffer
from tests.unit.bridge.engine_with_workers import EngineWithWorkers, make_worker
from tests.unit.bridge.test_arena import manifest
from vllm_patching.engines import engines_of
from vllm_patching.engines.base import Refused, Serving
from vllm_patching.http.gate import Gate
from vllm_patching.worker import BridgeWorker

FOUND = 10_000  # bytes that vLLM finds for its KV cache


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker on a GPU, whose vLLM finds FOUND bytes."""
    monkeypatch.setattr(BridgeWorker.__mro__[1], "determine_available_memory", lambda self: FOUND)
    made: Any = make_worker(0, 1, tmp_path)
    made._arena = SimpleNamespace(device=torch.device("cuda"), nbytes=1_000)
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    return made


def test_the_kv_cache_leaves_room_for_the_staging_buffer(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm")
    assert worker.determine_available_memory() == FOUND - 1_000
    assert "free for the staging buffer (--bridge-staging)" in caplog.text


def test_memory_that_nobody_will_stage_in_is_the_kv_caches(worker: Any) -> None:
    worker.vllm_config.additional_config["atropos_bridge"]["staging"] = False
    assert worker.determine_available_memory() == FOUND


def test_a_cache_of_the_users_own_size_keeps_it(worker: Any) -> None:
    worker.cache_config.kv_cache_memory_bytes = FOUND
    assert worker.determine_available_memory() == FOUND


def test_on_a_cpu_the_cache_has_its_own_size(worker: Any) -> None:
    worker._arena.device = torch.device("cpu")
    assert worker.determine_available_memory() == FOUND


def test_a_gpu_without_room_for_both_is_refused_at_the_start(worker: Any) -> None:
    worker._arena.nbytes = FOUND
    remedies = r"use more GPUs \(--tensor-parallel-size\) .*--bridge-staging none"
    with pytest.raises(RuntimeError, match=rf"0\.0 GB of GPU memory .*{remedies}"):
        worker.determine_available_memory()


async def test_a_server_without_a_staging_buffer_refuses_a_broadcast(tmp_path: Path) -> None:
    engine = EngineWithWorkers(tmp_path)
    serving = Serving(engine, Gate(), model="m", staging=False)
    offer = BroadcastOffer(
        session="s",
        trainer="h:1",
        lease_s=60.0,
        address="127.0.0.1",
        port=1,
        world_size=2,
        backend="gloo",
        manifest_digest=manifest().digest(),
        bucket_bytes=64,
        timeout_s=5.0,
    )
    broadcast = engines_of(serving)[BroadcastOffer]
    with pytest.raises(Refused, match=r"--bridge-staging none.*single copy"):
        await broadcast.fits(offer)
    serving.staging = True
    await broadcast.fits(offer)
