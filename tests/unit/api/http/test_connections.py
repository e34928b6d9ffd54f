"""What is taken in at a time, and how long a connection may wait: with real sockets where it is about those."""

import asyncio
import contextlib
import gzip
import resource
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from atroposlib.api.http.connections import Connection, Connections, Limits, connections_allowed
from atroposlib.api.server import create_app
from atroposlib.api.settings import RunApiConfig
from atroposlib.config import resolve_config
from atroposlib.flags import ConfigError
from tests.client import http
from tests.serving import threaded_app
from tests.unit.api.support import DEADLINE_S, api_settings, command, group, wait_until_healthy

QUICK = Limits(head_s=0.3, body_s=1.0, stall_s=0.5, most=30)
HEAD = b"POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"


def api(**settings: Any) -> TestClient:
    return TestClient(create_app(api_settings(**settings)))


# --- rates and bytes ----------------------------------------------------------------------------------


def test_a_client_that_asks_too_often_is_told_when_to_come_back_and_others_are_not() -> None:
    app = create_app(
        api_settings(max_requests_per_second=0.5, api_token="a-token-for-all", post_token="a-token-for-some")
    )
    bearing = {role: {"Authorization": f"Bearer a-token-for-{role}"} for role in ("all", "some")}
    flooding, other = (TestClient(app, client=(host, 1)) for host in ("192.0.2.1", "192.0.2.2"))
    replies = [flooding.get("/status", headers=bearing["some"]) for _ in range(12)]
    assert {reply.status_code for reply in replies[:6]} == {200}  # 10 s at its rate, and one
    assert replies[-1].status_code == 429
    assert 1 <= int(replies[-1].headers["Retry-After"]) <= 2
    assert "--max-requests-per-second" in replies[-1].text
    assert flooding.get("/health").status_code == 200
    assert flooding.get("/status", headers=bearing["all"]).status_code == 200
    assert other.get("/status", headers=bearing["some"]).status_code == 200


@pytest.mark.parametrize(("limit", "status"), [("max_inflight_bytes", 503), ("max_client_bytes", 429)])
def test_bytes_under_way_are_limited_in_sum_and_given_back(limit: str, status: int) -> None:
    client = api(**{limit: 10_000})
    long = [{"role": "user", "content": "x" * 20_000}]
    for _ in range(3):  # what was refused is not held
        reply = client.post("/scored_data", json=group(1, messages=[long]))
        assert reply.status_code == status
        assert int(reply.headers["Retry-After"]) >= 1
        assert "in progress" in reply.text
    packed = gzip.compress(b" " * 20_000)
    small = client.post("/scored_data", content=packed, headers={"Content-Encoding": "gzip"})
    assert len(packed) < 10_000
    assert small.status_code == status
    for _ in range(200):
        assert client.post("/scored_data", json=group(1)).status_code == 200


def test_limits_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-inflight-mb"):
        resolve_config(RunApiConfig, ["--max-body-mb", "4096"], prog="run-api", env={})


# --- connections --------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(limits: Limits, app: FastAPI | None = None, **settings: Any) -> Iterator[int]:
    """The port of an API in a thread, with these limits on its connections."""
    app = app or create_app(api_settings(**settings))
    with threaded_app(app, at_once=True, http=partial(Connection, Connections(limits)), ws="none") as port:
        yield port


def connect(port: int) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes; it has to."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def trickle(connection: socket.socket) -> bytes:
    """A byte every 50 ms until the server has had enough."""
    end = time.monotonic() + DEADLINE_S
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            connection.send(b"a")
            time.sleep(0.05)
    return read_all(connection)


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nX: "])
def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    with serving(QUICK) as port, connect(port) as waiting, connect(port) as trickling:
        waiting.sendall(sent)
        assert b"200 OK" not in read_all(waiting)
        trickling.sendall(sent or b"G")
        assert b"200 OK" not in trickle(trickling)


@pytest.mark.parametrize("send_on", [read_all, trickle])
def test_half_a_body_is_408_and_its_bytes_are_given_back(send_on: Any) -> None:
    with serving(QUICK, max_inflight_bytes=3000) as port:
        for _ in range(3):
            with connect(port) as half:
                half.sendall(HEAD % 1_000_000 + b"x" * 2000)
                reply = send_on(half)
                assert reply.startswith(b"HTTP/1.1 408")
                assert b"--body-timeout" in reply
                assert b"retry-after" in reply


def test_bodies_that_are_half_sent_do_not_add_up() -> None:
    with serving(QUICK, max_inflight_bytes=3_000_000) as port, contextlib.ExitStack() as stack:
        half = [stack.enter_context(connect(port)) for _ in range(8)]
        for each in half:
            each.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                each.sendall(HEAD % 2_000_000 + b"x" * 1_000_000)
        replies = []
        for each in half:
            each.settimeout(DEADLINE_S)
            replies.append(each.recv(65_536))
        statuses = [reply.split()[1] for reply in replies if reply]
        assert statuses.count(b"503") >= 5, statuses
        assert b"retry-after" in b"".join(replies), statuses
        assert http.post(f"http://127.0.0.1:{port}/scored_data", json=group(1), timeout=DEADLINE_S).is_success


