"""What a rollout may use, with all of its sub-agents: calls, tokens, seconds, bytes; and what happens beyond it."""

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer
from tests.unit.agents.support import running
from tests.waiting import until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def test_limits_end_a_session_with_a_cause_and_without_a_reward() -> None:
    async with running() as started:
        for limits, cause in (
            ({"turns": 1}, "more than 1 calls"),
            ({"tokens": 1}, "sampled 1 tokens"),
            ({"megabytes": 0.0001}, "MB"),
            ({"time_s": 0.1}, "took more than 0.1 s"),
        ):
            session, key = await started.session(limits=limits)
            first = await started.post(CHAT, BODY, x_api_key=key)
            if "time_s" in limits:
                await _expired(started, session)
            second = await started.post(CHAT, BODY | {"temperature": 0.5}, x_api_key=key)
            assert (first.status_code, second.status_code) == (200, 403), second.text
            shown = (await started.http.get(f"/sessions/{session}")).json()
            assert cause in shown["failed"]
            assert shown["reward"] is None
            rewarded = await started.http.post(f"/sessions/{session}/reward", json={"reward": 0.0})
            assert rewarded.status_code == 409
        session, key = await started.session(limits={"children": 1})
        for child, status in (("one", 200), ("two", 403)):
            headers = {"x_api_key": key, "x_parent_session_id": session, "x_session_id": child}
            assert (await started.post(CHAT, BODY, **headers)).status_code == status


@pytest.fixture
def counted_by(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The thread of each count of a prompt's tokens."""
    threads = []
    length = ManagedServer.prompt_length

    def noted(*arguments: Any) -> int:
        threads.append(threading.current_thread())
        return length(*arguments)

    monkeypatch.setattr(ManagedServer, "prompt_length", noted)
    return threads


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages/count_tokens", said("hi")), ("/v1/responses/input_tokens", {"input": said("hi")["messages"]})],
)
async def test_counting_tokens_uses_bytes_and_no_turn_and_ends_with_the_session(
    path: str, body: dict[str, Any], counted_by: list[threading.Thread]
) -> None:
    async with running() as started:
        _, key = await started.session(limits={"turns": 1})
        assert (await started.post(CHAT, BODY, x_api_key=key)).status_code == 200
        counted_by.clear()  # of the endpoint's start and the call
        assert (await started.post(path, body, x_api_key=key)).status_code == 200
        assert threading.main_thread() not in counted_by
        session, key = await started.session(limits={"megabytes": 0.0001})
        answers = [await started.post(path, body, x_api_key=key) for _ in range(4)]
        assert [each.status_code for each in answers[-2:]] == [403, 403]
        assert "MB" in (await started.http.get(f"/sessions/{session}")).json()["failed"]


async def test_each_answer_to_a_call_counts_as_one() -> None:
    async with running() as started:
        session, key = await started.session(limits={"turns": 3})
        for n, status in ((2, 200), (1, 200), (1, 403)):
            reply = await started.post(CHAT, said(f"{n} {status}") | {"n": n}, x_api_key=key)
            assert reply.status_code == status, reply.text
        session, key = await started.session(limits={"turns": 3})
        assert (await started.post(CHAT, BODY | {"n": 16_384}, x_api_key=key)).status_code == 403
        assert "more than 3 calls" in (await started.http.get(f"/sessions/{session}")).json()["failed"]
        session, key = await started.session(limits={"turns": 3})
        started.server.delay_s = 0.3
        calls = [started.post(CHAT, said(f"{n}") | {"n": 2}, x_api_key=key) for n in range(2)]
        assert sorted(reply.status_code for reply in await asyncio.gather(*calls)) == [403, 403]


async def test_the_tokens_of_a_large_prompt_are_counted_while_others_are_answered(
    counted_by: list[threading.Thread],
) -> None:
    async with running(context=1000) as started:
        _, key = await started.session()
        counted_by.clear()  # of the endpoint's start
        large = await started.post(CHAT, said("x" * 100_000), x_api_key=key)
        assert large.json()["error"]["code"] == "context_length_exceeded"
        assert (await started.post(CHAT, BODY, x_api_key=key)).status_code == 200
    assert [thread is threading.main_thread() for thread in counted_by] == [False, True]


