"""How long requests take and how often they are tried, over the most recent ones."""

from collections import deque

import numpy as np


class RequestStats:
    """Durations (s) and attempts of the last `size` finished calls; `summary` hands them over and starts anew."""

    def __init__(self, size: int) -> None:
        self._durations: deque[float] = deque(maxlen=size)
        self._attempts: deque[int] = deque(maxlen=size)

    def record(self, duration_s: float, attempts: int) -> None:
        """Note a call that succeeded at its `attempts`-th try, which took `duration_s`."""
        self._durations.append(duration_s)
        self._attempts.append(attempts)

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Durations and attempts since the last `take`, oldest first."""
        taken = np.asarray(self._durations, dtype=float), np.asarray(self._attempts, dtype=float)
        self._durations.clear()
        self._attempts.clear()
        return taken
