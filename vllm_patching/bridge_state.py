"""Who may hand weights to this server, and the commit itself. Lives in vLLM's API process.

One session at a time. A trainer renews its lease by heartbeats and commits; a newcomer is refused while the lease runs, unless
every worker already reports the old session as failed (its trainer died and the connection broke).
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from vllm_patching import compat
from vllm_patching.protocol import Manifest, SessionOffer

log = compat.init_logger("vllm.atropos_bridge")

RPC_DEADLINE_S = 60.0


class BridgeConflict(RuntimeError):
    """A request that the current state forbids; `status` is the HTTP code."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class _Session:
    offer: SessionOffer
    renewed: float
    committed: int | None = None

    def lease_left(self) -> float:
        return self.renewed + self.offer.lease_s - time.monotonic()


class BridgeState:
    """`engine` is vLLM's engine client; `policy_version` is what the served weights are."""

    def __init__(self, engine: Any, model: str, tp_size: int, enabled: bool) -> None:
        self.engine = engine
        self._model = model
        self._tp_size = tp_size
        self.enabled = enabled
        self.policy_version = 0
        self._session: _Session | None = None
        self._poisoned: str | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """The weights loaded from disk are policy version 0."""
        await compat.label_weights(self.engine, 0)

    async def status(self) -> dict[str, Any]:
        session = self._session
        return {
            "enabled": self.enabled,
            "model": self._model,
            "tp_size": self._tp_size,
            "policy_version": self.policy_version,
            "paused": await self.engine.is_paused(),
            "poisoned": self._poisoned,
            "session": session.offer.session if session else None,
            "trainer": session.offer.trainer if session else None,
            "lease_left_s": round(session.lease_left(), 1) if session else None,
            "workers": await self._rpc("bridge_status") if self.enabled else [],
        }

    async def manifest(self) -> dict[str, Any]:
        return (await self._rpc("bridge_manifest"))[0]

    async def open(self, data: dict[str, Any]) -> dict[str, Any]:
        """Accept a trainer's session on every worker. Raises BridgeConflict."""
        try:
            offer = SessionOffer.from_json(data)
        except (ValueError, TypeError) as error:
            raise BridgeConflict(str(error), 422) from error
        async with self._lock:
            await self._refuse_second_trainer()
            if offer.world_size != 1 + self._tp_size:
                raise BridgeConflict(
                    f"world_size {offer.world_size}: this server has {self._tp_size} worker(s), so it must be {1 + self._tp_size}", 422
                )
            digest = await self._manifest_digest()
            if offer.manifest_digest != digest:
                raise BridgeConflict(
                    f"manifest digest {offer.manifest_digest[:12]} is not this server's {digest[:12]}: "
                    "trainer and vLLM hold different models"
                )
            self._session = _Session(offer, time.monotonic())
            log.info(
                "Trainer %s opens session %s (store %s:%d, %s, lease %.0f s)",
                offer.trainer,
                offer.session,
                offer.address,
                offer.port,
                offer.backend,
                offer.lease_s,
            )
            workers = await self._rpc("bridge_open", data)
            return {"policy_version": self.policy_version, "workers": workers}

    async def heartbeat(self, session: str) -> dict[str, Any]:
        current = self._current(session)
        current.renewed = time.monotonic()
        return {"lease_s": current.offer.lease_s, "policy_version": self.policy_version}

    async def close(self, session: str) -> dict[str, Any]:
        current = self._current(session)
        log.info("Trainer %s closes session %s at policy version %d", current.offer.trainer, session, self.policy_version)
        self._session = None
        return {"policy_version": self.policy_version}

    async def commit(self, session: str, version: int) -> dict[str, Any]:
        """Swap `version` in on every rank between two forward steps; seconds of each part. Raises BridgeConflict."""
        async with self._lock:
            current = self._current(session)
            current.renewed = time.monotonic()
            if current.committed is not None and version != current.committed + 1:
                raise BridgeConflict(f"policy version {version} does not follow {current.committed}: it rises by one")
            staged = await self._rpc("bridge_staged", session, version)
            if not all(staged):
                raise BridgeConflict(f"policy version {version} is staged on {sum(staged)} of {len(staged)} workers; send it whole first")
            return await self._apply(current, version)

    async def _apply(self, current: _Session, version: int) -> dict[str, Any]:
        log.info("Committing policy version %d: pausing generation, at most %.0f s", version, RPC_DEADLINE_S)
        start = time.perf_counter()
        await self.engine.pause_generation(mode="keep", clear_cache=True)
        paused = time.perf_counter()
        try:
            applied = await self._rpc("bridge_apply", current.offer.session, version)
        except Exception as error:
            # some ranks may hold the new version and some the old: stay paused until a whole version is committed
            self._poisoned = f"commit of policy version {version} failed: {error}"
            log.error("%s; generation stays paused until the next complete commit", self._poisoned)
            raise
        await compat.label_weights(self.engine, version)
        self.policy_version = current.committed = version
        self._poisoned = None
        swapped = time.perf_counter()
        await self.engine.resume_generation()
        stall = time.perf_counter() - start
        log.info("Committed policy version %d: stall %.1f ms, apply %.1f ms", version, stall * 1e3, max(applied) * 1e3)
        return {
            "policy_version": version,
            "stall_s": stall,
            "pause_s": paused - start,
            "apply_s": max(applied),
            "commit_s": swapped - paused,
        }

    def _current(self, session: str) -> _Session:
        if self._session is None or self._session.offer.session != session:
            holder = f"session {self._session.offer.session} of {self._session.offer.trainer}" if self._session else "no session"
            raise BridgeConflict(f"session {session} is not the current one ({holder} is): open a new session", 404)
        return self._session

    async def _refuse_second_trainer(self) -> None:
        current = self._session
        if current is None or current.lease_left() <= 0:
            return
        workers = await self._rpc("bridge_status")
        if all(worker["state"] == "failed" for worker in workers):
            return
        raise BridgeConflict(
            f"trainer {current.offer.trainer} holds session {current.offer.session} for another "
            f"{current.lease_left():.0f} s: stop it, or wait for its lease to end"
        )

    async def _manifest_digest(self) -> str:
        return Manifest.from_json(await self.manifest()).digest()

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call `method` on every worker, rank by rank. Raises TimeoutError after RPC_DEADLINE_S."""
        return await asyncio.wait_for(self.engine.collective_rpc(method, args=args), RPC_DEADLINE_S)
