"""Inference servers that join and leave a run: /servers."""

import asyncio
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from atroposlib.api.journal.journal import Journal
from atroposlib.api.server import create_app
from atroposlib.api.service import RolloutService, TooManyServers
from atroposlib.wire.servers import MOST
from tests.unit.api.support import api_settings, register

NEW = "http://127.0.0.1:9002"


def change(client: TestClient, url: str, state: str) -> int:
    return client.post("/servers", json={"url": url, "state": state}).status_code


def listed(client: TestClient) -> dict[str, str]:
    found: dict[str, str] = client.get("/servers").json()["servers"]
    return found


def test_a_server_joins_serves_leaves_and_is_listed_without_a_path(client: TestClient) -> None:
    register(client)
    assert listed(client) == {}
    for state in ("joining", "serving", "leaving", "left"):
        assert change(client, "http://localhost:9002/v1", state) == 200
        assert listed(client) == {NEW: state}
    assert change(client, "http://gpu7:9001", "joining") == 200
    assert listed(client) == {NEW: "left", "http://gpu7:9001": "joining"}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gpu7:9001",
        "http://gpu7",
        "http://gpu7:0",
        "http://gpu7:99999",
        "http://gpu7:\uff19\uff10\uff10\uff11",
        "http://gpu7..local:9001",
        f"http://{'a' * 64}:9001",
        "http://[:::::::]:9001",
        "http://[1.2.3.4]:9001",
        "http://gpu7:x",
        "https://gpu7:9001",
        "file:///etc/passwd",
        "http://user:secret@gpu7:9001",
        "http://gpu7:9001/other",
        "http://gpu7:9001/v1?x=1",
        "http://gpu7:9001#x",
        f"http://{'g' * 400}:9001",
    ],
)
def test_what_is_no_address_of_a_server_is_refused_by_name(client: TestClient, url: str) -> None:
    reply = client.post("/servers", json={"url": url, "state": "joining"})
    assert reply.status_code == 422
    assert "http://HOST:PORT" in reply.text
    assert listed(client) == {}


def test_a_state_that_there_is_not_is_refused(client: TestClient) -> None:
    assert change(client, NEW, "gone") == 422


def test_the_list_is_bounded(client: TestClient) -> None:
    assert {change(client, f"http://gpu:{port}", "joining") for port in range(1, MOST + 1)} == {200}
    assert change(client, "http://gpu:60000", "joining") == 422
    assert change(client, "http://gpu:1", "left") == 200  # one that is listed


async def test_the_list_is_bounded_for_changes_that_come_together(path: Path) -> None:
    service = RolloutService(api_settings(), Journal(path))
    urls = [f"http://gpu:{port}" for port in range(1, MOST + 9)]
    done = await asyncio.gather(*(service.change_server(url, "joining") for url in urls), return_exceptions=True)
    await service.close()
    assert sum(isinstance(each, TooManyServers) for each in done) == 8
    assert len(service.state.servers) == MOST


@pytest.mark.parametrize("compacted", [False, True])
def test_the_list_survives_a_restart_and_ends_with_the_trainer(path: Path, compacted: bool) -> None:
    with TestClient(create_app(journal=path)) as client:
        register(client)
        assert change(client, NEW, "serving") == 200
        if compacted:
            service = client.app.state.service  # type: ignore[attr-defined]
            service._compact(service.journal)
    with TestClient(create_app(journal=path)) as client:
        assert listed(client) == {}  # the run may be resumed, with other servers
        assert client.get("/batch").status_code == 200
        assert listed(client) == {NEW: "serving"}
        register(client)  # a trainer that starts feeds the servers of its configuration
        assert listed(client) == {}


def test_the_post_token_reads_the_list_and_cannot_change_it() -> None:
    client = TestClient(create_app(api_settings(api_token="correct-horse-battery", post_token="only-for-environments")))
    bearing = {"Authorization": "Bearer only-for-environments"}
    assert client.get("/servers", headers=bearing).status_code == 200
    body = {"url": NEW, "state": "joining"}
    assert client.post("/servers", json=body, headers=bearing).status_code == 403
