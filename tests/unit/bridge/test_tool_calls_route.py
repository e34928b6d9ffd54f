"""The route that runs vLLM's own tool parsers on a text: vLLM's classes in this process, over a fake engine."""

import json
import threading
import time
from typing import Any

import httpx
import pytest

from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from tests.unit.bridge.fake_engine import FakeEngine, serving
from vllm_patching import compat

ROUTE = "/v1/tool_calls/parse"
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}, "most": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}]
HERMES = 'Let me see. <tool_call>{"name": "search", "arguments": {"query": "cats", "most": 2}}</tool_call>'


class Engine(FakeEngine):
    """With the tokenizer that vLLM's client of its engine has."""

    def get_tokenizer(self) -> Any:
        return make_tiny_tokenizer()


async def parsed(client: httpx.AsyncClient, said: str, **fields: Any) -> httpx.Response:
    return await client.post(ROUTE, json={"text": said, "tools": TOOLS} | fields)


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("hermes", HERMES, "Let me see. "),
        ("pythonic", '[search(query="cats", most=2)]', None),
        (
            "qwen3_coder",
            "<tool_call>\n<function=search>\n<parameter=query>\ncats\n</parameter>\n<parameter=most>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
            None,
        ),
    ],
)
async def test_vllms_own_parsers_find_the_calls(parser: str, text: str, content: str | None) -> None:
    async with serving(Engine(1)) as client:
        found = (await parsed(client, text, parser=parser)).json()
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"]] == [
        ("search", {"query": "cats", "most": 2})
    ]
    assert (found["parser"], found["content"]) == (parser, content)


async def test_without_a_name_it_is_the_servers_own_parser() -> None:
    async with serving(Engine(1), tool_call_parser="hermes") as client:
        found = (await parsed(client, HERMES)).json()
    assert (found["parser"], len(found["calls"])) == ("hermes", 1)
    async with serving(Engine(1)) as client:
        refused = await parsed(client, HERMES)
    assert refused.status_code == 400
    assert "start the server with --tool-call-parser" in refused.json()["error"]["message"]


async def test_text_without_a_call_and_a_broken_call_are_content() -> None:
    async with serving(Engine(1), tool_call_parser="hermes") as client:
        for text in ("No tool is needed.", "<tool_call>{search}</tool_call>", ""):
            found = (await parsed(client, text)).json()
            assert (found["content"], found["calls"]) == (text, [])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"parser": "hermess"}, "'hermess' is not one of vLLM's: "),
        ({"parser": "mistral"}, "tool parser mistral: "),  # needs a token that this tokenizer lacks
        ({"parser": "a\nb"}, "parser="),
        ({"tools": [{"type": "function"}]}, "tool parser hermes: "),
        ({"tools": 3}, "tools=3"),
        ({"text": None}, "text=None"),
        ({"text": "x" * 1_000_001}, "text="),
        ({"temperature": 1}, "missing or unknown fields"),
    ],
)
async def test_what_cannot_be_parsed_is_refused_in_one_line(fields: dict[str, Any], reason: str) -> None:
    async with serving(Engine(1), tool_call_parser="hermes") as client:
        reply = await parsed(client, HERMES, **fields)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400, message
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    ["<tool_call>" * 20_000, HERMES * 2_000, "<tool_call>" + "[" * 100_000, "[" * 100_000, "search(" * 50_000],
    ids=["opened", "thousands", "deep", "brackets", "parentheses"],
)
@pytest.mark.parametrize("parser", ["hermes", "pythonic"])
async def test_hostile_texts_are_answered(parser: str, text: str) -> None:
    async with serving(Engine(1), tool_call_parser=parser) as client:
        reply = await parsed(client, text)
    assert reply.status_code in (200, 400, 422)


async def test_a_parser_that_takes_too_long_holds_up_neither_the_server_nor_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    monkeypatch.setattr(compat, "parse_tool_calls", lambda *arguments: release.wait(60) and (None, []))
    async with serving(Engine(1), tool_call_parser="hermes") as client:
        client._transport.app.state.tool_calls._time_limit_s = 0.05  # type: ignore[attr-defined]
        started = time.monotonic()
        reply = await parsed(client, HERMES)
        assert (reply.status_code, time.monotonic() - started < 10) == (422, True)
        assert "took longer than 0.05 s on 96 characters" in reply.json()["error"]["message"]
        release.set()


async def test_a_closed_gate_does_not_hold_up_parsing() -> None:
    async with serving(Engine(1), tool_call_parser="hermes") as client:
        client._transport.app.state.gate.close("weights", "half updated")  # type: ignore[attr-defined]
        assert (await parsed(client, HERMES)).status_code == 200
