"""The official packages are the oracle: what they read from the endpoint, and what is trained, is as in process."""

import asyncio
from typing import Any

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_manager import ServerManager, StickyRoute
from tests.unit.agents.official_clients import AGAIN, AGENTS, ASKED, FOUND, FUNCTION, LIMIT, SYSTEM
from tests.unit.agents.support import CALL, TOKENIZER, running


def answer(prompt: str) -> str:
    if AGAIN in prompt:
        return "<think>\nthe other cat\n</think>\n\n  Quite sure."
    return "Hm.</think> Two." if FOUND in prompt else f"<think>search</think>\n{CALL}"


async def in_process(manager: ServerManager) -> list[dict[str, Any]]:
    """The sequences of the same conversation, by calls of ManagedServer itself."""
    managed = ManagedServer(StickyRoute(manager, manager.servers), TOKENIZER, tool_parser="hermes")
    tools = [{"type": "function", "function": FUNCTION}]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    for more in ({"role": "tool", "content": FOUND}, {"role": "user", "content": AGAIN}, None):
        reply = await managed.chat_completion(
            messages=messages, tools=tools, max_tokens=LIMIT, temperature=1.0, top_p=1.0
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if more is not None:
            calls = message.tool_calls or []
            messages.append({**more, "tool_call_id": calls[0].id} if calls else more)
    return [node.model_dump() for node in managed.current_nodes]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("agent", AGENTS)
async def test_each_client_trains_the_same_tokens_as_the_server_in_process(agent: str, stream: bool) -> None:
    async with running(answer) as started:
        session, key = await started.session()
        ask = AGENTS[agent]
        if agent.endswith("async"):
            said = await ask(started.url, key, stream)
        else:
            said = await asyncio.to_thread(ask, started.url, key, stream)
        nodes = await started.nodes(session)
        expected = await in_process(started.manager)
    assert said.endswith("Quite sure.")
    assert len(nodes) == 1
    assert [node["tokens"] for node in nodes] == [node["tokens"] for node in expected]
    assert nodes == [json_form(node) for node in expected]
    assert sum(token != -100 for token in nodes[0]["masked_tokens"]) > 60


def json_form(node: dict[str, Any]) -> dict[str, Any]:
    """A node as JSON gives it back: lists for tuples."""
    return node | {"settings": [list(each) for each in node["settings"]]}
