"""A step that a bridge takes on each of its servers, at once or in turn. Where it fails for a server, the outcome is
the error: what that costs is the bridge's to decide.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from example_trainer.bridges.base import BridgeError

L = TypeVar("L")
T = TypeVar("T")


MOST = 64  # servers that are fed at once


class ServerThreads:
    """The threads of one bridge, one per server; they start when they are first needed, and end with `close`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MOST, thread_name_prefix="BridgeLink")

    def at_once(self, act: Callable[[L], T], links: Sequence[L]) -> list[T | BridgeError]:
        """Return the outcome for each link, once all are in."""
        running = [self._pool.submit(outcome, act, link) for link in links]
        wait(running)
        return [each.result() for each in running]

    def close(self) -> None:
        """Wait for what still runs, and end the threads."""
        self._pool.shutdown()


def in_turn(act: Callable[[L], T], links: Sequence[L]) -> list[T | BridgeError]:
    """Return the outcome for each link, in this thread: a signal that ends the run interrupts what waits."""
    return [outcome(act, link) for link in links]


def outcome(act: Callable[[L], T], link: L) -> T | BridgeError:
    """Return what `act` returns, or the BridgeError that it raises."""
    try:
        return act(link)
    except BridgeError as error:
        return error