async def test_an_idle_session_has_failed_and_a_rewarded_one_keeps_its_reward() -> None:
    async with running() as started:
        idle, _ = await started.session(limits={"idle_s": 0.05})
        rewarded, _ = await started.session(limits={"idle_s": 0.05})
        assert (await started.http.post(f"/sessions/{rewarded}/reward", json={"reward": 0.25})).status_code == 200
        await _expired(started, idle)
        assert "idle" in (await started.http.get(f"/sessions/{idle}")).json()["failed"]
        shown = (await started.http.get(f"/sessions/{rewarded}")).json()
        assert (shown["reward"], shown["failed"]) == (0.25, None)
        for wrong in ("high", None, True):
            assert (await started.http.post(f"/sessions/{rewarded}/reward", json={"reward": wrong})).status_code == 400


async def _expired(started: Any, session: str) -> None:
    async def failed() -> bool:
        return (await started.http.get(f"/sessions/{session}")).json()["failed"] is not None

    await until(failed)


async def test_no_call_samples_more_tokens_than_are_left() -> None:
    async with running(lambda prompt: "x" * 99) as started:
        session, key = await started.session(limits={"tokens": 7})
        for text, most in (("a", 5), ("b", 99)):
            reply = await started.post(CHAT, said(text) | {"max_tokens": most}, x_api_key=key)
            assert reply.json()["choices"][0]["finish_reason"] == "length"
        shown = (await started.http.get(f"/sessions/{session}")).json()
        assert (shown["sampled_tokens"], started.server.requests[-1][1]["max_tokens"]) == (7, 2)


async def test_a_call_that_lasts_beyond_the_limit_of_time_ends_with_the_session() -> None:
    async with running() as started:
        session, key = await started.session(limits={"time_s": 0.2})
        other, others_key = await started.session()
        started.server.delay_s = 20.0
        began = time.monotonic()
        late = await started.post(CHAT, BODY, x_api_key=key)
        assert time.monotonic() - began < 10
        assert (late.status_code, late.json()["error"]["code"]) == (403, "session_ended")
        assert "0.2 s" in (await started.http.get(f"/sessions/{session}")).json()["failed"]
        started.server.delay_s = 0.0
        assert (await started.post(CHAT, BODY, x_api_key=others_key)).status_code == 200
        assert len(await started.nodes(other)) == 1


async def test_a_call_of_a_session_that_is_deleted_meanwhile_is_refused() -> None:
    async with running() as started:
        session, key = await started.session()
        started.server.delay_s = 20.0
        asked = asyncio.create_task(started.post(CHAT, BODY, x_api_key=key))

        async def has_begun() -> bool:
            return bool(started.server.requests)

        await until(has_begun)
        assert (await started.http.delete(f"/sessions/{session}")).status_code == 200
        assert (await asked).status_code == 403


async def test_an_agent_that_has_left_its_stream_leaves_no_error_when_its_session_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(keep_alive_s=0.01) as run:
        session, key = await run.session()
        run.server.delay_s = 30.0
        body = {**BODY, "stream": True}
        async with run.http.stream("POST", CHAT, json=body, headers={"Authorization": f"Bearer {key}"}) as stream:
            await anext(stream.aiter_lines())
        assert (await run.http.delete(f"/sessions/{session}")).status_code == 200

        async def has_ended() -> bool:
            return not any("Session.answer" in str(task.get_coro()) for task in asyncio.all_tasks())

        await until(has_ended)
        gc.collect()
    assert "Session.answer" not in caplog.text  # other tests' clients end here, too


