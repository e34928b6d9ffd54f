"""What an environment asks of the agent endpoint, over HTTP: sessions, their sequences, and their end.

Each request waits while the endpoint is away, and may arrive twice: the second time it finds what the first one did.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from atroposlib.clients.bearer import bearer
from atroposlib.clients.waiting import NotYet
from atroposlib.envs.limits.time_limit import paused
from atroposlib.envs.limits.waits import wait_for_peer
from atroposlib.envs.server_handling.errors import PermanentServerError, ServerError
from atroposlib.envs.server_handling.proxy_client import request
from atroposlib.envs.server_handling.sequences.sequence_book import SequenceNode
from atroposlib.type_definitions import Messages

REMEDY = "start it with `atropos agent-endpoint`, or correct --env.agent_endpoint"


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session of the endpoint; `key` opens its calls of the model."""

    id: str
    key: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """What became of a session: why it failed if it did, its calls, its last conversation and its sequences."""

    failed: str | None
    turns: int
    messages: Messages
    nodes: list[SequenceNode]


class EndpointClient:
    """The endpoint at `url`, whose `token` opens everything. Each method raises PeerError where it does not answer
    within `timeout_s` seconds, and PermanentServerError where it refuses.
    """

    def __init__(self, url: str, token: str = "", timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._headers = bearer(token, f"the token of {url}")
        self._timeout_s = timeout_s

    async def process(self) -> str:
        """The id of the endpoint's process: another one after a restart."""
        return str((await self._asked("GET", "/health"))["process"])

    async def open(self, settings: Mapping[str, object], identity: str | None = None) -> OpenSession:
        """A new session, or the one of this id that has not ended."""
        body = {"settings": settings, **({"id": identity, "reopen": True} if identity else {})}
        made = await self._asked("POST", "/sessions", body)
        return OpenSession(made["id"], made["key"])

    async def state(self, session: OpenSession) -> SessionState:
        """The session with its sequences."""
        found = await self._asked("GET", f"/sessions/{session.id}/nodes")
        nodes = [SequenceNode.model_validate(node) for node in found["nodes"]]
        return SessionState(found["failed"], found["turns"], found["messages"], nodes)

    async def unended(self, prefix: str) -> list[str]:
        """The ids that begin with `prefix`, of sessions without a parent that have not ended."""
        found = (await self._asked("GET", "/sessions"))["sessions"]
        return [each["id"] for each in found if each["parent"] is None and each["id"].startswith(prefix)]

    async def end(self, identities: Iterable[str]) -> None:
        """Have the endpoint forget these sessions, all at once: a group is never left with some of its own."""
        if query := urlencode([("id", each) for each in identities]):
            await self._asked("DELETE", f"/sessions?{query}")

    async def _asked(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        async def attempt() -> dict[str, Any]:
            try:
                return await request(f"{self.url}{path}", method, body, self._headers)
            except PermanentServerError:
                raise
            except ServerError as error:
                raise NotYet(str(error)) from error

        with paused():  # the rollout is not slow: the endpoint is away
            return await wait_for_peer(
                "answer of the agent endpoint", self.url, attempt, timeout_s=self._timeout_s, remedy=REMEDY
            )