def test_a_body_that_nobody_reads_does_not_hold_its_connection() -> None:
    with serving(QUICK) as port, connect(port) as unread:
        unread.sendall((HEAD % 1_000_000).replace(b"scored_data", b"nowhere"))
        assert unread.recv(65_536).startswith(b"HTTP/1.1 404")
        trickle(unread)


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"", b"\r\n" * 1000),
        (b"GET /", b"a" * 10_000),
        (b"GET /status HTTP/1.1\r\n", b"X: a\r\n" * 1000),
        (b"GET /status HTTP/1.1\r\nX: ", b"a" * 10_000),
        (HEAD.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\n", b"X: a\r\n" * 1000),
    ],
    ids=["no head", "path", "fields", "field", "fields behind a body"],
)
def test_a_head_without_end_is_refused_before_it_fills_memory(begun: bytes, more: bytes) -> None:
    with serving(Limits()) as port, connect(port) as endless:
        endless.sendall(begun)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 50_000_000:
                sent += endless.send(more)
        assert sent < 20_000_000  # what the kernel holds included
        assert http.get(f"http://127.0.0.1:{port}/health", timeout=DEADLINE_S).is_success


def test_a_large_body_in_small_chunks_is_no_long_head() -> None:
    with serving(Limits()) as port:
        body = msgspec.json.encode(group(1, messages=[[{"role": "user", "content": "x" * 200_000}]]))
        pieces = (body[start : start + 100] for start in range(0, len(body), 100))
        assert http.post(f"http://127.0.0.1:{port}/scored_data", content=pieces, timeout=DEADLINE_S).status_code == 200


def test_requests_on_one_connection_are_answered_beyond_the_deadlines() -> None:
    with serving(QUICK) as port, httpx.Client(trust_env=False) as session:
        for _ in range(8):
            reply = session.post(f"http://127.0.0.1:{port}/scored_data", json=group(1), timeout=DEADLINE_S)
            assert reply.status_code == 200
            time.sleep(0.2)
        with connect(port) as pipelined:
            ask = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n"
            pipelined.sendall(ask % b"" * 3 + ask % b"Connection: close\r\n")
            assert read_all(pipelined).count(b"200 OK") == 4


def test_connections_that_wait_make_way_and_those_that_are_answered_stay(caplog: pytest.LogCaptureFixture) -> None:
    patient = Limits(head_s=DEADLINE_S, body_s=DEADLINE_S, stall_s=DEADLINE_S, most=20)
    app = create_app(api_settings())

    @app.get("/ticks")
    async def ticks() -> StreamingResponse:
        async def without_end() -> AsyncIterator[bytes]:
            while True:
                yield b"tick\n"
                await asyncio.sleep(0.1)

        return StreamingResponse(without_end())

    with serving(patient, app) as port, contextlib.ExitStack() as stack:
        url = f"http://127.0.0.1:{port}"
        lines = stack.enter_context(http.stream("GET", f"{url}/ticks", timeout=DEADLINE_S)).iter_lines()
        idle = [stack.enter_context(connect(port)) for _ in range(100)]
        assert http.get(f"{url}/health", timeout=DEADLINE_S).is_success
        assert [next(lines) for _ in range(3)] == ["tick"] * 3
        idle[0].settimeout(DEADLINE_S)
        assert read_all(idle[0]) == b""
    said = [record.getMessage() for record in caplog.records if "more than 20 were open" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.services
def test_an_api_with_few_files_answers_health_beside_more_idle_connections() -> None:
    limited = ["sh", "-c", 'ulimit -n 128 && exec "$@"', "sh", *command("--port", "0", "--in-memory")]
    served = subprocess.Popen(limited, stderr=subprocess.PIPE, text=True)
    assert served.stderr is not None
    url = served.stderr.readline().split("listens on ")[1].strip()
    try:
        wait_until_healthy(url, served)
        with contextlib.ExitStack() as stack:
            port = int(url.rpartition(":")[2])
            for _ in range(200):
                stack.enter_context(connect(port))
            for _ in range(3):
                assert http.get(f"{url}/health", timeout=DEADLINE_S).is_success
    finally:
        served.kill()
        served.communicate()


def test_as_many_connections_are_allowed_as_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    for found, allowed, set_to in (
        ((1024, 2048), 1984, [(2048, 2048)]),
        ((1024, 1 << 20), 4096, [(4160, 1 << 20)]),
        ((1 << 20, 1 << 20), 4096, []),
        ((100, 100), 36, [(100, 100)]),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, found=found: found)
        raised.clear()
        assert connections_allowed(4096) == allowed
        assert raised == set_to


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


def test_a_request_that_asks_for_another_protocol_has_a_body() -> None:
    body = b'{"report": {"name": "a", "process": "b"}}'
    head = b"POST /heartbeat HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n" % (UPGRADE, len(body))
    with serving(Limits()) as port, connect(port) as asking:
        for sent in (head + body, head, body):  # at once, and the body behind its head
            asking.sendall(sent)
            if sent is not head:
                assert asking.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("of_the_end", [1, 2, 3])
def test_a_body_that_comes_with_the_end_of_its_head_stays_whole(of_the_end: int) -> None:
    body = b"no JSON\r\nUpgrade: it\r\n\r\n"
    head = b"POST /heartbeat HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(Limits()) as port, connect(port) as asking:
        asking.sendall(head[:-of_the_end])
        time.sleep(0.1)
        asking.sendall(head[-of_the_end:] + body)
        assert asking.recv(65_536).startswith(b"HTTP/1.1 422")


def test_no_body_is_the_next_request() -> None:
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    head = b"POST /heartbeat HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n" % (UPGRADE, len(inner))
    at = head.index(b"Upgrade: h2c") + 4
    for pieces, answers in (([head, inner, inner], 2), ([head[:at], head[at:], inner], 1)):
        with serving(Limits()) as port, connect(port) as asking:
            for piece in pieces:
                with contextlib.suppress(ConnectionError):
                    asking.sendall(piece)
                time.sleep(0.1)
            replies = read_all(asking)
            assert replies.startswith(b"HTTP/1.1 4")
            assert replies.count(b"server: uvicorn") == answers, replies
