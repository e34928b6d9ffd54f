"""Where the server has a key, no route answers without it: vLLM's own routes of the installed release, and ours."""

import asyncio
import re
from argparse import Namespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from example_trainer.vllm_api_server import own_flags
from tests.unit.vllm_patching.test_endpoint_hosts import server
from vllm_patching.compat import vllm_server
from vllm_patching.endpoint import BridgeEndpoints
from vllm_patching.http.keys import RequireKey

KEYS = ("first", "second key")
TASKS: Any = ("generate", "transcription", "realtime", "render", "classify", "embed", "token_embed")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY")
# those of vLLM's own that it does not guard, and spellings of guarded paths and of the open one, as servers decode them
PATHS = (
    *("/invocations", "/tokenize", "/detokenize", "/metrics", "/metrics/", "/docs", "/docs/oauth2-redirect", "/redoc"),
    *("/openapi.json", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/generative_scoring", "/ping", "/version"),
    *("/load", "/server_info", "/nowhere", "/", "//", "/health/", "//health", "/health//", "/./health", "/health/."),
    *("/HEALTH", "/Health", "/health;x", "/health\x00", "/health ", "/x/health", "/v1/health", "/health/../metrics"),
    *("//v1/models", "/V1/models", "/v1//models", "/./v1/models", "/static/../v1/models", "/prefix/v1/models"),
    *("/prefix/health", "/metrics?path=/health", "/metrics#/health", "/metrics/../health", "/health\\..\\metrics"),
    *("/ｈealth", "/health\n", "", "health", "*", "http://127.0.0.1/health", "/reload_weights", "/v1/generate"),
)


def whole_app(keys: list[str]) -> FastAPI:
    """vLLM's app with every route that the installed release attaches, development and scale-out included, and ours."""
    from vllm.entrypoints.launchers.app import build_app

    args = vllm_server.parse_serve_arguments(["--model", "m"], own_flags())
    args.api_key, args.enable_scale_out, args.enable_fault_tolerance = keys, True, True
    app = build_app(args, TASKS, None)
    (endpoints,) = (plugin for plugin in app.state.endpoint_plugins if plugin.name == BridgeEndpoints.name)
    endpoints._guard_hosts(Namespace(host="127.0.0.1", allowed_host=[]), vllm_server.api_keys(args))
    return app


def every_path(app: FastAPI) -> set[str]:
    return {re.sub(r"\{[^}]*\}", "x", getattr(route, "path", "")) for route in app.routes}


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_PLUGINS", BridgeEndpoints.name)
    return TestClient(whole_app(list(KEYS)), base_url="http://127.0.0.1:9001", raise_server_exceptions=False)


async def status_of(app: ASGIApp, method: str, path: str, **headers: str) -> int:
    """What one request gets whose path no client has put in order."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(b"host", b"127.0.0.1:9001"), *((name.encode(), value.encode()) for name, value in headers.items())]
    near, far = ("127.0.0.1", 9001), ("127.0.0.1", 1)
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
    }
    scope |= {"http_version": "1.1", "scheme": "http", "headers": given, "server": near, "client": far}
    await app(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{}, {"authorization": "Bearer wrong"}, {"authorization": "first"}, {"x-api-key": "first"}]
)
async def test_no_route_of_vllms_whole_app_answers_a_stranger(whole: TestClient, given: dict[str, str]) -> None:
    app: Any = whole.app
    paths = every_path(app)
    assert {"/invocations", "/v1/models", "/metrics", "/v1/bridge/status", "/generate"} <= paths
    assert len(paths) > 50
    answered = [
        (method, path, status)
        for path in sorted(paths - {"/health"}) + list(PATHS)
        for method in METHODS
        if (status := await status_of(app, method, path, **given)) != 401
    ]
    assert answered == []


@pytest.mark.slow
def test_each_key_opens_the_app_and_health_needs_none(whole: TestClient) -> None:
    for key in KEYS:
        for path in ("/metrics", "/openapi.json", "/docs"):
            assert whole.get(path, headers={"Authorization": f"bearer {key}"}).status_code == 200
    assert whole.get("/health").status_code != 401


@pytest.mark.parametrize("path", ["/v1/realtime", "/health", "/anything"])
def test_a_websocket_without_the_key_is_refused_before_its_handshake(path: str) -> None:
    app = RequireKey(FastAPI(), ["k"])
    with pytest.raises(WebSocketDenialResponse) as refused, TestClient(app).websocket_connect(path):
        pass
    assert refused.value.status_code == 401


async def test_a_websocket_of_a_server_without_denial_responses_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await RequireKey(FastAPI(), ["k"])(scope, None, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008, "reason": ""}]


def test_a_prefix_of_a_reverse_proxy_opens_nothing() -> None:
    reached: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    async def ignore(message: Any = None) -> Any:
        return message

    for root in ("", "/prefix", "/health"):
        for path in ("/prefix/health", "/health/v1/models", "/prefix/v1/models", "/health/health"):
            scope: Scope = {"type": "http", "method": "GET", "path": path, "root_path": root, "headers": []}
            asyncio.run(RequireKey(app, ["k"])(scope, ignore, ignore))
    assert reached == []


def test_lifespan_events_pass_and_without_a_key_everyone_does() -> None:
    for keys in ((), ("k",)):
        with server(keys=keys) as client:
            assert client.get("/health").status_code == 200
    assert server().get("/nowhere").status_code == 404


@pytest.mark.parametrize("path", ["/generate", "/v1/generate", "/reload_weights", "/v1/bridge/attach"])
@pytest.mark.parametrize("body", [b'{"prompt": ', b"[]", b"", b"7"])
def test_a_wrong_key_is_a_401_whatever_the_body(path: str, body: bytes) -> None:
    client = server(keys=("k",))
    client.app.state.sessions = None  # type: ignore[attr-defined]
    for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "Bearer "}, {"Authorization": "k"}):
        reply = client.post(path, content=body, headers=headers)
        assert reply.status_code == 401
        assert "--api-key" in reply.json()["error"]["message"]
    known = {"Authorization": "Bearer k", "Content-Type": "application/json"}
    assert client.post(path, content=b'{"prompt": ', headers=known).status_code == 422


@pytest.mark.parametrize(
    ("flag", "variable", "keys"),
    [
        (["a", "b"], "v", ["a", "b"]),
        (None, "v", ["v"]),
        ([""], "v", []),
        (None, None, []),
        ([], "v", ["v"]),
        (["", "b"], None, ["b"]),
    ],
)
def test_keys_are_those_that_vllm_reads(
    monkeypatch: pytest.MonkeyPatch, flag: list[str] | None, variable: str | None, keys: list[str]
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    assert vllm_server.api_keys(Namespace(api_key=flag)) == keys


def test_a_websocket_with_the_key_reaches_the_app() -> None:
    app = RequireKey(FastAPI(), ["k"])
    known = {"Authorization": "Bearer k"}
    # there is no such route: FastAPI's own refusal
    with pytest.raises(WebSocketDisconnect), TestClient(app).websocket_connect("/v1/realtime", headers=known):
        pass
