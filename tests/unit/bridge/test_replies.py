"""The routes that both bridges have, and how a refusal reaches a trainer."""

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

from atroposlib.wire.typed import typed_value
from vllm_patching.http.replies import Refused, add_session_routes


class OneSession:
    """Keeps the session that was opened; refuses all others."""

    held: str | None = None

    async def open(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.held is not None:
            raise Refused(f"session {self.held} is held by /tmp/run/trainer.py")
        self.held = typed_value("session", data.get("session"), str)
        return {"policy_version": 0}

    async def heartbeat(self, session: str) -> dict[str, Any]:
        if session != self.held:
            raise Refused(f"session {session} is not the current one", 404)
        return {"policy_version": 0}

    async def close(self, session: str) -> dict[str, Any]:
        self.held = None
        return {"policy_version": 0}


def test_a_session_is_opened_renewed_and_left_and_refusals_come_word_for_word() -> None:
    bridge, app, router = OneSession(), FastAPI(), APIRouter(prefix="/v1/bridge")
    add_session_routes(router, lambda: bridge)
    app.include_router(router)
    client = TestClient(app)
    assert client.post("/v1/bridge/session", json={"session": "a"}).json() == {"policy_version": 0}
    assert client.post("/v1/bridge/session/a/heartbeat").status_code == 200
    refused = client.post("/v1/bridge/session", json={"session": "b"})
    assert refused.status_code == 409
    assert refused.json()["error"] == {
        "message": "session a is held by /tmp/run/trainer.py",
        "code": 409,
    }
    assert client.post("/v1/bridge/session/b/heartbeat").status_code == 404
    bridge.held = None
    wrong = client.post("/v1/bridge/session", json={"session": 5})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"] == "session=5: Expected `str`, got `int`"
    assert client.delete("/v1/bridge/session/a").status_code == 200
    assert bridge.held is None
