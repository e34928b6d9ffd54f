"""Which trainer may send weights to this server: one session at a time, whatever its mode. In vLLM's API process.

A trainer renews its lease by heartbeats and commits. Another trainer is refused while the lease runs, unless the first
is known to be gone: its process on this machine has ended, or every worker has lost its connection.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from atroposlib.processes.identity import still_runs, this_process
from atroposlib.wire.bridge import (
    PROTOCOL,
    AdapterOffer,
    BroadcastOffer,
    LiveShard,
    LiveWeights,
    Manifest,
    Offer,
    Renewed,
    Served,
    ServerStatus,
    parse_offer,
)
from atroposlib.wire.typed import Name, PolicyVersion, printable, typed_body
from vllm_patching.batch_invariant import switch
from vllm_patching.compat import vllm_engine, vllm_server
from vllm_patching.engines.base import FENCE, WEIGHTS, Engine, Refused, Serving, log


@dataclass
class Session:
    """One trainer's session; `renewed` is when the trainer was last heard from (monotonic)."""

    offer: Offer
    engine: Engine
    renewed: float
    committed: int | None = None

    def lease_left(self) -> float:
        return self.renewed + self.offer.lease_s - time.monotonic()

    def gone(self) -> bool:
        """Return whether its trainer is known to have ended."""
        process = self.offer.process
        return process is not None and process.same_place(this_process()) and not still_runs(process)

    def check_next(self, version: int) -> None:
        """Renew the lease. Raises Refused unless `version` follows the one committed last."""
        self.renewed = time.monotonic()
        if self.committed is not None and version != self.committed + 1:
            raise Refused(f"policy version {version} does not follow {self.committed}: it must rise by one")


