"""Who may hand weights to this server, and the commit itself. Lives in vLLM's API process.

One session at a time, a broadcast's or a single copy's. A trainer renews its lease by heartbeats and commits; a
newcomer is refused while the lease runs, unless the old trainer is known to be gone: every worker reports its
session as failed (the connection broke), or its process, where it is on this machine, has ended.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from atroposlib.wire.bridge import BroadcastOffer, Manifest, parse_offer, read_policy_version
from atroposlib.wire.processes import Process, is_alive
from atroposlib.wire.typed import WrongValue, brief, printable
from vllm_patching import compat
from vllm_patching.batch_invariant import switch
from vllm_patching.engines import single_copy
from vllm_patching.http.gate import Gate
from vllm_patching.http.replies import Refused

log = compat.init_logger("vllm.atropos_bridge")

RPC_DEADLINE_S = 60.0
WEIGHTS = "weights"  # the gate's cause while the live weights are half updated
FENCE = "fence"  # its cause while a trainer of several servers has left this one behind


class WorkerFailed(Refused):
    """A worker could not do what it was asked for; the message says which and why, its log has the traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 500)


@dataclass
class Session:
    """One trainer's hold on the bridge; `renewed` is its last sign of life (monotonic)."""

    id: str
    trainer: str
    lease_s: float
    renewed: float
    process: Process | None = None  # of a single copy's trainer
    committed: int | None = None
    pause: single_copy.Pause | None = None

    def lease_left(self) -> float:
        return self.renewed + self.lease_s - time.monotonic()

    def gone(self) -> bool:
        """Whether its trainer is known to have ended."""
        return self.process is not None and not is_alive(self.process)


