"""All routes of the vLLM server, its own too, answer only under its own names."""

from argparse import Namespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.middleware.cors import CORSMiddleware

from example_trainer.vllm_api_server import own_flags
from vllm_patching.compat import vllm_server
from vllm_patching.endpoint import BridgeEndpoints

KEY = {"Authorization": "Bearer key-of-the-server"}
PREFLIGHT = {"Origin": "http://evil.test", "Access-Control-Request-Method": "POST"}


def server(host: str | None = "127.0.0.1", *allowed: str, keys: tuple[str, ...] = ()) -> TestClient:
    """The app in the order in which vLLM builds it, CORS for everyone included, without an engine."""
    app = FastAPI()
    app.get("/health")(lambda: "well")
    endpoints = BridgeEndpoints()
    endpoints.attach_router(app)
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    endpoints._guard_hosts(Namespace(host=host, allowed_host=list(allowed)), list(keys))
    return TestClient(app, base_url="http://127.0.0.1:9001")


def test_a_rebound_name_reaches_no_route() -> None:
    client = server()
    for route in client.app.routes:  # type: ignore[attr-defined]
        for method in {*(getattr(route, "methods", None) or {"GET"}), "OPTIONS"}:
            path = route.path.replace("{session}", "s")
            reply = client.request(method, path, headers={"Host": "evil.test:9001", "Origin": "http://evil.test:9001"})
            assert reply.status_code == 403, (method, path)
            assert "access-control-allow-origin" not in reply.headers, (method, path)
    assert client.get("/health").json() == "well"
    assert client.get("/nowhere").status_code == 404


@pytest.mark.parametrize(
    "headers", [PREFLIGHT, {"Origin": "null"}, {"Origin": "http://[::1"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_a_page_of_another_origin_gets_neither_preflight_nor_reply(headers: dict[str, str]) -> None:
    for method in ("OPTIONS", "GET", "POST"):
        reply = server().request(method, "/generate", headers=headers)
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers


def test_the_key_opens_the_server_under_any_host_but_not_for_a_page() -> None:
    client = server("0.0.0.0", keys=("other", "key-of-the-server"))
    foreign = {"Host": "vllm.cluster.local"}
    assert client.get("/health", headers=foreign).status_code == 403
    assert client.get("/health", headers=foreign | KEY).status_code == 200
    assert client.get("/health", headers=foreign | {"Authorization": "bearer other"}).status_code == 200
    for more in ({"Origin": "http://vllm.cluster.local"}, {"Sec-Fetch-Mode": "cors"}, {"Authorization": "Bearer x"}):
        assert client.get("/health", headers=foreign | KEY | more).status_code == 403
    assert client.post("/generate", json={}, headers=KEY | {"Authorization": "Bearer wrong"}).status_code == 401


def test_an_allowed_host_is_answered() -> None:
    client = server("127.0.0.1", "vllm.example")
    assert client.get("/health", headers={"Host": "VLLM.example:80"}).status_code == 200
    reply = client.get("/health", headers={"Host": "vllm.example.evil"})
    assert reply.status_code == 403
    assert "--allowed-host vllm.example.evil" in reply.json()["detail"]


def test_the_launcher_takes_allowed_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "m", "--allowed-host", "Vllm.Example.", "--allowed_host=::1"]
    assert vllm_server.parse_serve_arguments(flags, own_flags()).allowed_host == ["vllm.example", "::1"]
    with pytest.raises(SystemExit):
        vllm_server.parse_serve_arguments(["--model", "m", "--allowed-host", "http://vllm"], own_flags())
    assert "without scheme and port" in capsys.readouterr().err