class Sessions:
    """The one session of a server that runs `engines`, each found by the type of the offers that it takes."""

    def __init__(self, serving: Serving, engines: Mapping[type[Offer], Engine]) -> None:
        self.serving = serving
        self.engines = engines
        self.lock = asyncio.Lock()  # held while the served weights, or the session, change
        self._session: Session | None = None

    async def status(self) -> ServerStatus:
        serving, session = self.serving, self._session
        return ServerStatus(
            protocol=PROTOCOL,
            enabled=serving.bridge_on,
            model=serving.model,
            served_model=serving.served_model,
            dtype=str(vllm_engine.served_dtype(serving.client)).removeprefix("torch."),
            tp_size=serving.tp_size,
            max_model_len=serving.max_model_len,
            batch_invariant=switch.is_on(),
            kv_on_sync=serving.kv_on_sync,
            policy_version=serving.policy_version,
            paused=await serving.client.is_paused(),
            poisoned=serving.gate.reason(WEIGHTS),
            refusing=serving.gate.reason(),
            session=session.offer.session if session else None,
            trainer=session.offer.trainer if session else None,
            lease_left_s=round(session.lease_left(), 1) if session else None,
            workers=await serving.workers() if serving.bridge_on else [],
            max_lora_rank=serving.max_lora_rank,
            adapters_in_use=sorted(vllm_server.adapters_in_use(serving.client))
            if serving.max_lora_rank is not None
            else [],
        )

    async def manifest(self) -> Manifest:
        """The weights that the workers have, in wire order. Raises Refused on a server that takes no whole weights."""
        return await self.engine_for(BroadcastOffer).serving.manifest()

    async def live(self) -> LiveWeights:
        """Checksums of what the workers compute with, of one policy version. Raises Refused, as `manifest`."""
        serving = self.engine_for(BroadcastOffer).serving
        async with self.lock:
            ranks = await serving.rpc("bridge_digest")
            return LiveWeights(serving.policy_version, msgspec.convert(ranks, list[list[LiveShard]]))

    async def open(self, offer: Offer) -> Served:
        """Begin the session that a trainer offers. If it raises Refused, nothing has changed."""
        engine = self.engine_for(type(offer))
        async with self.lock:
            await self.refuse_second_trainer()
            await engine.fits(offer)
            if self._session is not None:
                await self.end(self._session)
            for other in self.engines.values():
                await other.keep_out()
            log.info(
                "Trainer %s opens session %s (%s, lease %.0f s)",
                offer.trainer,
                offer.session,
                offer.kind,
                offer.lease_s,
            )
            opened = await engine.open(offer)
            self._session = Session(offer, engine, time.monotonic())
            return opened

    async def heartbeat(self, session: str) -> Renewed:
        current = self.current(session)
        current.renewed = time.monotonic()
        return Renewed(self.serving.policy_version, current.offer.lease_s)

    async def close(self, session: str) -> Served:
        """The trainer ends its session."""
        async with self.lock:
            current = self.current(session)
            version = self.serving.policy_version
            log.info("Trainer %s closes session %s at policy version %d", current.offer.trainer, session, version)
            await self.end(current)
            return Served(version)

    async def commit(self, session: str, version: int, request: object = None) -> Served:
        """Serve the version that this session's engine has staged, or stages now because `request` names it."""
        async with self.lock:
            current = self.current(session)
            current.check_next(version)
            if request is not None:
                await current.engine.stage(version, request)
            return await self.apply(current, version)

    async def fence(self, session: str, reason: str) -> Served:
        """A trainer of several servers continues without this one: end its session, and refuse to generate, because the
        other servers will serve newer versions.

        Does not wait for the lock, which a commit that hangs would hold. Raises Refused.
        """
        if not self.current(session).engine.feeds_several:
            raise Refused(f"session {session} has this server only: close it instead")
        self._session = None
        await self.serving.refuse_generation(
            FENCE, f"{printable(reason, 2000)}; a trainer's next complete sync serves a current version again"
        )
        return Served(self.serving.policy_version)

    async def apply(self, session: Session, version: int) -> Served:
        """Have the session's engine serve `version`. The caller holds the lock."""
        applied = await session.engine.apply(version)
        session.committed = version
        if self._session is session and self.serving.gate.reason(FENCE):  # it was not fenced off meanwhile
            await self.serving.allow_generation(FENCE)
        return applied

    async def end(self, session: Session) -> None:
        """End `session`, whatever its trainer is doing. The caller holds the lock."""
        if self._session is session:
            self._session = None
        await session.engine.close()

    def current(self, session: str) -> Session:
        held = self._session
        if held is not None and held.offer.session == session:
            return held
        holder = "no session" if held is None else f"session {held.offer.session} of {held.offer.trainer}"
        raise Refused(
            f"session {printable(session, 128)} is not the current one ({holder} is): open a new session", 404
        )

    def engine_for(self, offer: type[Offer]) -> Engine:
        """The engine that takes such offers. Raises Refused where the server was started without what it needs."""
        if offer in self.engines:
            return self.engines[offer]
        if self.serving.max_lora_rank is not None:
            why = "accepts LoRA adapters only: restart it without --enable-lora"
        elif offer is AdapterOffer:
            why = "accepts no adapters: restart it with --enable-lora --max-lora-rank 16 (or the rank you train)"
        else:
            why = "has the weight bridge off: start it with VLLM_ENABLE_SHARED_WEIGHTS=1"
        raise Refused(f"this server {why}")

    async def refuse_second_trainer(self) -> None:
        """Raise Refused while a trainer holds the server, unless it is known to be gone."""
        held = self._session
        if held is None or held.gone() or held.lease_left() <= 0 or await held.engine.abandoned():
            return
        raise Refused(
            f"trainer {held.offer.trainer} holds session {held.offer.session} for another "
            f"{held.lease_left():.0f} s: stop it, or wait for its lease to end"
        )


class Commit(Struct):
    session: Name
    policy_version: PolicyVersion


class Fence(Struct):
    session: Name
    reason: Annotated[str, Meta(max_length=2000)]


class Route(NamedTuple):
    """POST `path`: what `act` does with a `body`, on servers that run the engine of `mode`."""

    path: str
    mode: type[Offer]
    body: type[Struct]
    act: Callable[[Sessions, Any], Coroutine[object, object, Struct]]

    async def answer(self, sessions: Sessions, body: object) -> Struct:
        """Raises Refused, and WrongValue for a malformed body."""
        sessions.engine_for(self.mode)
        if issubclass(self.body, Offer):
            return await self.act(sessions, parse_offer(body, self.body))
        return await self.act(sessions, typed_body(self.path.rpartition("/")[2], body, self.body))


ROUTES = (
    Route("/v1/bridge/session", BroadcastOffer, BroadcastOffer, Sessions.open),
    Route("/v1/bridge/commit", BroadcastOffer, Commit, lambda s, b: s.commit(b.session, b.policy_version)),
    Route("/v1/bridge/fence", BroadcastOffer, Fence, lambda s, b: s.fence(b.session, b.reason)),
)
