"""The common part of all modes of the weight bridge on vLLM's side. The modules beside this one have one class per
mode.

    trainer ──HTTP──▶ Sessions ──▶ Engine of the offer's kind ──▶ Serving ──RPC──▶ workers, each with a Receiver
                      who may      how weights come in            what is served

An engine and the session that it serves live in vLLM's API process, a receiver in every worker. To add a mode, write
its `Engine` and, where workers receive whole weights, its `Receiver`, and register both in `__init__.py`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import msgspec
import torch

from atroposlib.errors import AtroposError
from atroposlib.wire.bridge import (
    Bucket,
    Committed,
    Manifest,
    Opened,
    Served,
    WorkerStatus,
    read_policy_version,
)
from vllm_patching import vllm_types
from vllm_patching.compat import vllm_engine
from vllm_patching.http.gate import Gate
from vllm_patching.kv_cache import OnSync

log = logging.getLogger("vllm.atropos_bridge")  # of all engines and receivers

RPC_DEADLINE_S = 60.0
WEIGHTS = "weights"  # the gate's cause while the live weights are half updated
FENCE = "fence"  # its cause while a trainer has newer weights than this server serves


class Refused(RuntimeError):
    """A request that cannot be served, or that the current state forbids; `status` is the HTTP code."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


class FileFault(AtroposError):
    """A directory that cannot be served; the message names the file and why."""


class WorkerFailed(Refused):
    """A worker failed; the message names the rank and the reason, and vLLM's log has the traceback."""

    def __init__(self, method: str, where: str, reason: str) -> None:
        super().__init__(f"{method} failed {where}: {reason}", 500)
        self.reason = reason


