"""The gate in front of vLLM's routes, around a small ASGI app."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from vllm_patching.http.gate import Gate, GeneratingTime, Timed, Unavailable

GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations", "/pooling")
OPEN = (
    "/v1/bridge/session",
    "/v1/bridge/resume",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/tool_calls/parse",
    "/tokenize",
    "/detokenize",
    "/ping",
)

gate = Gate()


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = FastAPI()
    app.add_middleware(Unavailable, why=gate.why_not)

    for path in (*GENERATING, *OPEN):
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
    for path in (*GENERATING, "/v1/route_of_a_later_vllm"):
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


@pytest.mark.parametrize("path", OPEN)
def test_closed_gate_leaves_health_bridge_adapters_and_tokenizer_open(client: TestClient, path: str) -> None:
    gate.close("weights", "trainer h:1 died")
    assert client.post(path).json() == {"served": True}
    assert client.get("/health").json() == {"served": True}


def test_gate_opens_when_the_last_cause_is_gone(client: TestClient) -> None:
    gate.close("weights", "half updated")
    gate.close("fenced", "lags behind")
    assert client.post("/generate").json()["error"]["message"] == "half updated; lags behind"
    assert [gate.reason(cause) for cause in ("weights", "fenced", "other")] == ["half updated", "lags behind", None]
    gate.open("weights")
    assert client.post("/generate").json()["error"]["message"] == "lags behind"
    gate.open("fenced")
    assert client.post("/generate").json() == {"served": True}


def test_the_time_of_several_requests_at_once_counts_once() -> None:
    now = 10.0
    generating = GeneratingTime(lambda: now)
    with generating.of_a_request():
        now = 12.0
        assert generating.seconds == 2
        with generating.of_a_request():
            now = 15.0
        now = 16.0
    now = 100.0
    assert generating.seconds == 6
    with generating.of_a_request():
        now = 101.0
    assert generating.seconds == 7


def test_only_requests_that_generate_are_timed() -> None:
    times = iter(range(100))
    generating = GeneratingTime(lambda: float(next(times)))
    app = FastAPI()
    app.add_middleware(Timed, time=generating)
    for path in ("/generate", "/tokenize"):
        app.post(path)(lambda: {"seconds": generating.seconds})
    client = TestClient(app)
    assert client.post("/tokenize").json() == {"seconds": 0}
    assert client.post("/generate").json() == {"seconds": 1}
    assert generating.seconds == 2
