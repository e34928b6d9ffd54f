"""The server's side of single copy: a trainer of this machine steps the live weights while generation is paused.

    attach ──▶ pause ──▶ (trainer writes) ──▶ resume ──▶ pause ...      one session, renewed by heartbeats
                 └── holder gone, silent, or past its deadline ──▶ poisoned: 503 until a whole sync

Between pause and resume nobody can tell a weight that was stepped from one that was not. So whatever ends that
window other than resume poisons the weights. A trainer that dies outside of it leaves them whole, and serving goes
on.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atroposlib.wire.bridge import SingleCopyOffer, parse_offer
from atroposlib.wire.processes import is_alive, this_process
from atroposlib.wire.typed import WrongValue, brief
from vllm_patching import compat
from vllm_patching.http.replies import Refused

if TYPE_CHECKING:
    from vllm_patching.bridge_state import BridgeState, Session

log = compat.init_logger("vllm.atropos_bridge")

WATCH_S = 0.1  # how often the holder of a pause is looked at


@dataclass
class Pause:
    """Generation stands still for `version` of one session, at the latest until `deadline` (monotonic)."""

    version: int
    asked: float  # perf_counter when the trainer asked, and when the engine stood still
    still: float
    deadline: float

    def broken_by(self, session: "Session") -> str | None:
        """Why this pause must end without resume, if so."""
        trainer = f"trainer {session.trainer}"
        if session.process is not None and not is_alive(session.process):
            return f"{trainer} died while it updated the weights to policy version {self.version}"
        if session.lease_left() <= 0:
            return f"{trainer} fell silent while it updated the weights to policy version {self.version}"
        if time.monotonic() > self.deadline:
            return f"{trainer} overstepped its deadline while it updated the weights to policy version {self.version}"
        return None


def local_offer(data: dict[str, Any]) -> SingleCopyOffer:
    """Raises WrongValue for a malformed offer, Refused for a trainer elsewhere: it could not be watched, nor its
    memory shared.
    """
    offer = parse_offer(data, SingleCopyOffer)
    if not isinstance(offer, SingleCopyOffer):
        raise WrongValue(f"kind={brief(data['kind'])}: another route takes it")
    here = this_process()
    if offer.process.boot_id != here.boot_id:
        raise Refused(
            f"trainer {offer.trainer} runs on another machine: single copy shares memory within one; "
            "start it beside vLLM, or use --use-shared-memory (broadcast)",
            422,
        )
    if offer.process.pid_namespace != here.pid_namespace:
        raise Refused(
            f"trainer {offer.trainer} runs in another container: single copy needs the same process namespace (docker"
            " --pid); or use --use-shared-memory (broadcast)",
            422,
        )
    return offer


async def attach(bridge: "BridgeState", offer: SingleCopyOffer) -> list[dict[str, Any]]:
    """Every rank's live weights as a trainer can open them. Raises Refused where one cannot be shared."""
    workers: list[dict[str, Any]] = await bridge.rpc("bridge_attach")
    if refused := [worker["refused"] for worker in workers if "refused" in worker]:
        raise Refused(refused[0], 422)
    log.info(
        "Trainer %s attaches to the live weights, session %s, lease %.0f s", offer.trainer, offer.session, offer.lease_s
    )
    return workers


async def pause(bridge: "BridgeState", session: "Session", version: int, deadline_s: float) -> dict[str, Any]:
    """Stop generation so that the trainer may write; from now on it is watched."""
    asked = time.perf_counter()
    log.info(
        "Pausing generation while trainer %s makes policy version %d, at most %.0f s",
        session.trainer,
        version,
        deadline_s,
    )
    await compat.pause(bridge.engine)
    still = time.perf_counter()
    session.renewed = time.monotonic()
    session.pause = Pause(version, asked, still, time.monotonic() + deadline_s)
    bridge.keep(asyncio.create_task(_watch(bridge, session, session.pause)))
    return {"policy_version": bridge.policy_version, "pause_s": still - asked}


async def resume(bridge: "BridgeState", session: "Session", pause: Pause, version: int | None) -> dict[str, Any]:
    """The weights are `version`, whole: serve them. None: nothing was written, go on as before."""
    session.pause = None
    session.renewed = time.monotonic()
    if version is not None:
        await bridge.serve(session, version)
    else:
        await bridge.continue_serving()
    done = time.perf_counter()
    log.info("Serving policy version %d: stall %.1f ms", bridge.policy_version, (done - pause.asked) * 1e3)
    return {
        "policy_version": bridge.policy_version,
        "stall_s": done - pause.asked,
        "pause_s": pause.still - pause.asked,
        "update_s": done - pause.still,
    }


async def _watch(bridge: "BridgeState", session: "Session", pause: Pause) -> None:
    while session.pause is pause:
        if reason := pause.broken_by(session):
            async with bridge.lock:
                if session.pause is pause:
                    await bridge.abandon(session, reason)
            return
        await asyncio.sleep(WATCH_S)
