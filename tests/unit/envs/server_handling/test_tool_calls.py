import contextlib
import json
import sys
from collections.abc import AsyncIterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from atroposlib.envs.server_handling import tool_call_parsers
from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager, StickyRoute
from atroposlib.envs.server_handling.tool_call_parsers import check_tool_parser, tool_call_parser
from atroposlib.envs.server_handling.tool_call_translator import PARSERS, ToolCallTranslator, unread_calls
from atroposlib.extras import MissingExtra
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from tests.serving import serving

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
        (
            "hermes",
            '<tool_call>{"name": "write", "arguments": {"text": "a </tool_call> and a <tool_call> in it"}}</tool_call>',
            None,
            [("write", {"text": "a </tool_call> and a <tool_call> in it"})],
        ),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [("now", {})]),
        ("hermes", '<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>', None, [("a", {}), ("b", {})]),
        ("hermes", f"{CALL}<tool_call>{{cut", None, [("search", {"query": "cats"})]),
        ("hermes", f"<tool_call>{{bad}}</tool_call>{CALL}", None, [("search", {"query": "cats"})]),
        ("llama3_json", '{"name": "Bob", "age": 7}', '{"name": "Bob", "age": 7}', []),
        ("llama3_json", '{"name": "a", "parameters": null}', None, [("a", {})]),
        ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"x": "]"}}]', None, [("a", {"x": "]"})]),
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


@pytest.mark.parametrize(
    ("text", "unread"),
    [(CALL, 0), ("none", 0), (f"{CALL}<tool_call>{{cut", 1), (f"<tool_call>x</tool_call>{CALL}<tool_call>", 2)],
)
def test_marked_calls_that_cannot_be_read_are_counted(text: str, unread: int) -> None:
    assert unread_calls(text) == unread


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


def hermes_route(seen: list[Any]) -> Any:
    """Stands in for vLLM's parser at its route."""

    async def parse(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body)
        if body["parser"] == "wrong":
            return web.json_response({"error": {"message": "no parser 'wrong'"}}, status=400)
        return web.json_response(
            {"parser": "x", "content": "Hm.", "calls": [{"name": "search", "arguments": '{"query": "dogs"}'}]}
        )

    return parse


@contextlib.asynccontextmanager
async def parsing_server(seen: list[Any], answer: str) -> AsyncIterator[ServerManager]:
    """A fake inference server that has the route, too."""
    async with FakeInferenceServer(lambda prompt: answer, TOKENIZER) as fake:

        async def relay(request: web.Request) -> web.Response:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    request.method, fake.base_url.removesuffix("/v1") + request.path, data=await request.read()
                ) as reply,
            ):
                return web.Response(body=await reply.read(), content_type="application/json")

        routes = [web.post("/v1/tool_calls/parse", hermes_route(seen)), web.route("*", "/{path:.*}", relay)]
        async with serving(routes) as url:
            manager = ServerManager([APIServerConfig(server_type="vllm", base_url=f"{url}/v1", model_name="fake")])
            try:
                yield manager
            finally:
                await manager.close()


@pytest.mark.parametrize("name", ["vllm", "vllm:qwen3_coder"])
async def test_vllms_parser_is_asked_with_what_follows_the_thoughts_and_the_tokens_stay(name: str) -> None:
    seen: list[Any] = []
    async with parsing_server(seen, "I could <tool_call>. </think>Hm. [search]") as manager:
        manager.tool_parser = name
        async with manager.managed_server(tokenizer=TOKENIZER) as managed:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "How many?"}]
            message = (await managed.chat_completion(messages=messages, tools=TOOLS, max_tokens=99)).choices[0].message
            messages += [message.model_dump(exclude_none=True), {"role": "tool", "content": "2"}]
            await managed.chat_completion(messages=messages, tools=TOOLS, max_tokens=99)
            nodes = managed.get_state()["nodes"]
    assert seen[0] == {"text": "Hm. [search]", "tools": TOOLS, "parser": name.partition(":")[2] or None}
    assert message.content == "I could <tool_call>. </think>Hm."
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("search", '{"query": "dogs"}')
    ]
    assert len(nodes) == 1
    assert nodes[0].full_text.count("I could <tool_call>. </think>Hm. [search]") == 2


async def test_what_vllms_parser_refuses_and_a_server_without_it_are_errors_of_the_server() -> None:
    async with parsing_server([], "Hm.") as manager:
        with pytest.raises(PermanentServerError, match="no parser 'wrong'"):
            await manager.parse_tool_calls(text="Hm.", tools=TOOLS, parser="wrong")
    for kind in ("openai", "sglang"):
        config = APIServerConfig(server_type=kind, base_url="http://127.0.0.1:9/v1", health_check=False)
        manager = ServerManager([config])
        with pytest.raises(NotImplementedError, match="tool_parser 'vllm' needs server_type 'vllm'"):
            await manager.servers[0].request_tool_calls("Hm.", TOOLS, None)
        await manager.close()


