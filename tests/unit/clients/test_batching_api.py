"""The client of the batching API against servers that are not there, refuse, or answer something else."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from atroposlib.clients.batching_api import ApiRefused, ApiUnreachable, AsyncBatchingApi, BatchingApi, UnexpectedReply
from atroposlib.clients.bearer import UnusableToken
from atroposlib.clients.waiting import Wait, wait_for
from atroposlib.wire import routes
from atroposlib.wire.batching import (
    MSGPACK,
    BatchReply,
    EnvId,
    EnvRegistered,
    EnvRegistration,
    Info,
    PostedData,
    ScoredData,
    WaitForTrainer,
)
from tests.serving import Asked, Reply, ThreadedServer, free_port


class Server(ThreadedServer):
    """Answers each request by the next of its replies, the last one again and again, and keeps what it was asked."""

    def __init__(self, *replies: Reply) -> None:
        self.asked: list[Asked] = []

        def answer(asked: Asked) -> Reply:
            self.asked.append(asked)
            return replies[min(len(self.asked), len(replies)) - 1]

        super().__init__(answer)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as servers:
        yield lambda *replies: servers.enter_context(Server(*replies))


def blocking(url: str, *arguments: Any, **options: Any) -> Any:
    with contextlib.closing(BatchingApi(url, "secret")) as api:
        return api.call(*arguments, **options)


def on_a_loop(url: str, *arguments: Any, **options: Any) -> Any:
    async def call() -> Any:
        async with contextlib.aclosing(AsyncBatchingApi(url, "secret")) as api:
            return await api.call(*arguments, **options)

    return asyncio.run(call())


both = pytest.mark.parametrize("call", [blocking, on_a_loop])
INFO = Reply(body=b'{"batch_size": 8, "max_token_len": 512, "unknown": [1]}')


@both
def test_a_reply_is_the_record_of_its_route_and_unknown_fields_are_ignored(
    call: Callable[..., Any], serve: Callable[..., Server]
) -> None:
    server = serve(INFO)
    assert call(server.url + "/", routes.INFO) == Info(8, 512)
    method, path, headers, _ = server.asked[0]
    assert (method, path, headers["Authorization"]) == ("GET", "/info", "Bearer secret")


@both
def test_queries_and_bodies_are_those_of_the_records(call: Callable[..., Any], serve: Callable[..., Server]) -> None:
    server = serve(Reply(body=b'{"status": "success"}'))
    call(server.url, routes.DISCONNECT_ENV, EnvId(3))
    with pytest.raises(UnexpectedReply):
        call(server.url, routes.EVALUATIONS, query={"policy_version": 7})
    assert [(method, path) for method, path, _, _ in server.asked] == [
        ("POST", "/disconnect-env"),
        ("GET", "/evaluations?policy_version=7"),
    ]
    assert json.loads(server.asked[0][3]) == {"env_id": 3}


@both
def test_a_dead_peer_is_unreachable(call: Callable[..., Any]) -> None:
    with pytest.raises(ApiUnreachable, match=r"^connection refused$"):
        call(f"http://127.0.0.1:{free_port()}", routes.INFO)


@both
@pytest.mark.parametrize(
    ("reply", "after_s"),
    [
        (Reply(503, b"starting"), None),
        (Reply(429, b"{}", {"Retry-After": "7"}), 7.0),
        (Reply(507, b"the disk is full", {"Retry-After": "3600"}), 60.0),
        (Reply(429, b"{}", {"Retry-After": "0"}), None),
        (Reply(408, b"", {"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"}), None),
    ],
)
def test_not_now_is_unreachable_until_when_the_api_said(
    call: Callable[..., Any], serve: Callable[..., Server], reply: Reply, after_s: float | None
) -> None:
    with pytest.raises(ApiUnreachable, match=f"^HTTP {reply.status}: {reply.body.decode()}") as raised:
        call(serve(reply).url, routes.INFO)
    assert raised.value.after_s == after_s


@both
@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(401), "needs its token: set ATROPOS_API_TOKEN, or --atropos-token"),
        (Reply(409), "another trainer has registered with the batching API at http.* end one of the two"),
        (
            Reply(404, b'{"detail": "no environment 3"}'),
            "GET http.*/info was refused with HTTP 404: .*no environment 3",
        ),
        (Reply(307, b"", {"Location": "http://elsewhere/"}), "configure its address"),
    ],
)
def test_a_refused_request_is_not_worth_repeating(
    call: Callable[..., Any], serve: Callable[..., Server], reply: Reply, says: str
) -> None:
    server = serve(reply)
    with pytest.raises(ApiRefused, match=says) as raised:
        call(server.url, routes.INFO)
    assert raised.value.status == reply.status
    assert len(server.asked) == 1


@both
def test_a_reply_of_failure_is_a_refusal(call: Callable[..., Any], serve: Callable[..., Server]) -> None:
    server = serve(Reply(body=b'{"status": "failure", "error": "no environment 3"}'))
    with pytest.raises(ApiRefused, match=r"POST http.*/disconnect-env failed: no environment 3"):
        call(server.url, routes.DISCONNECT_ENV, EnvId(3))


@both
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[1]", "answered list instead of an object; is --atropos-url the batching API"),
        (b"<html>", r"answered no JSON \(.*; is --atropos-url the batching API"),
        (b'{"batch_size": "many", "max_token_len": 1}', r"answered something else \(Expected `int`, got `str`"),
    ],
)
def test_what_is_not_the_record_is_named(
    call: Callable[..., Any], serve: Callable[..., Server], body: bytes, says: str
) -> None:
    with pytest.raises(UnexpectedReply, match=says):
        call(serve(Reply(body=body)).url, routes.INFO)


@both
@pytest.mark.parametrize("url", ["http://exa mple", "ftp://127.0.0.1", "127.0.0.1:8000", "http://[::1"])
def test_an_address_that_is_none_is_refused_with_its_flag(call: Callable[..., Any], url: str) -> None:
    with pytest.raises(ApiRefused, match=r"--atropos-url .* cannot be used"):
        call(url, routes.INFO)


@pytest.mark.parametrize("client", [BatchingApi, AsyncBatchingApi])
@pytest.mark.parametrize("token", ["Schlüssel", "secret\n", "two words", "\ud800secret"])
def test_a_token_that_no_header_carries_is_refused_with_its_flag_and_not_shown(client: Any, token: str) -> None:
    with pytest.raises(UnusableToken) as raised:
        client("http://127.0.0.1", token)
    assert str(raised.value).startswith("ATROPOS_API_TOKEN, or --atropos-token: a token has printable ASCII characters")
    assert token.strip() not in str(raised.value)


@both
def test_joining_has_two_replies(call: Callable[..., Any], serve: Callable[..., Server]) -> None:
    joined = EnvRegistered(0, "dice_0", "", 0, -1, 9)
    replies = [Reply(body=b'{"status": "wait for trainer to start"}'), Reply(body=msgspec.json.encode(joined))]
    server = serve(*replies)
    env = EnvRegistration(512, "dice", 1.0, 2)
    assert call(server.url, routes.REGISTER_ENV, env) == WaitForTrainer()
    assert call(server.url, routes.REGISTER_ENV, env) == joined


def test_requests_are_repeated_by_the_clock_until_the_api_is_there(serve: Callable[..., Server]) -> None:
    server, pauses = serve(Reply(503), Reply(429, b"{}", {"Retry-After": "5"}), INFO), list[float]()
    wait = Wait("the API", server.url, 60, TimeoutError, now=lambda: sum(pauses))
    with contextlib.closing(BatchingApi(server.url)) as api:
        assert wait_for(lambda: api.call(routes.INFO), wait, pauses.append).batch_size == 8
    assert pauses == [0.05, 5.0]


def test_requests_are_repeated_no_longer_than_the_deadline(serve: Callable[..., Server]) -> None:
    server, pauses = serve(Reply(503, b"full")), list[float]()
    wait = Wait("the API", server.url, 3, TimeoutError, now=lambda: sum(pauses))
    with contextlib.closing(BatchingApi(server.url)) as api, pytest.raises(TimeoutError, match="HTTP 503: full"):
        wait_for(lambda: api.call(routes.INFO), wait, pauses.append)
    assert sum(pauses) == pytest.approx(3)
    assert len(server.asked) == len(pauses) + 1


def test_an_answer_that_takes_too_long_is_unreachable(serve: Callable[..., Server]) -> None:
    listening = serve(INFO)
    slow = routes.Route("GET", "/info", "anyone", Info, deadline_s=0.0)
    with pytest.raises(ApiUnreachable, match="no answer within 0 s"):
        on_a_loop(listening.url, slow)


@both
@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_comes_as_records_in_either_format(
    call: Callable[..., Any], serve: Callable[..., Server], packed: bool
) -> None:
    group = ScoredData([[1, 2]], [[-100, 2]], [1.0], inference_logprobs=[[1.0, -0.5]])
    encode = msgspec.msgpack.encode if packed else msgspec.json.encode
    body = encode(BatchReply([group], lease=4, ids=[9]))
    server = serve(Reply(body=body, headers={"Content-Type": MSGPACK} if packed else {}))
    assert call(server.url, routes.BATCH) == BatchReply([group], lease=4, ids=[9])
    assert MSGPACK in server.asked[0][2]["Accept"]


async def test_groups_are_packed_once_the_api_reads_it_and_else_compressed(serve: Callable[..., Server]) -> None:
    received = Reply(body=b'{"status": "received"}')
    server = serve(received, received._replace(headers={"Accept-Post": f"application/json, {MSGPACK}"}), received)
    arrays: Any = [np.arange(500)], [np.full(500, -100)], np.array([0.5])
    async with contextlib.aclosing(AsyncBatchingApi(server.url)) as api:
        for _ in range(3):
            await api.call(routes.SCORED_DATA, PostedData(*arrays), key="k")
    kinds = [(headers["Content-Type"], headers.get("Content-Encoding")) for _, _, headers, _ in server.asked]
    assert kinds == [("application/json", "gzip"), ("application/json", "gzip"), (MSGPACK, None)]
    assert {headers["Idempotency-Key"] for _, _, headers, _ in server.asked} == {"k"}
    read = msgspec.json.decode(gzip.decompress(server.asked[0][3])), msgspec.msgpack.decode(server.asked[2][3])
    assert read[0] == read[1] == {"tokens": [list(range(500))], "masks": [[-100] * 500], "scores": [0.5]}
