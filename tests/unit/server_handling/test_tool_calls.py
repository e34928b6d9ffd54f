import json

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager, StickyRoute
from atroposlib.envs.server_handling.tool_call_translator import PARSERS, ToolCallTranslator
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
CALL = '<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>'


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", CALL, None, [("search", {"query": "cats"})]),
        ("hermes", f"Let me see.\n{CALL}\n{CALL}", "Let me see.", [("search", {"query": "cats"})] * 2),
        ("hermes", CALL.removesuffix("</tool_call>"), None, [("search", {"query": "cats"})]),
        ("hermes", "<tool_call>{search}</tool_call>", "<tool_call>{search}</tool_call>", []),
        (
            "llama3_json",
            '<|python_tag|>{"name": "a", "parameters": {"x": 1}}; {"name": "b"}',
            None,
            [("a", {"x": 1}), ("b", {})],
        ),
        ("llama3_json", "I need no tool.", "I need no tool.", []),
        ("mistral", 'Well. [TOOL_CALLS] [{"name": "a", "arguments": {}}]', "Well.", [("a", {})]),
    ],
)
def test_calls_are_found_in_what_models_write(
    parser: str, text: str, content: str | None, calls: list[tuple[str, object]]
) -> None:
    found_content, found, reason = ToolCallTranslator(TOKENIZER, parser).parse_model_output(text, tools=TOOLS)
    assert found_content == content
    assert reason == ("tool_calls" if calls else "stop")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found or []] == calls


def test_every_parser_leaves_plain_text_alone() -> None:
    for parser in PARSERS:
        assert ToolCallTranslator(TOKENIZER, parser).parse_model_output("plain", tools=TOOLS) == ("plain", None, "stop")


async def test_conversation_with_a_tool_is_one_node_trained_on_what_was_sampled() -> None:
    async with FakeInferenceServer(
        lambda prompt: "Two cats." if "tool\n" in prompt else f"Hm. {CALL}", TOKENIZER
    ) as server:
        manager = ServerManager([APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="fake")])
        managed = ManagedServer(StickyRoute(manager, manager.servers), TOKENIZER, tool_parser="hermes")
        messages: list[dict[str, object]] = [{"role": "user", "content": "How many?"}]
        asked = (await managed.chat_completion(messages=messages, tools=TOOLS, max_tokens=200)).choices[0]
        assert asked.finish_reason == "tool_calls"
        assert asked.message.tool_calls is not None
        assert asked.message.content == "Hm."
        assert asked.message.tool_calls[0]["function"]["name"] == "search"  # type: ignore[index]
        messages += [asked.message.model_dump(exclude_none=True), {"role": "tool", "content": "2"}]
        told = (await managed.chat_completion(messages=messages, tools=TOOLS, max_tokens=200)).choices[0]
        cut = (
            await managed.chat_completion(
                messages=messages[:1], tools=TOOLS, max_tokens=len(TOKENIZER.encode(f"Hm. {CALL}"))
            )
        ).choices[0]
        await manager.close()
    assert told.finish_reason == "stop"
    assert told.message.content == "Two cats."
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls
    node = managed.current_nodes[0]
    assert (
        TOKENIZER.decode([token for token in node.masked_tokens if token != -100])
        == f"Hm. {CALL}<|im_end|>Two cats.<|im_end|>"
    )
