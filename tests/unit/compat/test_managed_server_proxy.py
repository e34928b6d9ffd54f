import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from atroposlib.compat.commands.managed_server_proxy import create_app, main, read_servers
from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.envs.server_handling.proxy_client import create_proxy_session
from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerEnvironment
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from tests.waiting import until

TOKENIZER = make_tiny_tokenizer()


@contextlib.asynccontextmanager
async def proxy(server: FakeInferenceServer, token: str = "", session_timeout_s: float = 60.0) -> AsyncIterator[str]:
    """The proxy before `server`; its address."""
    manager = ServerManager([APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="fake")])
    app = create_app(manager, TOKENIZER, "fake", token, session_timeout_s)
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", log_config=None))
    running.capture_signals = contextlib.nullcontext  # type: ignore[assignment,method-assign]
    task = asyncio.create_task(running.serve())
    await until(lambda: running.started)
    try:
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        await task
        await manager.close()


async def test_environment_samples_through_the_proxy_and_gets_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeInferenceServer(lambda prompt: "yes", TOKENIZER, policy_version=4) as server, proxy(server) as url:
        environment = ServerEnvironment.model_validate({"ATROPOS_PROXY_URL": url})
        manager = ServerManager([APIServerConfig(base_url=server.base_url)], environment=environment)
        async with manager.managed_server(tokenizer=TOKENIZER) as managed:
            reply = await managed.chat_completion(
                messages=[{"role": "user", "content": "?"}], n=2, max_tokens=8, top_p=0.5
            )
            nodes = managed.get_state()["nodes"]
            assert (await httpx_get(f"{url}/sessions"))["sessions"][0]["uuid"] == managed.session_uuid
        assert (await httpx_get(f"{url}/sessions"))["sessions"] == []
        await manager.close()
        node = nodes[0]
        found = manager.ledger.settings_of(node.tokens, node.masked_tokens, node.logprobs)
        assert found == node.trained_settings() == [{"temperature": 1.0, "top_p": 0.5, "top_k": 0}]
    assert [choice.message.content for choice in reply.choices] == ["yes", "yes"]
    assert len(nodes) == 2
    assert TOKENIZER.decode([token for token in nodes[0].masked_tokens if token != -100]) == "yes<|im_end|>"
    assert nodes[0].metadata["policy_versions"] == [4, 4]
    assert server.requests[0][1]["top_p"] == 0.5


async def test_tools_that_the_template_does_not_show_reach_the_prompt_through_the_proxy() -> None:
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "tools": [tool]}
    async with FakeInferenceServer(lambda prompt: "Well.", TOKENIZER) as server, proxy(server) as url:
        session = await create_proxy_session(url, tool_parser="hermes")
        await session.chat_completion(**asked, max_tokens=8)
        state = await session.fetch_state()
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{url}/{session.session_uuid}/v1/chat/completions/render", json=asked)
    (node,) = state["nodes"]
    for text in (node.full_text, reply.json()["prompt_text"]):
        assert text.startswith("<|im_start|>system\n# Tools")
        assert text.count('"name": "search"') == 1


async def httpx_get(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        reply: dict[str, Any] = (await client.get(url)).json()
        return reply


async def test_token_is_needed_but_for_health() -> None:
    async with FakeInferenceServer(tokenizer=TOKENIZER) as server, proxy(server, token="secret") as url:
        assert (await httpx_get(f"{url}/health"))["status"] == "ok"
        assert "bearer token" in str(await httpx_get(f"{url}/sessions"))
        session = await create_proxy_session(url, token="secret")
        await session.cleanup()
        with pytest.raises(PermanentServerError, match="401"):
            await create_proxy_session(url)


async def test_errors_have_openais_form_and_unused_sessions_end() -> None:
    async with FakeInferenceServer(tokenizer=TOKENIZER) as server, proxy(server, session_timeout_s=0.05) as url:
        assert (await httpx_get(f"{url}/nothing/nodes"))["error"]["code"] == 404
        with pytest.raises(PermanentServerError, match="tool_parser 'nope' is not known"):
            await create_proxy_session(url, tool_parser="nope")
        first = await create_proxy_session(url)
        await asyncio.sleep(0.2)
        await create_proxy_session(url)
        with pytest.raises(PermanentServerError, match=r"was not used for 0.05 s"):
            await first.fetch_state()


def test_servers_are_read_from_json_and_an_open_proxy_needs_a_token(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"model_name": "m", "tokenizer_name": "t", "servers": [{"base_url": "http://x/v1"}]}))
    name, tokenizer, servers = read_servers(path)
    assert (name, tokenizer, servers[0].server_type, servers[0].model_name) == ("m", "t", "vllm", "m")
    with pytest.raises(SystemExit, match="reachable by other machines: give --token"):
        main(["--config", str(path), "--host", "0.0.0.0"])


async def test_the_proxy_knows_the_forms_of_the_agent_endpoint_and_samples_a_repeated_call_again() -> None:
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    chosen = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "search"}}}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}]}], "max_tokens": 8}
    async with FakeInferenceServer(lambda prompt: "yes", TOKENIZER) as server, proxy(server) as url:
        session = await create_proxy_session(url)
        async with httpx.AsyncClient(base_url=session.get_url()) as client:
            plain = [(await client.post("/chat/completions", json=parts)).json() for _ in range(2)]
            assert [reply["choices"][0]["message"]["content"] for reply in plain] == ["yes", "yes"]
            assert plain[0]["id"] != plain[1]["id"]
            assert (await client.post("/chat/completions", json=parts | chosen)).status_code == 200
            streamed = await client.post("/chat/completions", json=parts | {"stream": True})
            assert streamed.text.rstrip().endswith("data: [DONE]")
            refused = await client.post("/chat/completions", json=parts | {"nonsense": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, 400)
        assert server.hits["/generate"] == 4
        assert len((await session.fetch_state())["nodes"]) == 4


async def test_the_proxy_answers_no_page_and_no_foreign_host() -> None:
    async with (
        FakeInferenceServer(lambda prompt: "yes", TOKENIZER) as server,
        proxy(server, "secret-token") as url,
        httpx.AsyncClient() as client,
    ):
        page = {"Host": "evil.test", "Origin": "http://evil.test", "Authorization": "Bearer secret-token"}
        for headers in ({"Host": "evil.test"}, page, {"Origin": "null"}):
            assert (await client.get(f"{url}/sessions", headers=headers)).status_code == 403
        named = {"Host": "proxy.cluster.local", "Authorization": "Bearer secret-token"}
        assert (await client.get(f"{url}/sessions", headers=named)).status_code == 200
