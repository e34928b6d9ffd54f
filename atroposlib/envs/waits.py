"""Waiting for a peer: whom, where and until when is said before, every ten seconds meanwhile, and after."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from atroposlib.envs.errors import PeerError
from atroposlib.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")
REPORT_EVERY_S = 10.0


class NotYet(Exception):
    """The peer is not ready; the message says how that shows."""


async def wait_for_peer(
    what: str, peer: str, attempt: Callable[[], Awaitable[T]], *, timeout_s: float, remedy: str, every_s: float = 0.5
) -> T:
    """The first value that `attempt` returns; it raises NotYet until then. Raises PeerError after `timeout_s` seconds.

    Says nothing when the first attempt succeeds.
    """
    start = time.monotonic()
    next_report = start
    while True:
        try:
            value = await attempt()
        except NotYet as reason:
            waited = time.monotonic() - start
            if waited >= timeout_s:
                raise PeerError(f"no {what} from {peer} within {timeout_s:g} s ({reason}); {remedy}") from None
            if time.monotonic() >= next_report:
                log.info(
                    "Waiting for %s from %s, %.0f s of at most %.0f s so far (%s)",
                    what,
                    peer,
                    waited,
                    timeout_s,
                    reason,
                )
                next_report += REPORT_EVERY_S
            await asyncio.sleep(min(every_s, max(0.0, timeout_s - waited)))
            continue
        if next_report > start:
            log.info("Got %s from %s after %.1f s", what, peer, time.monotonic() - start)
        return value
