"""Environments that fell silent for good leave the registry, and many environments cost little."""

import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from atroposlib.api.server import create_app
from atroposlib.api.service import RolloutService
from atroposlib.api.state.changes import Snapshot, decode_change, encode_change
from tests.unit.api.support import api_settings, group, marks, register, register_env
from tests.waiting import Clock


def api(journal: Path | None = None, **settings: Any) -> tuple[TestClient, Clock, RolloutService]:
    app = create_app(api_settings(env_timeout=60, env_forget=600, **settings), journal=journal)
    clock = app.state.service._clock = Clock()
    return TestClient(app), clock, app.state.service


def test_a_silent_environment_is_forgotten_and_its_groups_stay() -> None:
    client, clock, _ = api()
    register(client, batch_size=8)
    silent, living = (register_env(client, group_size=4) for _ in range(2))
    assert client.post("/scored_data", json=group(3, 7, env_id=silent)).json()["status"] == "buffered"
    for _ in range(20):
        clock.now += 59
        assert client.get(f"/status-env?env_id={living}").status_code == 200
    for path in ("/status-env", "/heartbeat", "/evaluation"):
        body = {"env_id": silent, "policy_version": 0}
        assert client.post(path, json=body).status_code == 404
    assert client.post("/scored_data", json=group(5, 8, env_id=silent)).json() == {"status": "received"}
    assert marks(client) == [7, 8]  # what was buffered for more of its kind is queued
    assert register_env(client) == 2  # an id is never given twice


def test_what_was_forgotten_stays_forgotten_after_a_restart(tmp_path: Path) -> None:
    client, clock, _ = api(tmp_path / "groups.db")
    with client:
        register(client)
        register_env(client, desired_name="math")
        kept = register_env(client, desired_name="math")
        clock.now = 500
        client.get(f"/status-env?env_id={kept}")
        clock.now = 700
        client.get(f"/status-env?env_id={kept}")
    for _ in range(2):  # from the changes, and from the snapshot that the end left
        client, _, service = api(tmp_path / "groups.db")
        with client:
            assert client.get("/status-env?env_id=0").status_code == 404
            assert client.get(f"/status-env?env_id={kept}").status_code == 200
            assert [environment.name for environment in service.state.queue.environments.values()] == ["math_1"]


def test_environments_of_a_journal_from_before_keep_their_ids() -> None:
    client, _, service = api()
    register(client)
    for _ in range(3):
        register_env(client)
    snapshot = service.state.snapshot()
    snapshot.queue.identities, snapshot.queue.next_env_id = [], 0
    read = decode_change(encode_change(snapshot))
    assert isinstance(read, Snapshot)
    service.state.apply(read)
    assert [(one.env_id, one.name) for one in service.state.queue.environments.values()] == [
        (0, "math_0"),
        (1, "math_1"),
        (2, "math_2"),
    ]
    assert register_env(client) == 3


def test_more_environments_than_may_be_are_told_to_come_back() -> None:
    client, clock, _ = api(max_environments=2)
    register(client)
    assert [register_env(client) for _ in range(2)] == [0, 1]
    body = {"max_token_length": 1, "desired_name": "late", "weight": 1.0, "group_size": 1}
    reply = client.post("/register-env", json=body)
    assert reply.status_code == 429
    assert int(reply.headers["Retry-After"]) >= 1
    assert "--max-environments" in reply.text
    clock.now = 1000
    client.get("/metrics")
    assert client.post("/register-env", json=body).json()["env_id"] == 2


def test_a_status_costs_the_same_beside_many_environments(caplog: pytest.LogCaptureFixture) -> None:
    client, clock, service = api()
    register(client)

    def seconds() -> float:
        times = []
        for _ in range(20):
            start = time.thread_time()
            service.env_status(0)
            times.append(time.thread_time() - start)
        return min(times)

    for _ in range(10):
        register_env(client, weight=2.0, min_batch_allocation=0.01)
    few = seconds()
    joined = service.state.queue.environment(0).request
    for _ in range(20_000):
        environment = service.state.queue.register_env(joined)
        assert environment is not None
        service.hear_environment(environment.env_id)
    many = seconds()
    assert many < 5 * few + 1e-4, (few, many)
    clock.now = 61
    client.get("/status-env?env_id=0")
    assert len(caplog.records) < 100  # 20,000 fell silent
