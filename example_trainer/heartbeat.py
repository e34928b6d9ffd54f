"""Signs of life to the batching API while a step takes long, so that the batches of a living trainer are not given to
another.
"""

import threading
from collections.abc import Callable

INTERVAL_S = 15.0


class Heartbeat:
    """Calls `beat` every `interval_s` seconds from a thread of its own, from `start` to `stop`; `beat` raises
    nothing.
    """

    def __init__(self, beat: Callable[[], None], interval_s: float = INTERVAL_S) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, at once unless a beat is under way."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._beat()
