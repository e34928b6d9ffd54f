"""A bridge that continues with a vLLM server that died and was started again, as the launcher does (--vllm-return-s).

    an act fails ──▶ is our session still there? ──yes──▶ the error, as without this
                                    └──no──▶ wait for a fresh server ──▶ reconnect ──▶ the act again

A server that the launcher started again refuses to generate until the trainer has synced (--await-sync), within seconds
of its start if the trainer waits for a batch. One that was started without the flag serves its --model meanwhile, as
the policy version that this directory names, else 0. Modes with `survives_vllm` only: in a single copy the weights that
train are vLLM's own memory, and end with it.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Literal, TypeVar

from atroposlib.clients.one_request import NoReply
from atroposlib.logs import get_logger
from atroposlib.processes.malloc import give_back_freed_memory
from atroposlib.wire.bridge import read_policy_version
from example_trainer.bridges.base import BridgeError, Decodes, SyncReport, TellsActivity, WeightBridge
from example_trainer.bridges.vllm_client import NoAnswer, Refused, VllmClient

log = get_logger(__name__)

T = TypeVar("T")
LOOK_EVERY_S = 1.0
HANGS_S = 60.0  # in which a server whose engine died has ended, and one that hangs has not
FRESH: Final = "fresh"  # what a look at a server finds
GONE: Final = "gone"
HANGS: Final = "hangs"
ENOUGH = 4  # returns within one act: what fails so often fails for another reason


class ReturningBridge(WeightBridge):
    """`inner`, whose `servers` may take `return_s` seconds to return. `sync_in_check`: a loss may be repaired while the
    trainer waits for a batch, which several ranks do only between their acts. `give_back` has every rank give the
    system what it has freed.
    """

    def __init__(
        self,
        inner: WeightBridge,
        servers: Sequence[VllmClient],
        return_s: float,
        *,
        sync_in_check: bool = True,
        give_back: Callable[[], None] = give_back_freed_memory,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._servers = servers
        self._return_s = return_s
        self._sync_in_check = sync_in_check
        self._give_back = give_back
        self._sleep, self._now = sleep, now
        self._version: int | None = None  # that was synced last
        self.served_dtype = inner.served_dtype

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        waiting = [update]  # an update is made once, however often its result is sent

        def update_once() -> None:
            while waiting:
                waiting.pop()()

        report = self._done(lambda: self._inner.sync(policy_version, update_once))
        self._version = policy_version
        return report

    def decoders(self) -> Sequence[Decodes]:
        return self._inner.decoders()

    def parity_probe(self) -> float:
        return self._done(self._inner.parity_probe, self._sync_again)

    def differing_tensors(self, policy_version: int) -> list[str] | None:
        return self._done(lambda: self._inner.differing_tensors(policy_version), self._sync_again)

    def admit(self, url: str) -> None:
        self._inner.admit(url)

    def release(self, url: str, gone: bool = False) -> None:
        self._inner.release(url, gone)

    def joined(self) -> Sequence[TellsActivity]:
        return self._inner.joined()

    def check(self) -> None:
        if self._sync_in_check:
            self._done(self._inner.check, self._sync_again)

    def close(self) -> None:
        self._inner.close()

    def _sync_again(self) -> None:
        if self._version is not None:
            self._inner.sync(self._version, lambda: None)

    def _done(self, act: Callable[[], T], first: Callable[[], None] = lambda: None) -> T:
        """Return what `act` returns; after a return of the server, `first` runs before it."""
        for _ in range(ENOUGH):
            try:
                return act()
            except BridgeError as error:
                self._await_return(error)
                while (failed := self._repaired(first)) is not None:
                    self._await_return(failed)
        return act()

    def _repaired(self, first: Callable[[], None]) -> BridgeError | None:
        """Reconnect to the returned server, and run `first`. Return why it is not held with its weights; None if it
        is.
        """
        try:
            self._inner.reconnect()
            first()
        except BridgeError as error:
            return error
        return None

    def _await_return(self, error: BridgeError) -> None:
        """Return when a server is there that was started again. Raises `error` if it was not its death: if the process
        of before answers, or if one is there and hangs.
        """
        began = last_gone = self._now()
        is_told = False
        names = ", ".join(server.url for server in self._servers)
        while FRESH not in (states := {self._look(server, error) for server in self._servers}):
            if not is_told:
                log.warning("[Bridge] Waiting %.0f s at most for vLLM to be started again: %s", self._return_s, error)
                is_told = True
                self._give_back()  # vLLM takes a share of what is free
            now = self._now()
            last_gone = last_gone if HANGS in states else now
            if now - last_gone > HANGS_S:
                raise BridgeError(
                    f"{error}. vLLM at {names} was not started again: it is there, and has not answered for"
                    f" {HANGS_S:.0f} s (stopped, or hung)"
                ) from error
            if now - began > self._return_s:
                raise BridgeError(
                    f"{error}. vLLM at {names} was not started again within {self._return_s:.0f} s (--vllm-return-s)"
                ) from error
            self._sleep(LOOK_EVERY_S)
        log.info("[Bridge] vLLM at %s was started again after %.0f s, and gets the policy", names, self._now() - began)

    def _look(self, server: VllmClient, error: BridgeError) -> Literal["fresh", "gone", "hangs"]:
        try:
            status = server.status()
        except NoAnswer as silent:  # nothing listens: it is gone, or still loading
            return HANGS if isinstance(silent.__cause__, NoReply) and silent.__cause__.timed_out else GONE
        except Refused:  # its engine died, and it is about to end; or its engine hangs
            return HANGS
        named = 0
        with suppress(OSError, ValueError, KeyError, TypeError):  # the server has read it; this user may not be able to
            named = read_policy_version(status.model)
        if status.session is not None or status.policy_version not in (0, named):
            raise error  # the process of before, or one that another trainer holds
        return FRESH
