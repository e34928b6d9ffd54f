"""A trainer's session with one vLLM server, the same for every mode: offered once, renewed by heartbeats, and ended.

    offer ──▶ accepted ──▶ heartbeat every third of the lease ──▶ close

A server has one session at a time. It ends when its trainer leaves, or is silent for longer than the lease.
"""

import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from atroposlib.clients.heartbeat import Heartbeat
from atroposlib.errors import reading
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import Manifest, Offer, compare
from example_trainer.bridges.base import BridgeError, WeightBridge
from example_trainer.bridges.digest import differing
from example_trainer.bridges.parity import parity
from example_trainer.bridges.vllm_client import SESSIONS, VllmClient
from example_trainer.weights.source import WeightSource
from example_trainer.weights.written import CheckpointError, TrainedModel

log = get_logger(__name__)

STOP_S = 30.0  # for a heartbeat under way


def offered_by_us(lease_s: float) -> dict[str, Any]:
    """The fields that all offers have: a fresh random id, and who this process is."""
    return {"session": uuid.uuid4().hex, "trainer": f"{socket.gethostname()}:{os.getpid()}", "lease_s": lease_s}


class Session:
    """The server at `vllm` has accepted `offer`, at `route`. From here on it is kept until `close` or `fence`."""

    def __init__(self, vllm: VllmClient, offer: Offer, route: str = SESSIONS) -> None:
        self.vllm = vllm
        self.id = offer.session
        self._route = route
        self._open = True
        self.heart = Heartbeat(vllm.url, partial(vllm.heartbeat, self.id, route), offer.lease_s / 3, BridgeError)
        self.heart.start()

    def check(self) -> None:
        """Raise BridgeError if the last heartbeat failed; never waits."""
        if self.heart.lost is not None:
            raise BridgeError(f"the session with vLLM is lost: {self.heart.lost}")

    def close(self) -> None:
        """End the session, once; a server that cannot be reached is logged."""
        if self._end(STOP_S):
            with told(f"Left session {self.id}, but could not notify vLLM"):
                self.vllm.close_session(self.id, self._route)

    def fence(self, reason: str) -> None:
        """End a session that failed; ask the server, if it still listens, not to sample from a version that the others
        have left.
        """
        if self._end(0):
            with told(f"{self.vllm.url} could not be fenced off and may continue to serve an older version"):
                self.vllm.fence(self.id, reason)

    def abandon(self) -> None:
        """Forget a session whose server is gone, and told no more."""
        self._end(0)

    def _end(self, timeout_s: float) -> bool:  # whether the session was open
        was_open, self._open = self._open, False
        self.heart.stop(timeout_s)
        return was_open


class SessionBridge(WeightBridge):
    """Implements what the bridges with one session have in common: all but `sync`."""

    def __init__(
        self,
        session: Session,
        trained: TrainedModel,
        served_dtype: str,
        handed_over: tuple[WeightSource, Manifest] | None = None,
    ) -> None:
        self.served_dtype = served_dtype
        self._handed_over = handed_over  # the whole weights, if these are
        self._session = session
        self._vllm = session.vllm
        self._trained = trained

    def write_version(self, parent: Path, policy_version: int, label: int | None, served: str) -> Path:
        """Write the weights to a directory whose name no other version or trainer has, labelled with `label`. `served`
        is what vLLM keeps serving if that fails.
        """
        folder = parent / f"policy-v{policy_version}-{self._session.id[:6]}"
        log.info(
            "[Bridge] Writing policy version %d (%.1f MB) to %s", policy_version, self._trained.nbytes / 1e6, folder
        )
        try:
            return self._trained.write(folder, label)
        except CheckpointError as error:
            raise BridgeError(f"{error}. vLLM keeps serving {served}") from error

    def decoders(self) -> Sequence[VllmClient]:
        return [self._vllm]

    def parity_probe(self) -> float:
        return parity(self._trained, self._vllm)

    def differing_tensors(self, policy_version: int) -> list[str] | None:
        return None if self._handed_over is None else differing(*self._handed_over, self._vllm, policy_version)

    def check(self) -> None:
        self._session.check()

    def sessions(self) -> set[str]:
        return {self._session.id}

    def close(self) -> None:
        self._session.close()


@contextmanager
def told(otherwise: str) -> Iterator[None]:
    """Wrap a last word to a server, which may be gone: then log `otherwise`, and let the trainer continue."""
    try:
        yield
    except RuntimeError as error:
        log.warning("[Bridge] %s: %s", otherwise, error)


def matching_manifest(vllm: VllmClient, shapes: dict[str, tuple[int, ...]]) -> Manifest:
    """Return the manifest of what `vllm` holds. Raises BridgeError unless it is exactly the trainer's tensors, by
    name and shape.
    """
    manifest = vllm.manifest()
    with reading(f"trainer and the vLLM server at {vllm.url} do not have the same model", BridgeError):
        compare(manifest, shapes)
    log.info("[Bridge] Mapped %d/%d params from vLLM to trainer", len(manifest.tensors), len(shapes))
    return manifest
