"""Structured outputs of a real server: what is refused, on every route, while the server continues to answer others."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Server, session_members, start_server, stop_server
from tests.unit.vllm_patching.test_structured_outputs import HONEST, HOSTILE

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def bodies(server: Server, asked: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The request on every route that samples."""
    named = {"model": server.model, "max_tokens": 30, "temperature": 0}
    ids = {"token_ids": [5, 6], "model": server.model}
    yield "/v1/chat/completions", {**named, "messages": MESSAGES, "structured_outputs": asked}
    yield "/v1/completions", {**named, "prompt": "x", "structured_outputs": asked}
    yield "/invocations", {**named, "messages": MESSAGES, "structured_outputs": asked}
    yield "/generate", {"prompt": {"prompt_token_ids": [5]}, "max_tokens": 30, "structured_outputs": asked}
    params = {"max_tokens": 30, "structured_outputs": asked}
    yield "/inference/v1/generate", {**ids, "sampling_params": params}
    yield "/renderers/inference/v1/generate", {**ids, "sampling_params": params}


def forms(server: Server) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other words for a constraint."""
    chat = {"model": server.model, "max_tokens": 30, "messages": MESSAGES}
    response_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    text = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
    structures = [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]
    yield "/v1/chat/completions", {**chat, "response_format": response_format}
    yield "/v1/chat/completions", {**chat, "response_format": {"type": "json_object"}}
    tagged = {"type": "structural_tag", "structures": structures, "triggers": ["<a"]}
    yield "/v1/chat/completions", {**chat, "response_format": tagged}
    yield "/v1/chat/completions", {**chat, "tools": [TOOL], "tool_choice": "required"}
    named = {"type": "function", "function": {"name": "f"}}
    yield "/v1/chat/completions", {**chat, "tools": [TOOL], "tool_choice": named}
    yield "/v1/completions", {**chat, "prompt": "x", "response_format": response_format}
    yield "/invocations", {**chat, "response_format": response_format}
    yield "/v1/responses", {"model": server.model, "input": "x", "max_output_tokens": 30, "text": text}


@pytest.fixture(scope="module")
def off(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    server = start_server(llama_folder, tmp_path_factory.mktemp("off"), *flags)
    yield server
    stop_server(server)


def test_a_server_without_the_flag_refuses_each_form_on_each_route_and_names_it(off: Server) -> None:
    for path, body in [*forms(off), *bodies(off, {"json": SCHEMA}), *bodies(off, {"regex": "a"})]:
        reply = off.request("POST", path, json=body)
        assert reply.status_code == 400, (path, body, reply.text)
        assert "--structured-outputs" in reply.text, (path, body, reply.text)
    for free in (
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ):
        body = {"model": off.model, "max_tokens": 3, "messages": MESSAGES, **free}
        reply = off.request("POST", "/v1/chat/completions", json=body)
        assert reply.status_code == 200, (free, reply.text)


@pytest.fixture(scope="module")
def on(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--structured-outputs"]
    server = start_server(llama_folder, tmp_path_factory.mktemp("on"), *flags)
    yield server
    stop_server(server)


def resident(server: Server) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in session_members(server.process.pid))


def test_with_the_flag_honest_ones_are_sampled_and_hostile_ones_are_refused(on: Server) -> None:
    asked = {"choice": ["left", "right"]}
    reply = on.request("POST", "/v1/chat/completions", json=dict(bodies(on, asked))["/v1/chat/completions"])
    assert reply.json()["choices"][0]["message"]["content"] in ("left", "right"), "the random model writes no words"
    for path, body in forms(on):
        reply = on.request("POST", path, json=body)
        assert reply.status_code == 200, (path, body, reply.text)
    for asked in HONEST.values():
        for path, body in bodies(on, asked):
            reply = on.request("POST", path, json=body)
            assert reply.status_code == 200, (path, asked, reply.text)
    before = resident(on)
    for name, asked in HOSTILE.items():
        if name in ("minItems infinite", "minItems beyond 64 bits", "minimum"):
            continue  # not JSON, or not of a client that speaks it
        for path, body in bodies(on, asked):
            reply = on.request("POST", path, json=body)
            assert 400 <= reply.status_code < 500, (path, name, reply.status_code, reply.text[:300])
    assert on.process.poll() is None
    assert resident(on) - before < 200 << 20
    assert on.generate([5, 6], max_tokens=4)["token_ids"]


def test_a_grammar_that_passes_slows_nobody_much(on: Server) -> None:
    def took() -> float:
        began = time.monotonic()
        on.generate([5, 6], max_tokens=8, ignore_eos=True)
        return time.monotonic() - began

    alone = min(took() for _ in range(3))
    rules = "\n".join(f"a{i} ::= a{i + 1} | a{i + 1} a{i + 1}" for i in range(60))
    many = {f"p{i}": {"type": "string"} for i in range(128)}
    hard: list[dict[str, Any]] = [
        {"grammar": 'root ::= s\ns ::= s s s | s s | [a-z] | ""'},
        {"grammar": f"root ::= a0\n{rules}\na60 ::= [a-z]*"},
        {"regex": "([a-z]{1,30}){1,30}"},
        {"regex": "(([a-z]*)*)*"},
        {"json": {"type": "object", "properties": many, "minProperties": 16}},
    ]

    def ask(asked: dict[str, Any]) -> None:
        prompt = {"prompt_token_ids": [5, 6]}
        on.request("POST", "/generate", json={"prompt": prompt, "max_tokens": 60, "structured_outputs": asked})

    threads = [threading.Thread(target=ask, args=(asked,)) for asked in hard]
    for thread in threads:
        thread.start()
    worst = max(took() for _ in range(20))
    for thread in threads:
        thread.join(60)
    assert worst < alone + 1.5, (alone, worst)