class Serving:
    """The server as engines see it: its workers and its engine client. Engines use nothing else of vLLM's.

    `client` is vLLM's engine client, `models` its table of served models (for adapters), `gate` refuses generation.
    `policy_version` is that of the served weights. A caller that changes what is served holds the lock of `Sessions`.
    """

    def __init__(
        self,
        client: vllm_types.EngineClient,
        gate: Gate,
        *,
        model: str,
        tp_size: int = 1,
        bridge_on: bool = True,
        staging: bool = True,
        max_model_len: int | None = None,
        max_lora_rank: int | None = None,
        models: vllm_types.ServedModels = None,
        kv_on_sync: OnSync = "reset",
    ) -> None:
        self.client = client
        self.gate = gate
        self.model = self.served_model = model
        self.tp_size = tp_size
        self.bridge_on = bridge_on  # whether the workers can take whole weights
        self.staging = staging  # and whether they have room to receive them beside the live ones
        self.max_model_len = max_model_len  # tokens of a prompt with its answer, at most
        self.max_lora_rank = max_lora_rank  # None: they take no adapters
        self.models = models
        self.kv_on_sync = kv_on_sync
        self.policy_version = 0
        self._cache_of: str | None = None  # the session whose versions the KV cache was computed with
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, *, await_sync: bool = False) -> None:
        """The weights loaded from disk are the policy version that their directory names, else 0. With `await_sync`, a
        trainer has newer ones.
        """
        self.policy_version = read_policy_version(self.model)
        await vllm_engine.label_weights(self.client, self.policy_version)
        if await_sync:
            reason = f"--await-sync: {self.model} is older than the policy; a trainer's next complete sync serves that"
            self.gate.close(FENCE, reason)
            log.info("Generation is refused: %s", reason)

    async def rpc(self, method: str, *args: object) -> list[Any]:
        """Call `method` on every worker, between two forward passes; their replies, rank by rank.

        Raises WorkerFailed for the first rank that failed, or if a reply takes longer than RPC_DEADLINE_S.
        """
        try:
            replies: list[object] = await asyncio.wait_for(
                self.client.collective_rpc(method, args=tuple(msgspec.to_builtins(args))), RPC_DEADLINE_S
            )
        except TimeoutError:
            raise WorkerFailed(method, "on some rank", f"not done within {RPC_DEADLINE_S:.0f} s") from None
        for rank, reply in enumerate(replies):
            if isinstance(reply, dict) and "failed" in reply:
                raise WorkerFailed(method, f"on rank {rank}", reply["failed"])
        return replies

    def in_background(self, act: Coroutine[object, object, None]) -> None:
        """Run `act` as a task, and keep a reference to it: the event loop keeps only a weak one."""
        task = asyncio.create_task(act)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def manifest(self) -> Manifest:
        """The weights that the workers have, in wire order."""
        return msgspec.convert((await self.rpc("bridge_manifest"))[0], Manifest)

    async def check_same_model(self, digest: str) -> None:
        """Raise Refused unless `digest` is that of this server's manifest."""
        own = (await self.manifest()).digest()
        if digest != own:
            raise Refused(
                f"manifest digest {digest[:12]} is not this server's {own[:12]}: trainer and vLLM have different models"
            )

    async def workers(self) -> list[WorkerStatus]:
        """The state of each worker's updater."""
        return msgspec.convert(await self.rpc("bridge_status"), list[WorkerStatus])

    async def swap(self, session: str, version: int) -> Committed:
        """Serve `version` of `session`, which the workers' receivers have staged.

        Raises Refused, with nothing changed, unless every rank has received all of it. All ranks change between the
        same two forward passes. If one fails, some have the new version and some the old, so the weights are poisoned.
        """
        staged = await self.rpc("bridge_staged", session, version)
        if not all(staged):
            raise Refused(
                f"policy version {version} is staged on {sum(staged)} of {len(staged)} workers; send it whole first"
            )
        log.info("Committing policy version %d: pausing generation, at most %.0f s", version, RPC_DEADLINE_S)
        start = time.perf_counter()
        await self.pause(session)
        paused = time.perf_counter()
        try:
            seconds = await self.rpc("bridge_apply", session, version)
            swapped = time.perf_counter()
            await self.serve(version)
        except Exception as error:
            await self.poison(f"commit of policy version {version} failed: {error}")
            raise
        stall = time.perf_counter() - start
        log.info("Committed policy version %d: stall %.1f ms, apply %.1f ms", version, stall * 1e3, max(seconds) * 1e3)
        return Committed(version, stall, paused - start, max(seconds), swapped - paused)

    async def pause(self, session: str) -> None:
        """Pause for the next version of `session`. What the KV cache has of another trainer's versions always goes."""
        keep = self.kv_on_sync != "reset" and self._cache_of == session
        async with self.resuming_if_it_fails():
            await vllm_engine.pause(self.client, keep_cache=keep)
        self._cache_of = session

    @asynccontextmanager
    async def resuming_if_it_fails(self) -> AsyncIterator[None]:
        """Continue generation if a pause fails that has perhaps begun: nobody else would end it."""
        try:
            yield
        except Exception:
            await self.resume()
            raise

    async def serve(self, version: int) -> None:
        """Label the live weights as `version`, which every rank has completely, and let generation continue."""
        await vllm_engine.label_weights(self.client, version)
        self.policy_version = version
        await self.allow_generation(WEIGHTS)

    async def poison(self, reason: str) -> None:
        """Refuse to generate from a mixture of two versions, until a whole version is served."""
        await self.refuse_generation(
            WEIGHTS, f"{reason}: the weights are half updated; a trainer's next complete sync serves whole ones"
        )

    async def refuse_generation(self, cause: str, reason: str) -> None:
        """Answer 503 with `reason` on routes that generate, and end the requests in flight, until
        `allow_generation(cause)`.
        """
        log.error("Generation is refused: %s", reason)
        self.gate.close(cause, reason)
        self._cache_of = None
        await self.client.pause_generation(mode="abort", clear_cache=True)

    async def allow_generation(self, cause: str) -> None:
        """Remove `cause`, and continue unless another one remains."""
        self.gate.open(cause)
        await self.resume()

    async def resume(self) -> None:
        """End a pause, unless generation is refused."""
        if self.gate.reason() is None:
            await self.client.resume_generation()


