"""A ManagedServer that lives in a proxy (`managed_server_proxy.py`): the same calls, over HTTP."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import aiohttp
from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.clients.bearer import bearer
from atroposlib.clients.replies import BoundedResponse, at_most, limit_of_sampling
from atroposlib.envs.server_handling.openai_server import replied
from atroposlib.envs.server_handling.sequences.sampling_ledger import SampledLedger
from atroposlib.envs.server_handling.sequences.sequence_book import SequenceNode, State

REQUEST_TIMEOUT_S = 1200.0
NODES_BYTES = 256 << 20  # the sequences of a session, its prompts included


class ProxyManagedServer(AbstractAsyncContextManager["ProxyManagedServer"]):
    """One session of the proxy. `get_state` is current after every call: the nodes are fetched with each reply."""

    def __init__(self, proxy_url: str, session_uuid: str, model_name: str = "default", token: str = "") -> None:
        self.proxy_url = proxy_url.rstrip("/")
        self.session_uuid = session_uuid
        self.model_name = model_name
        self._headers = bearer(token, f"the token of {proxy_url}")
        self._nodes: list[SequenceNode] = []
        self.ledger: SampledLedger | None = None  # where the nodes are noted, too

    def get_url(self) -> str:
        """Address for an OpenAI client that is to talk to this session."""
        return f"{self.proxy_url}/{self.session_uuid}/v1"

    @property
    def current_nodes(self) -> list[SequenceNode]:
        """The nodes so far."""
        return self._nodes

    def get_state(self) -> State:
        """Return what `ManagedServer.get_state` does; calls by others, through `get_url`, show after `fetch_state`."""
        return {"nodes": self._nodes}

    async def fetch_state(self) -> State:
        """Ask the proxy for the nodes."""
        reply = await request(f"{self.proxy_url}/{self.session_uuid}/nodes", "GET", None, self._headers)
        self._nodes = [SequenceNode.model_validate(node) for node in reply["nodes"]]
        if self.ledger is not None:
            for node in self._nodes:
                node.note_in(self.ledger)
        return self.get_state()

    async def chat_completion(
        self, *, messages: Sequence[Mapping[str, object]], split: str = "train", **arguments: object
    ) -> ChatCompletion:
        """Complete a chat as `ManagedServer.chat_completion` does, with every sampling parameter."""
        reply = await request(
            f"{self.get_url()}/chat/completions",
            "POST",
            {key: value for key, value in arguments.items() if value is not None} | {"messages": list(messages)},
            self._headers,
        )
        await self.fetch_state()
        return ChatCompletion.model_validate(reply)

    def prompt_length(self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None) -> None:
        """Not known: the proxy renders the prompt."""

    async def completion(self, **arguments: object) -> Completion:
        """The proxy speaks chat only."""
        raise NotImplementedError("a managed proxy has no text completions; use chat_completion")

    def reset(self) -> None:
        """Forget the nodes here; `cleanup` ends the session."""
        self._nodes = []

    async def cleanup(self) -> None:
        """End the session."""
        await request(f"{self.proxy_url}/{self.session_uuid}", "DELETE", None, self._headers)
        self.reset()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cleanup()


async def create_proxy_session(
    proxy_url: str,
    base_url: str | None = None,
    tool_parser: str | None = "hermes",
    track_tree: bool = False,
    preserve_think_blocks: bool = False,
    token: str = "",
) -> ProxyManagedServer:
    """A new session of the proxy at `proxy_url`."""
    reply = await request(
        f"{proxy_url.rstrip('/')}/sessions/create",
        "POST",
        {
            "tool_parser": tool_parser,
            "track_tree": track_tree,
            "base_url": base_url,
            "preserve_think_blocks": preserve_think_blocks,
        },
        bearer(token, f"the token of {proxy_url}"),
    )
    return ProxyManagedServer(proxy_url, reply["uuid"], reply["model_name"], token)


async def request(url: str, method: str, body: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """One JSON request. Raises a ServerError for what is not 200, and for more than was asked for."""
    limit_s = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    with at_most(limit_of_sampling(body) if body and "messages" in body else NODES_BYTES):
        async with (
            aiohttp.ClientSession(trust_env=False, timeout=limit_s, response_class=BoundedResponse) as session,
            replied(session, method, url, json=body, headers=headers) as reply,
        ):
            content: dict[str, object] = await reply.json()
            return content
