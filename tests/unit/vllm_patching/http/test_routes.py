"""The bridge's routes: what reaches the sessions, and how a refusal reaches a trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.unit.vllm_patching.engine_with_workers import broadcast_offer, make_sessions, single_copy_offer
from vllm_patching.engines import engines_of
from vllm_patching.engines.session import Sessions
from vllm_patching.http.routes import add_routes


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = FastAPI()
    app.state.sessions, app.state.fake = make_sessions(tmp_path)
    add_routes(app)
    with TestClient(app) as client:
        yield client


def refused(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["message"]


def test_a_session_is_opened_renewed_and_left_and_refusals_come_word_for_word(client: TestClient) -> None:
    attached = client.post("/v1/bridge/attach", json=single_copy_offer(session="a")).json()
    assert attached["policy_version"] == 0
    assert attached["workers"][0]["layout"]["norm"][1:] == [[4], "float32"]
    assert client.post("/v1/bridge/session/a/heartbeat").json() == {"policy_version": 0, "lease_s": 30.0}
    status, message = refused(client.post("/v1/bridge/session", json=broadcast_offer(session="b")))
    assert status == 409
    assert message == "trainer h:1 holds session a for another 30 s: stop it, or wait for its lease to end"
    assert refused(client.post("/v1/bridge/session/b/heartbeat"))[0] == 404
    assert client.get("/v1/bridge/status").json()["session"] == "a"
    assert client.delete("/v1/bridge/session/a").json() == {"policy_version": 0}
    assert client.get("/v1/bridge/status").json()["session"] is None


def test_the_kind_of_an_offer_chooses_the_engine_whatever_the_route(client: TestClient) -> None:
    reply = client.post("/v1/bridge/session", json={"kind": "single_copy", **single_copy_offer()})
    assert reply.json()["workers"][0]["fd"] > 0
    status, message = refused(client.post("/v1/bridge/session", json={"kind": "pigeon", **broadcast_offer()}))
    assert status == 400
    assert "kind='pigeon': expected one of ['adapter', 'broadcast'" in message


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("session", broadcast_offer(port=1.5), "1.5"),
        ("attach", single_copy_offer(process={"boot_id": "b", "pid_namespace": 1, "pid": "x", "started": 1}), "pid"),
        ("commit", {"session": "s", "policy_version": 2**70}, "policy_version"),
        ("commit", {"session": "s"}, "policy_version"),
        ("commit", [1], "expected an object"),
        ("resume", {"session": ["s"]}, "session"),
        ("pause", {"session": "s", "policy_version": 1, "deadline_s": 1e9}, "deadline_s"),
        ("fence", {"session": "s\n", "reason": "r"}, "session"),
    ],
)
def test_a_body_of_another_type_is_a_400_that_names_the_field(
    client: TestClient, route: str, body: Any, named: str
) -> None:
    status, message = refused(client.post(f"/v1/bridge/{route}", json=body))
    assert status == 400
    assert named in message
    assert client.get("/v1/bridge/status").json()["session"] is None


def test_a_server_without_a_bridge_says_what_to_start_it_with(client: TestClient) -> None:
    sessions: Sessions = client.app.state.sessions  # type: ignore[attr-defined]
    sessions.serving.bridge_on = False
    sessions.engines = engines_of(sessions.serving)
    for path, body in [("session", broadcast_offer()), ("commit", {}), ("attach", 1)]:
        status, message = refused(client.post(f"/v1/bridge/{path}", json=body))
        assert (status, "VLLM_ENABLE_SHARED_WEIGHTS=1" in message) == (409, True)
    assert refused(client.get("/v1/bridge/manifest"))[0] == 409
    assert "--enable-lora" in refused(client.post("/v1/bridge/adapter", json={}))[1]
    assert "max_lora_rank" not in client.get("/v1/bridge/status").json()
