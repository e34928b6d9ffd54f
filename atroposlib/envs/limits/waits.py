"""Waiting for a peer, with an error that names the remedy."""

import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from atroposlib.clients.waiting import Wait, wait_for_async
from atroposlib.envs.errors import PeerError

T = TypeVar("T")


async def wait_for_peer(
    what: str, peer: str, attempt: Callable[[], Awaitable[T]], *, timeout_s: float, remedy: str, every_s: float = 0.5
) -> T:
    """The first value that `attempt` returns; it raises NotYet until then. Raises PeerError after `timeout_s`
    seconds.
    """

    def failed(reason: str) -> PeerError:
        missing = re.sub(r"\A(?:an?|the) ", "", what)
        return PeerError(f"no {missing} from {peer} within {timeout_s:g} s ({reason}); {remedy}")

    return await wait_for_async(attempt, Wait(what, peer, timeout_s, failed, every_s, every_s))
