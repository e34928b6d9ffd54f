"""Heartbeats from a thread of the trainer, so that its lease or session outlives a long step."""

import threading
from collections.abc import Callable

from atroposlib.logs import get_logger

log = get_logger(__name__)


class Heartbeat:
    """Calls `beat` every `interval_s` seconds, from `start` to `stop`.

    A beat that raises `failure` is logged and `lost` holds the reason until one succeeds. Any other error ends the
    thread, since it is a bug.
    """

    def __init__(
        self,
        peer: str,
        beat: Callable[[], object],
        interval_s: float,
        failure: type[Exception] | tuple[type[Exception], ...],
    ) -> None:
        self.lost: str | None = None
        self._peer = peer
        self._beat = beat
        self._interval_s = interval_s
        self._failure = failure
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """End; wait for a beat that is under way, at most `timeout_s` seconds."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._beat()
            except self._failure as error:
                if self.lost is None and not self._ended.is_set():
                    log.warning("Heartbeat to %s failed: %s", self._peer, error)
                self.lost = str(error)
            else:
                self.lost = None
