"""vLLM's engine client with real BridgeWorkers behind it, over hand-made parameters; no model is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from atroposlib.processes.identity import this_process
from tests.unit.vllm_patching.memory.test_arena import Fused, manifest, shards
from vllm_patching.engines import engines_of
from vllm_patching.engines.base import Serving
from vllm_patching.engines.session import Sessions
from vllm_patching.engines.updater import WeightUpdater
from vllm_patching.http.gate import Gate
from vllm_patching.memory.arena import Arena
from vllm_patching.worker import BridgeWorker

HERE = msgspec.to_builtins(this_process())


def make_worker(rank: int, tp: int, folder: Path) -> BridgeWorker:
    """A worker as `load_model` leaves it."""
    worker: Any = object.__new__(BridgeWorker)
    worker._tp_rank = rank
    worker._manifest = manifest()
    worker._arena = Arena(Fused(tp), worker._manifest, shards(rank, tp))
    worker._updater = WeightUpdater(worker._arena, rank)
    settings = {"config_path": str(folder / "b.json"), "staging": "device"}
    worker.vllm_config = SimpleNamespace(additional_config={"atropos_bridge": settings})
    made: BridgeWorker = worker
    return made


class EngineWithWorkers:
    """Answers what Serving and compat ask of vLLM's; `calls` are the names of what was asked, `broken` fail."""

    def __init__(self, folder: Path, tp: int = 1) -> None:
        self.workers = [make_worker(rank, tp, folder) for rank in range(tp)]
        self.calls: list[str] = []
        self.broken: dict[str, int] = {}  # method -> the rank that fails
        self.paused = False
        self.label: str | None = None
        self.model_config = SimpleNamespace(dtype=torch.float32, max_model_len=512)
        self.renderer = self.engine_core = self

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(args))
        replies = [
            {"failed": "RuntimeError: broken"} if self.broken.get(method) == rank else getattr(worker, method)(*sent)
            for rank, worker in enumerate(self.workers)
        ]
        decoded: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(replies))
        return decoded

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, **settings: Any) -> None:
        self.calls.append("pause")
        self.paused = True

    pause_scheduler_async = pause_generation

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def clear_mm_cache_async(self) -> None: ...

    async def update_weight_version(self, label: str) -> None:
        self.label = label

    def weights(self, rank: int = 0) -> torch.Tensor:
        """The live weights, flat."""
        arena = self.workers[rank]._arena
        assert arena.live is not None
        views = arena.views(arena.live.tensor)
        return torch.cat([view.flatten() for view in views.values()])


def make_sessions(folder: Path, tp: int = 1) -> tuple[Sessions, EngineWithWorkers]:
    """The whole server's side but HTTP, of a server whose bridge is on."""
    client = EngineWithWorkers(folder, tp)
    serving = Serving(client, Gate(), model="m", tp_size=tp)
    return Sessions(serving, engines_of(serving)), client


def broadcast_offer(**changes: Any) -> dict[str, Any]:
    return {
        "session": "s",
        "address": "127.0.0.1",
        "port": 1,
        "world_size": 2,
        "backend": "gloo",
        "manifest_digest": manifest().digest(),
        "bucket_bytes": 1 << 20,
        "timeout_s": 5.0,
        "lease_s": 30.0,
        "trainer": "h:1",
    } | changes


def single_copy_offer(**changes: Any) -> dict[str, Any]:
    return {
        "session": "s",
        "manifest_digest": manifest().digest(),
        "lease_s": 30.0,
        "trainer": "h:1",
        "process": HERE,
    } | changes
