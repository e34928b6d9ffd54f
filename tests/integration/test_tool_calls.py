"""vLLM's own tool parsers at the route of a real server, and a conversation with tools that uses them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.envs.base import APIServerConfig
from environments.tool_template_server import ProductEnv
from tests.client import http
from tests.integration.conftest import API_KEY, Server, start_server, stop_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
HERMES = 'Hm. <tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>'


@pytest.fixture(scope="module")
def server(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose own parser is hermes."""
    folder = tmp_path_factory.mktemp("tool-calls")
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    started = start_server(llama_folder, folder, *flags)
    yield started
    stop_server(started)


def parsed(server: Server, **fields: Any) -> httpx.Response:
    return server.request("POST", "/v1/tool_calls/parse", json={"text": HERMES, "tools": TOOLS} | fields)


def test_the_servers_own_parser_and_a_named_one_find_the_calls(server: Server) -> None:
    found = parsed(server).json()
    assert (found["parser"], found["content"]) == ("hermes", "Hm. ")
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"]] == [("search", {"query": "cats"})]
    found = parsed(server, parser="pythonic", text='[search(query="cats")]').json()
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"]] == [("search", {"query": "cats"})]


def test_what_cannot_be_parsed_and_who_has_no_key_are_refused(server: Server) -> None:
    refused = parsed(server, parser="mistral")  # the model has no such token
    assert (refused.status_code, "tool parser mistral" in refused.text) == (400, True)
    assert parsed(server, parser="hermess").status_code == 400
    assert http.post(f"{server.url}/v1/tool_calls/parse", json={"text": HERMES, "tools": TOOLS}).status_code == 401


async def test_a_conversation_is_sampled_and_parsed_by_vllm(server: Server, tmp_path: Path) -> None:
    config = ProductEnv.env_config_cls(
        tokenizer_name=server.model, max_new_tokens=8, max_token_length=2000, tool_parser="vllm", group_size=2
    )
    served = APIServerConfig(server_type="vllm", base_url=f"{server.url}/v1", model_name=server.model, api_key=API_KEY)
    env = ProductEnv(config, [served])
    async with env._env_run:
        messages = [{"role": "user", "content": "Two?"}]
        async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
            reply = await managed.chat_completion(messages=messages, tools=TOOLS, max_tokens=8)
            state = managed.get_state()["nodes"]
        found = await env.server.parse_tool_calls(text=HERMES, tools=TOOLS, parser="hermes")
    assert reply.choices[0].message.tool_calls is None
    assert len([token for token in state[0].masked_tokens if token != -100]) == reply.usage.completion_tokens
    assert found == ("Hm. ", [("search", '{"query": "cats"}')])