async def test_calls_in_thoughts_are_not_made() -> None:
    async with FakeInferenceServer(lambda prompt: f"{CALL} or not?</think>{CALL}", TOKENIZER) as server:
        manager = ServerManager([APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="fake")])
        manager.tool_parser = "hermes"
        async with manager.managed_server(tokenizer=TOKENIZER) as managed:
            reply = await managed.chat_completion(
                messages=[{"role": "user", "content": "?"}], tools=TOOLS, max_tokens=300
            )
        await manager.close()
    assert len(reply.choices[0].message.tool_calls) == 1
    assert reply.choices[0].message.content == f"{CALL} or not?</think>"


async def test_prompt_length_is_that_of_the_prompt_that_is_sent() -> None:
    async with FakeInferenceServer(lambda prompt: CALL, TOKENIZER) as server:
        manager = ServerManager([APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="fake")])
        manager.tool_parser = "hermes"
        async with manager.managed_server(tokenizer=TOKENIZER) as managed:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "How many?"}]
            for _ in range(2):
                expected = managed.prompt_length(messages, TOOLS)
                reply = await managed.chat_completion(messages=messages, tools=TOOLS, max_tokens=200)
                assert (
                    reply.usage.prompt_tokens == expected == len(server.requests[-1][1]["prompt"]["prompt_token_ids"])
                )
                message = reply.choices[0].message.model_dump(exclude_none=True)
                messages += [message, {"role": "tool", "content": "2"}]
        await manager.close()


@pytest.mark.parametrize("name", ["hermess", "vllm:", "vlm:hermes", "renderers:", ""])
def test_a_parser_that_there_is_not_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not known.*hermes, .*vllm:NAME, renderers, renderers:NAME"):
        check_tool_parser(name)


class ParsedByRenderers(SimpleNamespace):
    """The `Renderer` of the package, as version 0.1.12 has it."""

    def parse_response(self, token_ids: list[int], *, tools: list[Any]) -> Any:
        self.seen.append((token_ids, tools))
        call = SimpleNamespace(name="search", arguments={"query": "dogs"}, status="ok")
        broken = SimpleNamespace(name=None, arguments=None, status="invalid_json")
        return SimpleNamespace(content="Hm.", reasoning_content="So", tool_calls=[call, broken])


async def test_renderers_parses_the_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    made: list[Any] = []

    def create_renderer(tokenizer: Any, config: Any) -> ParsedByRenderers:
        made.append(config)
        return ParsedByRenderers(seen=seen)

    module = ModuleType("renderers")
    module.__spec__ = ModuleSpec("renderers", None)
    module.RendererConfig, module.create_renderer = dict[str, str], create_renderer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "renderers", module)
    parse = tool_call_parser("renderers:qwen3", TOKENIZER, None)  # type: ignore[arg-type]
    assert await parse("So</think>Hm.[search]", [1, 2], TOOLS, "train") == (
        "So</think>Hm.",
        [("search", {"query": "dogs"})],
    )
    assert seen == [([1, 2], [TOOLS[0]["function"]])]
    tool_call_parser("renderers", TOKENIZER, None)  # type: ignore[arg-type]
    assert made == [{"name": "qwen3"}, None]


def test_without_the_package_renderers_its_parsers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_call_parsers, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="needs the package renderers; pip install"):
        tool_call_parser("renderers", TOKENIZER, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("answers_itself", [True, False])
async def test_a_server_of_text_is_given_the_tools_and_its_calls_are_found(answers_itself: bool) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"query": "cats"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    seen: list[Any] = []

    async def chat(request: web.Request) -> web.Response:
        seen.append(await request.json())
        shown = message if answers_itself else {"role": "assistant", "content": f"Hm.</think>{CALL}"}
        choice = {"index": 0, "finish_reason": "stop", "message": shown}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    async with serving([web.post("/v1/chat/completions", chat)]) as url:
        manager = ServerManager([APIServerConfig(server_type="openai", base_url=f"{url}/v1", health_check=False)])
        manager.tool_parser, manager.allows_text_only = "hermes", True
        async with manager.managed_server() as managed:
            reply = await managed.chat_completion(messages=[{"role": "user", "content": "?"}, message], tools=TOOLS)
            assert managed.get_state()["nodes"][0].metadata["dummy_tokens"]
        await manager.close()
    assert seen[0]["tools"] == TOOLS
    assert [each.function.arguments for each in reply.choices[0].message.tool_calls] == ['{"query": "cats"}']
    assert reply.choices[0].message.content == (None if answers_itself else "Hm.</think>")
