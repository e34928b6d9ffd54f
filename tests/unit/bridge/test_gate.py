"""The gate in front of vLLM's routes, around a small ASGI app."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from vllm_patching.http.gate import Gate, GateMiddleware

gate = Gate()


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = FastAPI()
    app.add_middleware(GateMiddleware, gate=gate)

    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/bridge/resume", "/tokenize"):
        app.post(path)(lambda: {"served": True})
    app.get("/health")(lambda: {"served": True})

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("served")

    with TestClient(app) as client:
        yield client
    gate.open("weights")
    gate.open("fenced")


def test_closed_gate_refuses_what_generates_with_the_reason(client: TestClient) -> None:
    gate.close("weights", "trainer h:1 died")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/route_of_a_later_vllm"):
        reply = client.post(path)
        assert reply.status_code == 503, path
        assert reply.json()["error"]["message"] == "trainer h:1 died", path
        assert int(reply.headers["retry-after"]) > 0


def test_closed_gate_refuses_websockets_with_the_reason_until_it_opens(client: TestClient) -> None:
    gate.close("weights", "trainer h:1 died" + "!" * 200)
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/v1/realtime"):
        pass
    assert refused.value.code == 1013  # "try again later"
    assert refused.value.reason == ("trainer h:1 died" + "!" * 200)[:120]  # a close frame holds no more
    gate.open("weights")
    with client.websocket_connect("/v1/realtime") as socket:
        assert socket.receive_text() == "served"


def test_closed_gate_leaves_health_bridge_and_tokenizer_open(client: TestClient) -> None:
    gate.close("weights", "trainer h:1 died")
    assert client.get("/health").status_code == 200
    assert client.post("/v1/bridge/resume").status_code == 200
    assert client.post("/tokenize").status_code == 200


def test_gate_opens_when_the_last_cause_is_gone(client: TestClient) -> None:
    gate.close("weights", "half updated")
    gate.close("fenced", "lags behind")
    gate.open("weights")
    assert client.post("/generate").json()["error"]["message"] == "lags behind"
    gate.open("fenced")
    assert client.post("/generate").json() == {"served": True}
