"""vLLM's token route as the package `renderers` reads it: names of tokens, policy versions by session, gate and key."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from packaging.version import Version

from atroposlib.wire.bridge import AdapterOffer
from atroposlib.wire.sessions import Call, digest
from tests.unit.vllm_patching.fake_engine import BridgeClient, FakeEngine, serving
from vllm_patching.compat import vllm_engine
from vllm_patching.engines.adapters import AdapterEngine
from vllm_patching.http.renderers import Conversations, _served_version

ROUTE = "/renderers/inference/v1/generate"
BODY = {"model": "m", "token_ids": [5, 6], "sampling_params": {"logprobs": 1}}


def choice(ids: list[int], *versions: int, finish_reason: str = "stop") -> dict[str, Any]:
    """One sampled sequence in the form of vLLM 0.32, each token labelled with the version that it came from."""
    content = [{"token_id": token, "logprob": -token / 10, "rank": 1, "top_logprobs": []} for token in ids]
    spans = [{"version": str(version), "start": start, "end": start + 1} for start, version in enumerate(versions)]
    found = {"index": 0, "token_ids": ids, "finish_reason": finish_reason, "logprobs": {"content": content}}
    return found | ({"weight_versions": spans} if versions else {})


@asynccontextmanager
async def vllm(
    answer: Callable[[Any], Any], engine: FakeEngine | None = None, **arguments: Any
) -> AsyncIterator[BridgeClient]:
    """Our endpoints, in front of a token route that gives what `answer` makes of the body."""
    async with serving(engine or FakeEngine(1), **arguments) as client:
        app: FastAPI = client._transport.app  # type: ignore[attr-defined]

        @app.post("/inference/v1/generate")
        async def generate(request: Request) -> Any:
            found = answer(await request.json())
            return await found if asyncio.iscoroutine(found) else found

        @app.get("/v1/models")
        async def models() -> Any:
            return {"data": [{"id": "m", "max_model_len": 64}]}

        yield client


async def versions(client: httpx.AsyncClient, session: str) -> list[Any]:
    calls: list[Any] = (await client.get(f"/renderers/v1/sessions/{session}")).json()["calls"]
    return calls


@pytest.fixture(autouse=True)
def labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "VERSION", Version("0.32"))


async def test_each_log_probability_names_its_token_and_the_rest_is_vllm_s() -> None:
    asked: list[Any] = []

    def answer(body: Any) -> Any:
        asked.append(body)
        return {"request_id": "r", "choices": [choice([7, 8], 3)], "usage": {"total_tokens": 4}}

    async with vllm(answer) as client:
        reply = (await client.post(ROUTE, json=BODY)).json()
        plain = (await client.post("/inference/v1/generate", json=BODY)).json()
    assert asked == [BODY, BODY]
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry.pop("token") for entry in content] == ["token_id:7", "token_id:8"]
    assert reply == plain


async def test_the_versions_of_each_reply_are_noted_under_the_session_of_its_request() -> None:
    replies = [choice([7], 3), choice([8, 9], 3, 4)]

    async with vllm(lambda body: {"choices": [replies.pop(0)]}) as client:
        for _ in range(2):
            await client.post(ROUTE, json=BODY, headers={"X-Session-ID": "a"})
        noted, unknown = await versions(client, "a"), await versions(client, "b")
    assert noted == [
        {"sampled": digest([7]), "policy_versions": [3, 3], "version_spans": [[0, 3]]},
        {"sampled": digest([8, 9]), "policy_versions": [3, 4], "version_spans": [[0, 3], [1, 4]]},
    ]
    assert unknown == []


async def test_where_vllm_labels_nothing_the_versions_are_those_at_the_request_s_ends() -> None:
    engine = FakeEngine(1)

    async def answer(body: Any) -> Any:
        if body["token_ids"] == [1]:
            await client.committed(2)
        return {"choices": [choice(body["token_ids"])]}

    async with vllm(answer, engine) as client:
        await client.opened()
        await client.committed(1)
        for ids in ([1], [2]):
            await client.post(ROUTE, json={**BODY, "token_ids": ids}, headers={"X-Session-ID": "a"})
        noted = await versions(client, "a")
    assert [(call["policy_versions"], call["version_spans"]) for call in noted] == [
        ([1, 2], None),
        ([2, 2], [[0, 2]]),
    ]


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_sequence_that_vllm_gave_up_is_no_answer(reason: str) -> None:
    async with vllm(lambda body: {"choices": [choice([7], 1, finish_reason=reason)]}) as client:
        reply = await client.post(ROUTE, json=BODY, headers={"X-Session-ID": "a"})
        assert (reply.status_code, await versions(client, "a")) == (503, [])


async def test_a_closed_gate_refuses_vllm_s_route_and_ours_and_versions_can_still_be_read() -> None:
    async with vllm(lambda body: {"choices": [choice([7], 1)]}) as client:
        await client.post(ROUTE, json=BODY, headers={"X-Session-ID": "a"})
        client._transport.app.state.gate.close("weights", "half updated")  # type: ignore[attr-defined]
        replies = [await client.post(path, json=BODY) for path in (ROUTE, "/inference/v1/generate")]
        assert len(await versions(client, "a")) == 1
    assert [(reply.status_code, reply.json()["error"]["message"]) for reply in replies] == [(503, "half updated")] * 2


async def test_errors_and_what_is_no_json_come_as_vllm_gave_them() -> None:
    from fastapi import HTTPException, Response

    async def answer(body: Any) -> Any:
        if body["token_ids"] == [1]:
            raise HTTPException(400, "too long")
        return Response(b"data: {}\n\n", media_type="text/event-stream")

    async with vllm(answer) as client:
        refused = await client.post(ROUTE, json={**BODY, "token_ids": [1]})
        streamed = await client.post(ROUTE, json=BODY, headers={"X-Session-ID": "a"})
    assert (refused.status_code, refused.json()["detail"]) == (400, "too long")
    assert (streamed.status_code, streamed.content) == (200, b"data: {}\n\n")


@pytest.mark.parametrize("body", [b'{"model": "\xff"}', b'{"x": ' + b"[" * 100_000, b'{"model": 1}', b"{"])
def test_a_body_that_cannot_be_read_samples_from_no_adapter(body: bytes) -> None:
    """vLLM reports it."""
    lora = object.__new__(AdapterEngine)
    sessions: Any = SimpleNamespace(engines={AdapterOffer: lora}, serving=SimpleNamespace(policy_version=3))
    assert _served_version(sessions, body) == 3


@pytest.mark.parametrize("session", ["", "x" * 129, "a\tb"])
async def test_a_session_id_that_is_none_is_refused(session: str) -> None:
    async with vllm(lambda body: {"choices": []}) as client:
        reply = await client.post(ROUTE, json=BODY, headers={"X-Session-ID": session})
    assert reply.status_code == 400
    assert "X-Session-ID" in reply.json()["error"]["message"]


async def test_the_server_s_key_guards_all_of_it() -> None:
    async with vllm(lambda body: {"choices": []}, api_key=["secret"]) as client:
        for headers, expected in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            replies = [
                await client.post(ROUTE, json=BODY, headers=headers),
                await client.get("/renderers/v1/models", headers=headers),
                await client.get("/renderers/v1/sessions/a", headers=headers),
            ]
            assert [reply.status_code for reply in replies] == [expected] * 3


async def test_models_are_vllm_s() -> None:
    async with vllm(lambda body: None) as client:
        assert (await client.get("/renderers/v1/models")).json() == {"data": [{"id": "m", "max_model_len": 64}]}


def test_the_session_used_longest_ago_is_forgotten_first() -> None:
    kept, call = Conversations(most=4), Call("s", [1, 1], None)
    kept.note("a", [call, call])
    kept.note("b", [call])
    kept.note("a", [call])
    kept.note("c", [call])
    assert [len(kept.calls(session)) for session in "abc"] == [3, 0, 1]