async def test_time_and_bytes_that_a_session_has_used_are_used_after_a_restart(tmp_path: Path) -> None:
    journal = tmp_path / "turns.journal"
    async with running(journal=journal) as started:
        late, late_key = await started.session(limits={"time_s": 5.0})
        large, large_key = await started.session(limits={"megabytes": 0.001})
        assert (await started.post(CHAT, said("x" * 600), x_api_key=large_key)).status_code == 200
        await asyncio.sleep(2)
        assert (await started.post(CHAT, BODY, x_api_key=late_key)).status_code == 200
    async with running(journal=journal) as started:
        assert (await started.post(CHAT, said("y" * 600), x_api_key=large_key)).status_code == 403
        assert "MB" in (await started.http.get(f"/sessions/{large}")).json()["failed"]
        assert (await started.http.get(f"/sessions/{late}")).json()["failed"] is None
        await asyncio.sleep(3.5)
        assert (await started.post(CHAT, said("more"), x_api_key=late_key)).status_code == 403
        assert "5 s" in (await started.http.get(f"/sessions/{late}")).json()["failed"]


async def test_sub_agents_use_what_their_rollout_may_use() -> None:
    async with running() as started:
        session, key = await started.session(limits={"turns": 2})
        for name, status in (("one", 200), ("two", 200), ("one", 403)):
            more = {"x_session_id": name, "x_parent_session_id": session}
            reply = await started.post(CHAT, said(f"{name} {status}"), x_api_key=key, **more)
            assert reply.status_code == status, reply.text
        assert "more than 2 calls" in (await started.http.get(f"/sessions/{session}")).json()["failed"]


async def test_a_sub_agent_of_a_sub_agent_counts_among_the_children_and_is_idle_as_long_as_it_likes() -> None:
    async with running() as started:
        session, key = await started.session(limits={"children": 2, "idle_s": 1.5})
        for name, parent, status in (("a", session, 200), ("b", "a", 200), ("c", "b", 403), ("c", session, 403)):
            reply = await started.post(CHAT, BODY, x_api_key=key, x_session_id=name, x_parent_session_id=parent)
            assert reply.status_code == status, reply.text
        for text in "de":
            await asyncio.sleep(1.0)
            assert (await started.post(CHAT, said(text), x_api_key=key)).status_code == 200
        shown = (await started.http.get("/sessions")).json()["sessions"]
        assert [each["id"] for each in shown] == [session, f"{session}:a", f"{session}:a:b"]
        assert [each["failed"] for each in shown] == [None] * 3
        assert len(await started.nodes(session)) == 4


async def test_names_of_an_agents_own_stay_inside_of_its_session() -> None:
    """Two agents of one program call their main loop and its helpers by the same names."""
    async with running() as started:
        sessions = [await started.session() for _ in range(2)]
        for session, key in sessions:
            names = {"x_session_id": "main"}
            assert (await started.post(CHAT, said("a"), x_api_key=key, **names)).status_code == 200
            names = {"x_session_id": "helper", "x_parent_session_id": "main"}
            assert (await started.post(CHAT, said("b"), x_api_key=key, **names)).status_code == 200
            shown = (await started.http.get(f"/sessions/{session}")).json()
            assert (shown["turns"], shown["children"]) == (1, [f"{session}:helper"])
            assert len(await started.nodes(session)) == 2
        stolen = {"x_session_id": "x", "x_parent_session_id": sessions[0][0]}
        assert (await started.post(CHAT, said("c"), x_api_key=sessions[1][1], **stolen)).status_code == 403


async def test_the_name_of_a_sub_agent_is_no_longer_than_a_sessions_id() -> None:
    async with running() as started:
        session, key = await started.session()
        for name, status in ("x" * 200, 200), ("x" * 60_000, 400):
            reply = await started.post(CHAT, BODY, x_api_key=key, x_session_id=name, x_parent_session_id=session)
            assert reply.status_code == status, reply.text


async def test_no_name_of_a_sub_agent_is_another_rollouts_session() -> None:
    async with running() as started:
        key, _ = [(await started.post("/sessions", {"id": name})).json()["key"] for name in ("job", "job:1")]
        for name, status in (("1", 403), ("2", 200)):
            names = {"x_session_id": name, "x_parent_session_id": "job"}
            assert (await started.post(CHAT, BODY, x_api_key=key, **names)).status_code == status
        assert (await started.post("/sessions", {"id": "job:2", "reopen": True})).status_code == 403
        assert await started.nodes("job:1") == []
