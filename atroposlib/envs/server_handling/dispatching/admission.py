"""How many requests one server may have in flight, scaled by the environment's weight."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.dispatching.throttle import Throttle


class AdmissionGate:
    """Counts requests in flight: at most ceil(weight * capacity), and none while `throttle` is closed. Listeners hear
    of every slot that may have become free.

    For one event loop: nothing here awaits, so every change is atomic.
    """

    def __init__(self, capacity: int, throttle: "Throttle | None" = None) -> None:
        self._capacity = capacity
        self._throttle = throttle
        if throttle is not None:
            throttle.listeners.append(self._notify)
        self._weight = 1.0
        self.in_use = 0
        self.listeners: list[Callable[[], None]] = []

    @property
    def limit(self) -> int:
        """Slots at the current weight; the rounding absorbs float noise (0.1 * 30 is 3 slots, not 4)."""
        return math.ceil(round(self._capacity * self._weight, 6))

    @property
    def free(self) -> int:
        """Slots that may be taken now; 0 while a lowered weight leaves more in flight than the limit."""
        if self._throttle is not None and not self._throttle.is_open:
            return 0
        return max(0, self.limit - self.in_use)

    def take(self) -> None:
        """Occupy a slot. Raises RuntimeError when none is free: ask `free` first."""
        if self.free == 0:
            raise RuntimeError(f"all {self.limit} slots are taken")
        self.in_use += 1

    def give_back(self) -> None:
        """Free a slot and tell the listeners."""
        self.in_use -= 1
        self._notify()

    def set_weight(self, weight: float) -> None:
        """Scale the limit; raising it lets waiting calls in at once. Raises ValueError outside 0..1."""
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"weight {weight} is outside 0..1")
        self._weight = weight
        self._notify()

    def _notify(self) -> None:
        for listener in self.listeners:
            listener()
