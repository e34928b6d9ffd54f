"""Which vLLM servers a run feeds, of which some join or leave while it goes on.

    the API lists one as joining ──▶ the bridge admits it ──sync──▶ it has the trainer's words ──▶ reported as serving
    the API lists one as leaving ──▶ the bridge releases it

A server that cannot join is reported as left, with the reason in the log; the run continues without it.
"""

from atroposlib.addresses import server_address
from atroposlib.logs import get_logger
from example_trainer.bridges import BridgeError, WeightBridge
from example_trainer.loop.api_client import ApiClient
from example_trainer.loop.timeline import Timeline

log = get_logger(__name__)


class Membership:
    """The servers of one run. Its methods raise ApiError where the API does not answer."""

    def __init__(self, api: ApiClient, bridge: WeightBridge, timeline: Timeline) -> None:
        self._api, self._bridge, self._timeline = api, bridge, timeline
        self._serving: set[str] = set()  # addresses that are reported so
        self._kept: set[str] = set()  # of servers that are to leave, and cannot be spared

    def follow(self) -> None:
        """Before a sync: do what the API lists."""
        for url, state in self._api.servers().items():
            try:
                if state == "joining":
                    self._serving.discard(url)
                    self._bridge.admit(url)
                elif state != "serving" and url not in self._kept:
                    self._bridge.release(url, gone=state == "left")
                    self._forget(url)
            except BridgeError as error:
                if state == "joining":
                    log.warning("The vLLM server at %s cannot join, and is reported as left: %s", url, error)
                    self._api.change_server(url, "left")
                else:
                    log.warning("The vLLM server at %s is to leave, and stays in use: %s", url, error)
                    self._kept.add(url)

    def report(self) -> None:
        """After a sync: a server that joined serves from now on."""
        for client in self._bridge.joined():
            if (url := server_address(client.url)) in self._serving:
                continue
            log.info("The vLLM server at %s has the policy, and serves", url)
            self._api.change_server(url, "serving")
            self._forget(url)
            self._serving.add(url)
            self._timeline.clients.append(client)

    def _forget(self, url: str) -> None:
        self._serving.discard(url)
        self._timeline.clients = [client for client in self._timeline.clients if server_address(client.url) != url]
