"""Each form of `tool_choice` in each dialect: which tools the model sees, and what the reply says if it calls none."""

import json
from typing import Any

import httpx
import pytest

from tests.unit.agents.support import CALL, PARAMETERS, Running, running

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = {"role": "user", "content": "hi"}
NAMES = ("search", "count")
BOTH, FIRST, SECOND = ["search", "count"], ["search"], ["count"]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [HI],
        "max_tokens": 90,
        "tools": [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES],
    },
    RESPONSES: {
        "input": [HI],
        "max_output_tokens": 90,
        "tools": [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES],
    },
    MESSAGES: {
        "messages": [HI],
        "max_tokens": 90,
        "tools": [{"name": name, "input_schema": PARAMETERS} for name in NAMES],
    },
}


def of_chat(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed_in_chat(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [of_chat(name) for name in names]}}


def of_responses(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [of_responses(name) for name in names]}


FORMS = [  # (dialect, choice, tools that the model sees, whether a call in its text becomes one)
    (CHAT, None, BOTH, True),
    (CHAT, "auto", BOTH, True),
    (CHAT, "none", BOTH, False),
    (CHAT, "required", BOTH, True),
    (CHAT, of_chat("search"), FIRST, True),
    (CHAT, allowed_in_chat("auto", "count"), SECOND, True),
    (CHAT, allowed_in_chat("required", "search", "count"), BOTH, True),
    (RESPONSES, None, BOTH, True),
    (RESPONSES, "auto", BOTH, True),
    (RESPONSES, "none", BOTH, False),
    (RESPONSES, "required", BOTH, True),
    (RESPONSES, of_responses("count"), SECOND, True),
    (RESPONSES, allowed("auto", "search"), FIRST, True),
    (RESPONSES, allowed("required", "count"), SECOND, True),
    (MESSAGES, None, BOTH, True),
    (MESSAGES, {"type": "auto"}, BOTH, True),
    (MESSAGES, {"type": "auto", "disable_parallel_tool_use": True}, BOTH, True),
    (MESSAGES, {"type": "none"}, BOTH, False),
    (MESSAGES, {"type": "any"}, BOTH, True),
    (MESSAGES, {"type": "tool", "name": "search"}, FIRST, True),
]


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ended(path: str, reply: httpx.Response, *, streams: bool) -> tuple[str, bool]:
    """(why the reply ended, in its dialect's word, and whether it has a call)."""
    assert reply.status_code == 200, reply.text
    calls = '"tool_calls"' in reply.text or '"function_call"' in reply.text or '"tool_use"' in reply.text
    if path == CHAT:
        choice = (events(reply)[-1] if streams else reply.json())["choices"][0]
        return choice["finish_reason"], calls
    if path == RESPONSES:
        whole = events(reply)[-1]["response"] if streams else reply.json()
        return whole["status"], any(item["type"] == "function_call" for item in whole["output"])
    whole = events(reply)[-2]["delta"] if streams else reply.json()
    return whole["stop_reason"], calls


async def asked(started: Running, path: str, choice: object, **more: Any) -> tuple[httpx.Response, str]:
    """The reply, and the prompt with what was said."""
    session, key = await started.session()
    chosen = {"tool_choice": choice} if choice is not None else {}
    reply = await started.post(path, ASKED[path] | chosen | more, x_api_key=key)
    nodes = await started.nodes(session)
    return reply, nodes[0]["full_text"] if nodes else ""


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("says", [CALL, "No."])
async def test_each_form_decides_what_the_model_sees_and_none_of_them_what_it_says(says: str, streams: bool) -> None:
    plain = {CHAT: "stop", RESPONSES: "completed", MESSAGES: "end_turn"}
    called = {CHAT: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use"}
    async with running(lambda prompt: says) as started:
        for path, choice, tools, parses in FORMS:
            reply, text = await asked(started, path, choice, stream=streams)
            assert [name for name in NAMES if f'"name": "{name}", "param' in text] == tools, (path, choice)
            is_call = parses and says == CALL
            expected = ((called if is_call else plain)[path], is_call)
            assert ended(path, reply, streams=streams) == expected, (path, choice)


@pytest.mark.parametrize(
    ("path", "choice", "change", "words"),
    [
        (CHAT, "required", {"tools": []}, "there are no tools"),
        (CHAT, "must", {}, "must"),
        (CHAT, {"type": "custom", "custom": {"name": "search"}}, {}, "custom"),
        (CHAT, of_chat("dance"), {}, "dance"),
        (CHAT, {"type": "function", "function": "search"}, {}, "search"),
        (CHAT, allowed_in_chat("required"), {}, "there are no tools"),
        (CHAT, {"allowed_tools": {"tools": [{"function": "search"}]}}, {}, "search"),
        (CHAT, {"allowed_tools": {"tools": ["search"]}}, {}, "search"),
        (RESPONSES, "required", {"tools": None}, "there are no tools"),
        (RESPONSES, {"type": "web_search_preview"}, {}, "web_search_preview"),
        (RESPONSES, {"type": "mcp", "server_label": "x"}, {}, "mcp"),
        (RESPONSES, {"type": "custom", "name": "search"}, {}, "custom"),
        (RESPONSES, of_responses("dance"), {}, "dance"),
        (RESPONSES, allowed("auto", "dance"), {}, "dance"),
        (RESPONSES, ["auto"], {}, "auto"),
        (MESSAGES, {"type": "any"}, {"tools": []}, "there are no tools"),
        (MESSAGES, {"type": "tool"}, {}, "None"),
        (MESSAGES, {"type": "tool", "name": "dance"}, {}, "dance"),
        (MESSAGES, "auto", {}, "tool_choice"),
        (MESSAGES, {}, {}, "None"),
    ],
)
async def test_what_is_no_choice_is_refused_and_nothing_is_sampled(
    path: str, choice: Any, change: dict[str, Any], words: str
) -> None:
    async with running() as started:
        reply, text = await asked(started, path, choice, **change)
        assert (reply.status_code, text) == (400, ""), reply.text
        assert words in reply.json()["error"]["message"]
        assert not started.server.hits["/generate"]
