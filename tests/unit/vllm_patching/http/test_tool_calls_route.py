"""The route that runs vLLM's own tool parsers on a text: vLLM's classes in this process, over a fake engine."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from atroposlib.child_processes.lines import ChildRefused
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from tests.unit.vllm_patching.fake_engine import FakeEngine, serving
from vllm_patching.compat import vllm_engine, vllm_server
from vllm_patching.http.grammars import GrammarCheck
from vllm_patching.http.limited_work import LimitedWork
from vllm_patching.http.tool_calls import LONGEST_SUPERLINEAR, SUPERLINEAR, ToolCallParsing

ROUTE = "/v1/tool_calls/parse"
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}, "most": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}]
HERMES = 'Let me see. <tool_call>{"name": "search", "arguments": {"query": "cats", "most": 2}}</tool_call>'


class InProcess(LimitedWork):
    """Without the process: what the child answers, here."""

    async def ask(self, do: str, lane: str, limit_s: float, **content: Any) -> dict[str, Any]:
        try:
            found, calls = vllm_server.parse_tool_calls(
                make_tiny_tokenizer(), content["parser"], content["text"], content["tools"]
            )
        except Exception as error:  # a parser's own
            raise ChildRefused(f"{type(error).__name__}: {error}", is_wrong=True) from error
        return {"content": found, "calls": calls}


@contextlib.asynccontextmanager
async def parsing(tool_call_parser: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(FakeEngine(1)) as client:
        state = client._transport.app.state  # type: ignore[attr-defined]
        state.tool_calls = ToolCallParsing(InProcess({}), tool_call_parser)
        yield client


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
    async with parsing() as client:
        found = (await parsed(client, text, parser=parser)).json()
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"]] == [
        ("search", {"query": "cats", "most": 2})
    ]
    assert (found["parser"], found["content"]) == (parser, content)


async def test_without_a_name_it_is_the_servers_own_parser() -> None:
    async with parsing(tool_call_parser="hermes") as client:
        found = (await parsed(client, HERMES)).json()
    assert (found["parser"], len(found["calls"])) == ("hermes", 1)
    async with parsing() as client:
        refused = await parsed(client, HERMES)
    assert refused.status_code == 400
    assert "start the server with --tool-call-parser" in refused.json()["error"]["message"]


async def test_text_without_a_call_and_a_broken_call_are_content() -> None:
    async with parsing(tool_call_parser="hermes") as client:
        for text in ("No tool is needed.", "<tool_call>{search}</tool_call>", ""):
            found = (await parsed(client, text)).json()
            assert (found["content"], found["calls"]) == (text, [])


async def test_half_a_surrogate_pair_in_a_call_is_as_json_writes_it() -> None:
    async with parsing(tool_call_parser="hermes") as client:
        reply = await parsed(client, HERMES.replace("cats", "\\ud800").replace("search", "\\udfff"))
    assert reply.status_code == 200, reply.text
    assert reply.json()["calls"] == [{"name": "\\udfff", "arguments": '{"query": "\\ud800", "most": 2}'}]


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
    async with parsing(tool_call_parser="hermes") as client:
        reply = await parsed(client, HERMES, **fields)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400, message
    assert reason in message
    assert "\n" not in message


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """With the process."""
    make_tiny_tokenizer().save_pretrained(tmp_path)
    engine = FakeEngine(1)
    engine.model_config.tokenizer = str(tmp_path)
    async with serving(engine, tool_call_parser="hermes") as client:
        work = client._transport.app.state.limited_work  # type: ignore[attr-defined]
        await work.started()
        yield client
        await work.close()


HOSTILE = ("<tool_call>" * 20_000, HERMES * 2_000, "<tool_call>" + "[" * 100_000, "[" * 100_000, "search(" * 50_000)


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.services
async def test_hostile_texts_are_answered(real: httpx.AsyncClient) -> None:
    for parser in ("hermes", "pythonic"):
        for text in HOSTILE:
            reply = await parsed(real, text, parser=parser)
            assert reply.status_code in (200, 400, 422), reply.text
            assert (await parsed(real, HERMES)).status_code == 200


async def test_a_parsers_characters_are_bounded_and_fewer_where_time_grows_faster_than_the_text() -> None:
    async with parsing() as client:
        for parser in SUPERLINEAR:
            assert parser in vllm_server.tool_parsers()
            reply = await parsed(client, "x" * (LONGEST_SUPERLINEAR + 1), parser=parser)
            assert reply.status_code == 400
            assert "has 65537 characters, at most 65536 are parsed" in reply.json()["error"]["message"]
        assert (await parsed(client, "x" * 500_000, parser="hermes")).status_code == 200


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.services
async def test_late_parses_are_killed_and_delay_nobody(real: httpx.AsyncClient) -> None:
    """As two answers of a model that repeats itself: each took 20 s, and its thread never ended."""
    opened = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"
    late = [("<function=f><parameter=a>" * 2_600, "qwen3_coder"), (opened * 1_400, "glm45")]
    state = real._transport.app.state  # type: ignore[attr-defined]
    state.tool_calls._time_limit_s = 3.0
    child = await state.limited_work.started()
    waiting = [asyncio.create_task(parsed(real, text, parser=parser)) for text, parser in late * 2]
    await asyncio.sleep(0.5)  # they run
    assert len(psutil.Process(child.pid).children()) == 4
    took = []
    for _ in range(3):
        began = time.monotonic()
        found = (await parsed(real, HERMES)).json()
        took.append(time.monotonic() - began)
        assert [call["name"] for call in found["calls"]] == ["search"]
    assert min(took) < 2, took  # the best of three, as other tests may run
    for reply in await asyncio.gather(*waiting):
        assert reply.status_code == 422
        assert "took longer than 3 s on " in reply.json()["error"]["message"]
    assert psutil.Process(child.pid).children() == []
    began = time.monotonic()
    assert (await parsed(real, HERMES)).status_code == 200
    assert time.monotonic() - began < 2


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.services
async def test_a_process_that_dies_is_started_again(real: httpx.AsyncClient) -> None:
    child = await real._transport.app.state.limited_work.started()  # type: ignore[attr-defined]
    os.killpg(child.pid, signal.SIGKILL)
    statuses = [(await parsed(real, HERMES)).status_code for _ in range(2)]
    assert statuses in ([503, 200], [200, 200])


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.services
async def test_a_client_that_goes_away_ends_its_parse(real: httpx.AsyncClient) -> None:
    child = await real._transport.app.state.limited_work.started()  # type: ignore[attr-defined]
    opened = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"
    waiting = asyncio.create_task(parsed(real, opened * 800, parser="glm45"))
    await asyncio.sleep(0.3)
    waiting.cancel()
    await asyncio.sleep(0.3)
    assert psutil.Process(child.pid).children() == []


async def test_a_process_that_does_not_fork_in_time_is_a_503_with_the_reason() -> None:
    class Stuck:
        async def ask(self, do: str, limit_s: float, **content: Any) -> None:
            raise TimeoutError

    class Started(LimitedWork):
        async def started(self) -> Any:
            return Stuck()

    async with parsing() as client:
        state = client._transport.app.state  # type: ignore[attr-defined]
        state.tool_calls = ToolCallParsing(Started({}), "hermes")
        reply = await parsed(client, HERMES)
    assert reply.status_code == 503
    assert "its process failed: it did not even fork within 65 s" in reply.json()["error"]["message"]
    with pytest.raises(vllm_engine.EngineGenerateError, match="cannot be checked: it did not even fork"):
        await GrammarCheck(Started({}), lambda fields: None).expect_fast({"json": {}})


async def test_a_closed_gate_does_not_hold_up_parsing() -> None:
    async with parsing(tool_call_parser="hermes") as client:
        client._transport.app.state.gate.close("weights", "half updated")  # type: ignore[attr-defined]
        assert (await parsed(client, HERMES)).status_code == 200
