"""An endpoint before a fake inference server."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from atroposlib.agents.endpoint import EndpointSettings
from atroposlib.agents.serve import Listening, listening
from atroposlib.agents.sessions import Sessions
from atroposlib.agents.turn_journal import TurnJournal
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer([("a", "t"), ("e", "r"), ("t", "h")])
CALL = '<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}


@dataclass
class Running:
    """The endpoint, what is behind it, and a client for its own routes."""

    endpoint: Listening
    server: FakeInferenceServer
    manager: ServerManager
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return self.endpoint.url

    async def session(self, **settings: Any) -> tuple[str, str]:
        """(id, key) of a new session."""
        reply = await self.http.post("/sessions", json={"settings": settings})
        assert reply.status_code == 201, reply.text
        return reply.json()["id"], reply.json()["key"]

    async def nodes(self, session: str) -> list[dict[str, Any]]:
        """The session's sequences."""
        nodes: list[dict[str, Any]] = (await self.http.get(f"/sessions/{session}/nodes")).json()["nodes"]
        return nodes

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """A request for a body of JSON, or of text as it is."""
        given: dict[str, Any] = {"content": body} if isinstance(body, str) else {"json": body}
        return await self.http.post(path, headers={name.replace("_", "-"): v for name, v in headers.items()}, **given)


@contextlib.asynccontextmanager
async def running(
    answer: Callable[[str], str] = lambda prompt: "yes",
    journal: Path | None = None,
    context: int | None = None,
    tokenizer: Any = TOKENIZER,
    **settings: Any,
) -> AsyncIterator[Running]:
    """An endpoint in this event loop; with `journal` it restores what is in there."""
    async with FakeInferenceServer(answer, tokenizer, policy_version=3) as server:
        manager = ServerManager([APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="fake")])
        with contextlib.closing(TurnJournal(journal)) if journal else contextlib.nullcontext() as kept:
            sessions = Sessions(manager, tokenizer, kept, context)
            async with (
                contextlib.aclosing(manager),
                listening(sessions, EndpointSettings(model="fake", **settings)) as endpoint,
                httpx.AsyncClient(base_url=endpoint.url, trust_env=False) as http,
            ):
                yield Running(endpoint, server, manager, http)
