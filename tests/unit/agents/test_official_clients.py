"""The official packages are the oracle: what they read from the endpoint, and what is trained, is as in process."""

import asyncio
from typing import Any

import pytest
from gguf import GGUFReader
from transformers import PreTrainedTokenizerFast

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_manager import ServerManager, StickyRoute
from atroposlib.testing.tiny_tokenizer import CHATML
from example_trainer.quickstart_model import build_tokenizer, packaged_gguf
from tests.unit.agents.official_clients import AGAIN, AGENTS, ASKED, FOUND, FUNCTION, LIMIT, SYSTEM
from tests.unit.agents.support import CALL, running

LONG = "Cats' naïveté: 1,234 of them – " * 24


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """SmolLM2's own tokenizer, from the package of its weights."""
    fields = {name: field.contents() for name, field in GGUFReader(packaged_gguf()).fields.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(fields), eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def answer(prompt: str) -> str:
    if AGAIN in prompt:
        return "<think>\nthe other cat\n</think>\n\n  Quite sure."
    return f"Hm.</think> Two. {LONG}" if FOUND in prompt else f"<think>search</think>\n{CALL}"


async def in_process(manager: ServerManager, tokenizer: Any) -> list[dict[str, Any]]:
    """The sequences of the same conversation, by calls of ManagedServer itself."""
    managed = ManagedServer(StickyRoute(manager, manager.servers), tokenizer, tool_parser="hermes")
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
async def test_each_client_trains_the_same_tokens_as_the_server_in_process(
    agent: str, stream: bool, smollm2: Any
) -> None:
    async with running(answer, tokenizer=smollm2) as started:
        session, key = await started.session()
        ask = AGENTS[agent]
        if agent.endswith("async"):
            said = await ask(started.url, key, stream)
        else:
            said = await asyncio.to_thread(ask, started.url, key, stream)
        nodes = await started.nodes(session)
        expected = await in_process(started.manager, smollm2)
    assert said.endswith("Quite sure.")
    assert len(nodes) == 1
    assert [node["tokens"] for node in nodes] == [node["tokens"] for node in expected]
    assert nodes == [json_form(node) for node in expected]
    assert sum(token != -100 for token in nodes[0]["masked_tokens"]) > 417  # 5,000 over the twelve


def json_form(node: dict[str, Any]) -> dict[str, Any]:
    """A node as JSON gives it back: lists for tuples."""
    return node | {"settings": [list(each) for each in node["settings"]]}
