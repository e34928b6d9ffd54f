"""Single copy: a trainer on this machine steps the live weights itself while generation is paused.

    attach ──▶ pause ──▶ (trainer writes) ──▶ resume ──▶ pause ...      one session, renewed by heartbeats
                 └── holder gone, silent, or past its deadline ──▶ poisoned: 503 until a whole sync

Between pause and resume, some weights may already be stepped and others not. So if anything but a resume ends the
pause, the weights are poisoned. If the trainer dies at another time, the weights are whole, and serving continues.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from atroposlib.processes.identity import still_runs, this_process
from atroposlib.wire.bridge import Attached, Paused, Resumed, Served, SharedRank, SingleCopyOffer
from atroposlib.wire.processes import Process
from atroposlib.wire.typed import Name, PolicyVersion
from vllm_patching.compat import vllm_layers
from vllm_patching.engines.base import Engine, Refused, Serving, log
from vllm_patching.engines.session import Commit, Route, Session, Sessions

WATCH_S = 0.1  # seconds between two checks of the trainer that has paused generation


@dataclass
class _Pause:
    """Generation is paused for `version`, at the latest until `deadline` (monotonic)."""

    session: Session
    version: int
    asked: float  # perf_counter when the trainer asked, and when the engine was paused
    still: float
    deadline: float

    def broken(self) -> str | None:
        """Explain why this pause must end without resume, if so."""
        if self.session.gone():
            fault = "died"
        elif self.session.lease_left() <= 0:
            fault = "fell silent"
        elif time.monotonic() > self.deadline:
            fault = "exceeded its deadline"
        else:
            return None
        return (
            f"trainer {self.session.offer.trainer} {fault} while it updated the weights to policy version"
            f" {self.version}"
        )


class SingleCopyEngine(Engine):
    """A version is written in place; `apply` ends the pause in which the trainer wrote it."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving)
        self._pause: _Pause | None = None
        self._late_writer: Process | None = None  # has lost its session, but may still write to the live weights

    async def fits(self, offer: SingleCopyOffer) -> None:
        here = this_process()
        if offer.process.boot_id != here.boot_id:
            raise Refused(
                f"trainer {offer.trainer} runs on another machine: single copy shares memory within one; "
                "start it beside vLLM, or use --use-shared-memory (broadcast)",
                422,
            )
        if offer.process.pid_namespace != here.pid_namespace:
            raise Refused(
                f"trainer {offer.trainer} runs in another container: single copy needs the same process namespace"
                " (docker --pid); or use --use-shared-memory (broadcast)",
                422,
            )
        await self.serving.check_same_model(offer.manifest_digest)

    async def open(self, offer: SingleCopyOffer) -> Attached:
        workers = await self.serving.rpc("bridge_attach")
        if refused := [worker["refused"] for worker in workers if "refused" in worker]:
            raise Refused(refused[0], 422)
        return Attached(self.serving.policy_version, msgspec.convert(workers, list[SharedRank]))

    async def pause(self, session: Session, version: int, deadline_s: float) -> Paused:
        """Stop generation so that the trainer may write `version`, at most `deadline_s` seconds."""
        if self._pause is not None:
            raise Refused(f"session {session.offer.session} is paused already")
        asked = time.perf_counter()
        log.info(
            "Pausing generation while trainer %s makes policy version %d, at most %.0f s",
            session.offer.trainer,
            version,
            deadline_s,
        )
        await self.serving.pause(session.offer.session)
        if not vllm_layers.on_cpu():  # vLLM before 0.29 ends a pause with kernels still running, by its source
            async with self.serving.resuming_if_it_fails():
                await self.serving.rpc("bridge_quiesce")
        still = time.perf_counter()
        session.renewed = time.monotonic()
        self._pause = _Pause(session, version, asked, still, time.monotonic() + deadline_s)
        return Paused(self.serving.policy_version, still - asked)

    async def watch(self, sessions: Sessions) -> None:
        """End the session if its trainer does not come back from the pause."""
        pause = self._pause
        while pause is not None and self._pause is pause:
            if pause.broken():
                async with sessions.lock:
                    if self._pause is pause:
                        await sessions.end(pause.session)
                return
            await asyncio.sleep(WATCH_S)

    async def close(self) -> None:
        if (pause := self._pause) is None:
            return
        self._pause = None
        self._late_writer = pause.session.offer.process
        await self.serving.poison(
            pause.broken()
            or f"trainer {pause.session.offer.trainer} left in the middle of policy version {pause.version}"
        )

    async def keep_out(self) -> None:
        writer = self._late_writer
        if writer is not None and still_runs(writer):
            refused = [why for why in await self.serving.rpc("bridge_renew") if why is not None]
            if refused:
                raise Refused(
                    f"process {writer.pid} was in the middle of an update and still runs; end it first ({refused[0]})"
                )
        self._late_writer = None

    async def apply(self, version: int | None) -> Resumed:
        """End the pause: the trainer has written `version`, which is served now, or nothing (None)."""
        pause = self._pause
        if pause is None or version not in (None, pause.version):
            held = f"for policy version {pause.version}" if pause else "not at all"
            raise Refused(f"resume with policy version {version}, but the session is paused {held}")
        pause.session.renewed = time.monotonic()
        if version is not None:
            await self.serving.serve(version)
        else:
            await self.serving.resume()
        self._pause = None  # not before: the watch ends a pause whose resume has failed
        done = time.perf_counter()
        log.info("Serving policy version %d: stall %.1f ms", self.serving.policy_version, (done - pause.asked) * 1e3)
        return Resumed(self.serving.policy_version, done - pause.asked, pause.still - pause.asked, done - pause.still)


class Pause(Commit):
    deadline_s: Annotated[float, Meta(gt=0, le=86400)]


class Resume(Struct):
    session: Name
    policy_version: PolicyVersion | None = None


def _attached(session: Session) -> SingleCopyEngine:
    if not isinstance(session.engine, SingleCopyEngine):
        raise Refused(f"session {session.offer.session} has not attached to the weights")
    return session.engine


async def _pause(sessions: Sessions, body: Pause) -> Paused:
    async with sessions.lock:
        session = sessions.current(body.session)
        session.check_next(body.policy_version)
        engine = _attached(session)
        paused = await engine.pause(session, body.policy_version, body.deadline_s)
    sessions.serving.in_background(engine.watch(sessions))
    return paused


async def _resume(sessions: Sessions, body: Resume) -> Served:
    async with sessions.lock:
        session = sessions.current(body.session)
        if body.policy_version is None:
            return await _attached(session).apply(None)
        return await sessions.apply(session, body.policy_version)


ROUTES = (
    Route("/v1/bridge/attach", SingleCopyOffer, SingleCopyOffer, Sessions.open),
    Route("/v1/bridge/pause", SingleCopyOffer, Pause, _pause),
    Route("/v1/bridge/resume", SingleCopyOffer, Resume, _resume),
)
