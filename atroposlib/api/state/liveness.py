"""When each peer was last heard from. Pure: the caller passes the time. Every call takes time in proportion to the
number of newly silent peers.
"""

from collections import OrderedDict


class Liveness:
    """Peers that are silent once `timeout_s` seconds have passed without a sign."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard: OrderedDict[int, float] = OrderedDict()  # peer -> when last, oldest first
        self.silent: set[int] = set()  # reported by `newly_silent`, and not heard from since

    def heard(self, peer: int, now: float) -> bool:
        """Record a sign of life. Returns whether the peer had been silent."""
        self._heard[peer] = now
        self._heard.move_to_end(peer)
        was_silent = peer in self.silent
        self.silent.discard(peer)
        return was_silent

    def silence(self, peer: int, now: float) -> float | None:
        """Seconds since the peer's last sign of life; None where it is silent, or was never heard."""
        at = self._heard.get(peer)
        return None if at is None or now - at > self._timeout_s else now - at

    def newly_silent(self, now: float) -> list[int]:
        """Peers that have become silent since the last call."""
        silent: list[int] = []
        while self._heard and now - next(iter(self._heard.values())) > self._timeout_s:
            silent.append(self._heard.popitem(last=False)[0])
        self.silent.update(silent)
        return silent

    def forget(self, peer: int) -> None:
        """Remove a peer that will not return."""
        self._heard.pop(peer, None)
        self.silent.discard(peer)

    def clear(self) -> None:
        """Forget everyone."""
        self._heard.clear()
        self.silent.clear()
