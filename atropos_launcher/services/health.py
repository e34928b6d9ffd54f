"""Whether a service is up: its health address answers 200."""

import http.client
import threading
from contextlib import closing, suppress
from urllib.parse import urlsplit

TIMEOUT_S = 3.0
POLL_S = 0.3


def answers(url: str) -> bool:
    """One GET, without proxies."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=TIMEOUT_S)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", address.path or "/")
        return connection.getresponse().status == http.client.OK
    return False


class HealthWatch:
    """Asks until the first 200, in a thread of its own, so that a mute service does not keep the supervisor."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._up = threading.Event()
        self._stop = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()

    def _ask(self) -> None:
        while not self._stop.is_set():
            if answers(self.url):
                self._up.set()
                return
            self._stop.wait(POLL_S)