class BridgeState:
    """`engine` is vLLM's engine client; `policy_version` is what the served weights are; `gate` refuses generation."""

    def __init__(self, engine: Any, model: str, tp_size: int, enabled: bool, gate: Gate) -> None:
        self.engine = engine
        self._model = model
        self._tp_size = tp_size
        self.enabled = enabled
        self.gate = gate
        self.policy_version = 0
        self.lock = asyncio.Lock()  # held by whoever changes what is served, or by whom
        self._session: Session | None = None
        self._late_writer: Process | None = (
            None  # a trainer that may still write to the live weights, though it lost them
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """The weights loaded from disk are the policy version that their folder names, else 0."""
        self.policy_version = read_policy_version(self._model)
        await compat.label_weights(self.engine, self.policy_version)

    async def status(self) -> dict[str, Any]:
        session = self._session
        return {
            "enabled": self.enabled,
            "model": self._model,
            "served_model": self._model,
            "dtype": compat.served_dtype(self.engine),
            "tp_size": self._tp_size,
            "batch_invariant": switch.is_on(),
            "policy_version": self.policy_version,
            "paused": await self.engine.is_paused(),
            "poisoned": self.gate.reason(WEIGHTS),
            "refusing": self.gate.reason(),
            "session": session.id if session else None,
            "trainer": session.trainer if session else None,
            "lease_left_s": round(session.lease_left(), 1) if session else None,
            "workers": await self.rpc("bridge_status") if self.enabled else [],
        }

    async def manifest(self) -> dict[str, Any]:
        return (await self.rpc("bridge_manifest"))[0]

    async def open(self, data: dict[str, Any]) -> dict[str, Any]:
        """Accept a trainer's session on every worker. Raises Refused, WrongValue."""
        offer = parse_offer(data, BroadcastOffer)
        if not isinstance(offer, BroadcastOffer):
            raise WrongValue(f"kind={brief(data['kind'])}: another route takes it")
        async with self.lock:
            if offer.world_size != 1 + self._tp_size:
                raise Refused(
                    f"world_size {offer.world_size}: this server has {self._tp_size} worker(s), so it must be"
                    f" {1 + self._tp_size}",
                    422,
                )
            await self._admit(offer.manifest_digest)
            self._session = Session(offer.session, offer.trainer, offer.lease_s, time.monotonic())
            log.info(
                "Trainer %s opens session %s (store %s:%d, %s, lease %.0f s)",
                offer.trainer,
                offer.session,
                offer.address,
                offer.port,
                offer.backend,
                offer.lease_s,
            )
            workers = await self.rpc("bridge_open", msgspec.to_builtins(offer))
            return {"policy_version": self.policy_version, "workers": workers}

    async def attach(self, data: dict[str, Any]) -> dict[str, Any]:
        """Give a trainer of this machine the live weights to step. Raises Refused."""
        offer = single_copy.local_offer(data)
        async with self.lock:
            await self._admit(offer.manifest_digest)
            workers = await single_copy.attach(self, offer)
            self._session = Session(offer.session, offer.trainer, offer.lease_s, time.monotonic(), offer.process)
        return {"policy_version": self.policy_version, "workers": workers}

    async def pause(self, session: str, version: int, deadline_s: float) -> dict[str, Any]:
        """Stop generation for a single copy's step. Raises Refused."""
        async with self.lock:
            current = self._current(session)
            self._check_next(current, version)
            if current.process is None or current.pause is not None:
                raise Refused(
                    f"session {session} "
                    + ("is paused already" if current.pause else "has not attached to the weights")
                )
            return await single_copy.pause(self, current, version, deadline_s)

    async def resume(self, session: str, version: int | None) -> dict[str, Any]:
        """Serve `version`, which the trainer has written; None if it wrote nothing. Raises Refused."""
        async with self.lock:
            current = self._current(session)
            if current.pause is None or version not in (None, current.pause.version):
                held = f"for policy version {current.pause.version}" if current.pause else "not at all"
                raise Refused(f"resume with policy version {version}, but session {session} is paused {held}")
            return await single_copy.resume(self, current, current.pause, version)

    async def heartbeat(self, session: str) -> dict[str, Any]:
        current = self._current(session)
        current.renewed = time.monotonic()
        return {"lease_s": current.lease_s, "policy_version": self.policy_version}

    async def close(self, session: str) -> dict[str, Any]:
        async with self.lock:
            current = self._current(session)
            log.info("Trainer %s closes session %s at policy version %d", current.trainer, session, self.policy_version)
            if current.pause is not None:
                await self.abandon(
                    current, f"trainer {current.trainer} left in the middle of policy version {current.pause.version}"
                )
            self._session = self._late_writer = None  # it writes no more
            return {"policy_version": self.policy_version}

    async def fence(self, session: str, reason: str) -> dict[str, Any]:
        """A trainer of several servers goes on without this one: end its session, and serve no version that the others
        have left.

        Does not wait for the lock, which a commit that hangs would hold. Raises Refused.
        """
        current = self._current(session)
        if current.process is not None:
            raise Refused(f"session {session} is a single copy's, which feeds this server only: close it instead")
        self._session = None
        await self.refuse_generation(
            FENCE, f"{printable(reason, 2000)}; a trainer's next complete sync serves a current version again"
        )
        return {"policy_version": self.policy_version}

    async def commit(self, session: str, version: int) -> dict[str, Any]:
        """Swap `version` in on every rank between two forward steps; seconds of each part. Raises Refused."""
        async with self.lock:
            current = self._current(session)
            current.renewed = time.monotonic()
            self._check_next(current, version)
            staged = await self.rpc("bridge_staged", session, version)
            if not all(staged):
                raise Refused(
                    f"policy version {version} is staged on {sum(staged)} of {len(staged)} workers; send it whole first"
                )
            return await self._apply(current, version)

    async def _apply(self, current: Session, version: int) -> dict[str, Any]:
        log.info("Committing policy version %d: pausing generation, at most %.0f s", version, RPC_DEADLINE_S)
        start = time.perf_counter()
        await compat.pause(self.engine)
        paused = time.perf_counter()
        try:
            applied = await self.rpc("bridge_apply", current.id, version)
        except Exception as error:
            # some ranks may hold the new version and some the old
            await self._poison(f"commit of policy version {version} failed: {error}")
            raise
        swapped = time.perf_counter()
        await self.serve(current, version)
        stall = time.perf_counter() - start
        log.info("Committed policy version %d: stall %.1f ms, apply %.1f ms", version, stall * 1e3, max(applied) * 1e3)
        return {
            "policy_version": version,
            "stall_s": stall,
            "pause_s": paused - start,
            "apply_s": max(applied),
            "commit_s": swapped - paused,
        }

    async def serve(self, session: Session, version: int) -> None:
        """The live weights are `version`, whole and on every rank: label and serve them."""
        await compat.label_weights(self.engine, version)
        self.policy_version = session.committed = version
        if self._session is session:  # and was not fenced off while this was under way
            self.gate.open(FENCE)
        await self.allow_generation(WEIGHTS)

    async def refuse_generation(self, cause: str, reason: str) -> None:
        """Answer 503 with `reason` where one would generate, and end the requests in flight, until
        `allow_generation(cause)`.
        """
        log.error("Generation is refused: %s", reason)
        self.gate.close(cause, reason)
        await self.engine.pause_generation(mode="abort", clear_cache=True)

    async def allow_generation(self, cause: str) -> None:
        """`cause` is no reason any more: go on, unless there is another."""
        self.gate.open(cause)
        await self.continue_serving()

    async def continue_serving(self) -> None:
        """End a pause, unless generation is refused."""
        if self.gate.reason() is None:
            await self.engine.resume_generation()

    async def abandon(self, session: Session, reason: str) -> None:
        """`session` ended in the middle of an update. The caller holds the lock."""
        session.pause = None
        self._session = None
        self._late_writer = session.process
        await self._poison(reason)

    def keep(self, task: "asyncio.Task[None]") -> None:
        """Hold a background task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _poison(self, reason: str) -> None:
        await self.refuse_generation(
            WEIGHTS, f"{reason}: the weights are half updated; a trainer's next complete sync serves whole ones"
        )

    def _current(self, session: str) -> Session:
        if self._session is None or self._session.id != session:
            holder = f"session {self._session.id} of {self._session.trainer}" if self._session else "no session"
            raise Refused(
                f"session {printable(session, 128)} is not the current one ({holder} is): open a new session", 404
            )
        return self._session

    def _check_next(self, session: Session, version: int) -> None:
        if session.committed is not None and version != session.committed + 1:
            raise Refused(f"policy version {version} does not follow {session.committed}: it rises by one")

    async def _admit(self, manifest_digest: str) -> None:
        """Make room for a newcomer that holds the model with this digest. Raises Refused."""
        digest = msgspec.convert(await self.manifest(), Manifest).digest()
        if manifest_digest != digest:
            raise Refused(
                f"manifest digest {manifest_digest[:12]} is not this server's {digest[:12]}: trainer and vLLM hold"
                " different models"
            )
        await self._refuse_second_trainer()
        if self._session is not None and self._session.pause is not None:
            await self.abandon(self._session, f"trainer {self._session.trainer} ended in the middle of an update")
        await self._keep_out(self._late_writer)
        self._session = self._late_writer = None

    async def _keep_out(self, writer: Process | None) -> None:
        """See to it that a trainer which lost the weights in the middle of an update can write to them no more."""
        if writer is None or not is_alive(writer):
            return
        if refused := [why for why in await self.rpc("bridge_renew") if why is not None]:
            raise Refused(
                f"process {writer.pid} was in the middle of an update and still runs; end it first ({refused[0]})"
            )

    async def _refuse_second_trainer(self) -> None:
        current = self._session
        if current is None or current.gone() or current.lease_left() <= 0:
            return
        workers = await self.rpc("bridge_status")
        if all(worker["state"] == "failed" for worker in workers):
            return
        raise Refused(
            f"trainer {current.trainer} holds session {current.id} for another "
            f"{current.lease_left():.0f} s: stop it, or wait for its lease to end"
        )

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call `method` on every worker; their replies, rank by rank. Raises WorkerFailed, TimeoutError after
        RPC_DEADLINE_S.
        """
        replies = await asyncio.wait_for(self.engine.collective_rpc(method, args=args), RPC_DEADLINE_S)
        for rank, reply in enumerate(replies):
            if isinstance(reply, dict) and "failed" in reply:
                raise WorkerFailed(f"{method} failed on rank {rank}: {reply['failed']}")
        return replies