class Engine:
    """The server's half of a mode: how new weights come in. One instance per server and mode.

    `Sessions` finds it by the offer's kind and calls it under its lock, so no two calls overlap. A session is
    `open`, then any number of versions, each `stage` before `apply`, then `close`. All raise Refused with the value,
    the limit and the remedy.
    """

    takes_adapters: ClassVar[bool] = False  # whether it is a mode of servers with --enable-lora, or of all others
    feeds_several: ClassVar[bool] = False  # whether its trainer may continue with other servers: see fence

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    async def fits(self, offer: Any) -> None:
        """Raise Refused unless this server could take the offer. Changes nothing: another trainer may hold the
        session.
        """

    async def open(self, offer: Any) -> Served:
        """Begin a session with a trainer whose offer fits; no other session is open. If it is refused, nothing has
        changed and no session begins.
        """
        raise NotImplementedError

    async def stage(self, version: int, request: Any) -> None:
        """Receive `version` beside what is served, while generation continues.

        A refused request changes nothing. If a worker fails, its session is over: nothing can be applied any more,
        and vLLM keeps serving the current weights.
        """
        raise Refused("this session does not receive bytes by request")

    async def apply(self, version: int) -> Served:
        """Serve `version`, on all ranks from the same forward pass on.

        Refused, with nothing changed, if it is not completely staged. A failure in the middle poisons the weights:
        generation is refused until a whole version is applied.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """The session is over: its trainer left, died or was replaced. If it was in the middle of writing live
        weights, they are poisoned; else serving continues as it was.
        """

    async def keep_out(self) -> None:
        """Before any session opens: raise Refused if a former trainer of this mode could still write live weights."""

    async def abandoned(self) -> bool:
        """Return whether every worker has lost the trainer, so that another one may come before its lease ends."""
        return False


class StagingEngine(Engine):
    """A mode whose workers receive whole weights beside the live ones, each by a `Receiver` of its own."""

    offer: Any = None  # of the session that is open

    async def fits(self, offer: Any) -> None:
        if not self.serving.staging:
            raise Refused(
                "this server keeps no memory for a staging buffer (--bridge-staging none): use single copy, or start"
                " it without that flag",
                422,
            )
        await self.serving.check_same_model(offer.manifest_digest)

    async def open(self, offer: Any) -> Opened:
        workers = await self.serving.rpc("bridge_open", offer)
        self.offer = offer
        return Opened(self.serving.policy_version, msgspec.convert(workers, list[WorkerStatus]))

    async def apply(self, version: int) -> Committed:
        return await self.serving.swap(self.offer.session, version)

    async def abandoned(self) -> bool:
        return all(worker.state == "failed" for worker in await self.serving.workers())


class Receiver:
    """A session as one worker sees it: where the bytes of a version come from. One mode, one session, one rank.

    All but `request` and `end` run on the worker's updater thread, `join` first. RuntimeError and OSError mean a peer
    that is dead, silent or wrong: the session is then over on this worker, and the live weights are unchanged.
    """

    over = False  # set once the trainer has said goodbye, or the worker has forgotten the session
    arriving: int | None = None  # the version that is being received
    base: int | None = None  # the version whose words `fill` must find in its buffer
    on_device = False  # whether `fill` writes only to the device that vLLM computes on
    bucket_bytes = 64 << 20  # received in pieces of this size
    window = 0  # bytes that may be under way at once, of several buckets; one bucket may have more

    def __init__(self, offer: Any, rank: int) -> None:
        self.offer = offer
        self.rank = rank  # of the worker, 0..TP-1

    def join(self) -> None:
        """Connect to where the bytes come from."""

    def request(self, version: int, request: object) -> None:
        """The server was asked to stage `version`; called between two forward passes."""
        raise NotImplementedError

    def end(self) -> None:
        """The worker has forgotten the session: let `next_version` return at once."""
        self.over = True

    def next_version(self) -> int | None:
        """Wait for the version to receive next; None once the session is over."""
        raise NotImplementedError

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> Callable[[], None] | None:
        """Fill `buffer`, flat uint8 [end - start], with the bytes of `bucket`, or begin to: what completes it. It holds
        the live words where `base` is set. Called for every bucket, in wire order.
        """
        raise NotImplementedError

    def staged(self, seconds: float) -> None:
        """The version has been received completely: acknowledge it."""

    def leave(self) -> None:
        """The session is over, whether normally or not: release what `join` has acquired so far."""
