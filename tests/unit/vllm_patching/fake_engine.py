"""vLLM's engine client as our endpoints see it, over ranks that hold version numbers instead of weights.

The routes, the session and the gate in front of it are the product's own; no engine process runs.
"""

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import torch
from fastapi import FastAPI

from atroposlib.processes.identity import this_process
from atroposlib.wire.bridge import BroadcastOffer, Manifest, WireTensor, WorkerStatus
from vllm_patching.endpoint import BridgeEndpoints

MANIFEST = Manifest("m", 2, 16, (WireTensor("w", (4,), "float32", "w", 0),))
VOCABULARY = 97


class FakeRank:
    """A worker with one session: the versions that it has staged, and those that it has served."""

    def __init__(self, rank: int) -> None:
        self.status = WorkerStatus(rank)
        self.staged: set[tuple[str, int]] = set()
        self.served: list[int] = []
        self.breaks = False  # at the next apply
        self.immovable: str | None = None  # why its memory cannot be moved away from a late writer

    def bridge_manifest(self) -> Manifest:
        return MANIFEST

    def bridge_status(self) -> WorkerStatus:
        return self.status

    def bridge_open(self, offer: Any) -> WorkerStatus:
        self.staged.clear()
        self.status = WorkerStatus(self.status.rank, "joined", offer["session"])
        return self.status

    def bridge_attach(self) -> dict[str, Any]:
        process = msgspec.to_builtins(this_process())
        return {"rank": self.status.rank, "nbytes": 16, "process": process, "layout": {}, "shards": [], "fd": 0}

    def bridge_renew(self) -> str | None:
        return self.immovable

    def bridge_quiesce(self) -> None:
        """Nothing runs."""

    def bridge_staged(self, session: str, version: int) -> bool:
        return (session, version) in self.staged

    def bridge_apply(self, session: str, version: int) -> float | dict[str, str]:
        if self.breaks or (session, version) not in self.staged:
            return {"failed": "RuntimeError: this rank is broken"}
        self.served.append(version)
        return 0.001


class FakeEngine:
    """`events` is what pauses, changes and resumes generation, in order.

    `during` holds what happens while a worker's method runs, inside a request ("generate") or a "pause".
    """

    errored = False
    output_handler = None

    def __init__(self, tp_size: int) -> None:
        self.ranks = [FakeRank(rank) for rank in range(tp_size)]
        self.events: list[str] = []
        self.paused = False
        self.during: dict[str, Callable[[], Awaitable[None]]] = {}
        self.output: Any = None
        self.model_config = SimpleNamespace(
            dtype=torch.float32,
            is_multimodal_model=False,
            get_vocab_size=lambda: VOCABULARY,
            max_model_len=512,
            tokenizer="m",
            tokenizer_mode="auto",
            tokenizer_revision=None,
            trust_remote_code=False,
        )
        self.output_processor = SimpleNamespace(add_request=None, request_states={})
        self.renderer = self.engine_core = self
        self.stats: list[Any] = []  # of each step, that vLLM's own loggers got
        self.logger_manager = SimpleNamespace(record=lambda scheduler_stats, **_: self.stats.append(scheduler_stats))

    def stage(self, session: str, version: int, *ranks: int) -> None:
        """As when a trainer has sent it, to these ranks alone."""
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].staged.add((session, version))

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method in ("bridge_apply", "bridge_renew", "bridge_quiesce"):
            self.events.append(method)
        if method in self.during:
            await self.during.pop(method)()
        return [msgspec.to_builtins(getattr(rank, method)(*args)) for rank in self.ranks]

    async def is_paused(self) -> bool:
        return self.paused

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs."""

    async def add_request_async(self, request: Any) -> None:
        self.events.append(f"request with {request.cache_salt}")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._pause(mode, clear_cache)

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self._pause(mode, clear_cache)
        if "pause" in self.during:
            await self.during.pop("pause")()

    def _pause(self, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self.events.append(f"pause {mode}" if clear_cache else f"pause {mode} with its cache")

    async def clear_mm_cache_async(self) -> None:
        """There is none."""

    async def resume_generation(self) -> None:
        self.paused = False
        self.events.append("resume")

    async def update_weight_version(self, version: str) -> None:
        self.events.append(f"label {version}")

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: Any = None) -> AsyncIterator[Any]:
        if "generate" in self.during:
            await self.during.pop("generate")()
        yield self.output


def broadcast(tp_size: int, session: str = "a", **changes: Any) -> dict[str, Any]:
    """The offer of a trainer of one rank."""
    offer = BroadcastOffer(
        session=session,
        trainer="h:1",
        lease_s=60.0,
        address="127.0.0.1",
        port=29500,
        world_size=1 + tp_size,
        backend="gloo",
        manifest_digest=MANIFEST.digest(),
        bucket_bytes=1000,
        timeout_s=10.0,
    )
    return msgspec.to_builtins(msgspec.structs.replace(offer, **changes))  # type: ignore[no-any-return]


class BridgeClient(httpx.AsyncClient):
    """A client of the endpoints in front of an engine, with what a trainer asks of them."""

    engine: FakeEngine

    async def order(self, route: str, **body: Any) -> httpx.Response:
        return await self.post(f"/v1/bridge/{route}", json=body)

    async def refusal(self, route: str, **body: Any) -> tuple[int, str]:
        reply = await self.order(route, **body)
        return reply.status_code, reply.json()["error"]["message"]

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.get("/v1/bridge/status")).json()
        return found

    async def opened(self, session: str = "a", **changes: Any) -> None:
        reply = await self.order("session", **broadcast(len(self.engine.ranks), session, **changes))
        assert reply.status_code == 200, reply.text

    async def committed(self, version: int, session: str = "a") -> None:
        self.engine.stage(session, version)
        reply = await self.order("commit", session=session, policy_version=version)
        assert reply.json()["policy_version"] == version

    async def paused(self, version: int, session: str = "a", deadline_s: float = 60.0) -> None:
        reply = await self.order("pause", session=session, policy_version=version, deadline_s=deadline_s)
        assert reply.status_code == 200, reply.text


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine, **arguments: Any) -> AsyncIterator[BridgeClient]:
    """A client of our endpoints, mounted as vLLM mounts them, in front of `engine`."""
    app, endpoints = FastAPI(), BridgeEndpoints()
    endpoints.attach_router(app)
    given: dict[str, Any] = dict(
        model="m",
        tensor_parallel_size=len(engine.ranks),
        additional_config={"atropos_bridge": {"staging": "device"}},
        enable_lora=False,
        max_lora_rank=None,
        host="127.0.0.1",
        port=9001,
        api_key=None,
    )
    app.state.openai_serving_models = None
    await endpoints.init_state(engine, app.state, Namespace(**given | arguments))
    engine.events.clear()
    try:
        async with BridgeClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9001", timeout=60
        ) as client:
            client.engine = engine
            yield client
    finally:
        watch = app.state.engine_watch._task
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
