"""Signs of life from a trainer to a vLLM server, in a thread, so that its session outlives long steps."""

import threading
from collections.abc import Callable

from atroposlib.logs import get_logger
from example_trainer.bridges.base import BridgeError

log = get_logger(__name__)


class Heartbeat:
    """Calls `beat` every `every_s` seconds until `stop`; `lost` says why the last call failed, None if it did not."""

    def __init__(self, beat: Callable[[], object], every_s: float) -> None:
        self.lost: str | None = None
        self._beat = beat
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="BridgeHeartbeat", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopped.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._beat()
            except BridgeError as error:
                self.lost = str(error)
                if not self._stopped.is_set():
                    log.warning("[Bridge] Heartbeat failed: %s", error)
            else:
                self.lost = None
