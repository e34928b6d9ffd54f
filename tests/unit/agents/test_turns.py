"""Turns that cannot be lost: retries get what they got, and a killed endpoint knows what it has sampled."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from atroposlib.agents import turn_journal
from atroposlib.agents.model_call import ModelReply
from atroposlib.agents.tape import Tape
from atroposlib.agents.turn_journal import SessionRecord, Turn, TurnJournal
from atroposlib.api.journal.journal import Journal
from atroposlib.api.journal.journal_file import JournalError
from atroposlib.envs.server_handling.errors import ServerError
from atroposlib.envs.server_handling.server_manager import StickyRoute
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer, save_tiny_tokenizer
from tests.serving import free_port
from tests.unit.agents.official_clients import AGENTS
from tests.unit.agents.support import CALL, PARAMETERS, TOKENIZER, running
from tests.unit.agents.test_official_clients import answer
from tests.waiting import until

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}]


def body(*said: str, **more: Any) -> dict[str, Any]:
    """A conversation whose messages are the user's and the model's in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)], **more}


async def test_a_repeated_request_gets_the_same_reply_and_is_sampled_once() -> None:
    async with running() as started:
        session, key = await started.session()
        first, second = await asyncio.gather(*(started.post(CHAT, body("a"), x_api_key=key) for _ in range(2)))
        third = await started.post(CHAT, body("a"), x_api_key=key)
        streamed = await started.post(CHAT, body("a", stream=True), x_api_key=key)
        assert first.json() == second.json() == third.json()
        assert first.json()["id"] in streamed.text
        assert started.server.hits["/generate"] == 1
        assert len(await started.nodes(session)) == 1
        shown = (await started.http.get(f"/sessions/{session}")).json()
        assert (shown["turns"], shown["branches"]) == (1, 0)


async def test_another_request_at_the_same_place_is_a_branch() -> None:
    async with running() as started:
        session, key = await started.session()
        for said in (("a",), ("a", "yes", "b"), ("a", "yes", "c")):
            assert (await started.post(CHAT, body(*said), x_api_key=key)).status_code == 200
        assert (await started.http.get(f"/sessions/{session}")).json()["branches"] == 1
        assert len(await started.nodes(session)) == 2


@pytest.mark.parametrize("agent", ["chat", "responses async", "messages"])
async def test_an_endpoint_started_again_has_the_same_sequences_and_replies(agent: str, tmp_path: Path) -> None:
    journal = tmp_path / "turns.journal"

    async def run(started: Any, key: str) -> str:
        ask = AGENTS[agent]
        found = (
            ask(started.url, key, False) if agent.endswith("async") else asyncio.to_thread(ask, started.url, key, False)
        )
        return str(await found)

    async with running(answer, journal) as started:
        session, key = await started.session()
        said = await run(started, key)
        before = await started.nodes(session)
        sampled = started.server.hits["/generate"]
        assert sampled == 3
    async with running(answer, journal) as started:
        assert await started.nodes(session) == before
        assert await run(started, key) == said
        assert started.server.hits["/generate"] == 0
        assert await started.nodes(session) == before


async def test_a_session_that_ended_leaves_the_journal_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_journal, "CHANGES_KEPT", 3)
    journal = tmp_path / "turns.journal"
    async with running(lambda prompt: "yes", journal) as started:
        ended, key = await started.session()
        kept, other = await started.session()
        for text in "abc":
            await started.post(CHAT, body(text), x_api_key=key)
            await started.post(CHAT, body(text), x_api_key=other)
        nodes = await started.nodes(kept)
        await started.http.post(f"/sessions/{kept}/reward", json={"reward": 1})
        await started.http.delete(f"/sessions/{ended}")
    reading = Journal(journal)
    assert len(list(reading.reader.changes())) <= 4
    reading.close()
    async with running(journal=journal) as started:
        shown = (await started.http.get("/sessions")).json()["sessions"]
        assert [(each["id"], each["turns"], each["reward"]) for each in shown] == [(kept, 3, 1.0)]
        assert await started.nodes(kept) == nodes
    reading = Journal(journal)
    list(reading.reader.changes())
    assert len(list(reading.reader.bodies())) == 3
    reading.close()


async def test_a_session_is_opened_again_by_its_id_and_several_end_at_once(tmp_path: Path) -> None:
    identity = "env~train~7~0"
    asked = {"id": identity, "reopen": True}
    async with running(journal=tmp_path / "turns.journal") as started:
        first = await started.post("/sessions", asked)
        await started.post(CHAT, body("a"), x_api_key=first.json()["key"])
        refused = await started.post("/sessions", {"id": identity})
        assert (first.status_code, refused.status_code) == (201, 409)
        other, _ = await started.session()
    async with running(journal=tmp_path / "turns.journal") as started:
        again = await started.post("/sessions", asked)
        assert (again.status_code, again.json()["key"], again.json()["turns"]) == (200, first.json()["key"], 1)
        for ended in ([identity, other], []):  # the second request is a repeated one
            reply = await started.http.delete("/sessions", params={"id": [identity, other]})
            assert reply.json() == {"ended": ended}
        assert (await started.http.get("/sessions")).json() == {"sessions": []}


async def test_the_seed_of_a_session_gives_each_of_its_requests_one() -> None:
    async with running() as started:
        seeds = []
        for seed in (5, 5, 6):
            _, key = await started.session(seed=seed)
            for text in "ab":
                await started.post(CHAT, body(text), x_api_key=key)
                seeds.append(started.server.requests[-1][1]["seed"])
        assert seeds[:2] == seeds[2:4]
        assert len(set(seeds)) == 4


def full(self: Journal, *args: Any, **named: Any) -> None:
    """A write to a full disk."""
    args[3](JournalError("the disk is full"))


@pytest.mark.parametrize("fails", ["the snapshot", "the change"])
async def test_a_change_and_the_snapshot_after_it_fail_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A disk that has room for one of them alone: what was refused is not done, and what is done is not refused."""
    monkeypatch.setattr(turn_journal, "CHANGES_KEPT", 2)
    write = Journal.write

    def half_full(self: Journal, *args: Any, replaces: bool = False, **named: Any) -> None:
        if replaces == (fails == "the snapshot"):
            full(self, *args)
        else:
            write(self, *args, replaces=replaces, **named)

    with contextlib.closing(TurnJournal(tmp_path / "turns.journal")) as journal:
        await journal.write_session(SessionRecord("mine", "key", {}, 1.0))
        monkeypatch.setattr(Journal, "write", half_full)
        refused = False
        try:
            await journal.end(["mine"])
        except JournalError:
            refused = True
    with contextlib.closing(TurnJournal(tmp_path / "turns.journal")) as journal:
        kept = [record.id for record, _ in journal.restored()]
    assert (refused, kept) == ((False, []) if fails == "the snapshot" else (True, ["mine"]))


@pytest.mark.parametrize("is_of_sub_agent", [False, True])
async def test_a_reply_that_is_not_on_disk_does_not_leave(
    is_of_sub_agent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(journal=tmp_path / "turns.journal") as started:
        session, key = await started.session()
        names = {"x_session_id": "sub", "x_parent_session_id": session} if is_of_sub_agent else {}
        assert (await started.post(CHAT, body("before"), x_api_key=key, **names)).status_code == 200
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write", full)
            reply = await started.post(CHAT, body("a"), x_api_key=key, **names)
            refused = await started.http.post("/sessions", json={"id": "new"})
        assert (reply.status_code, "disk is full" in reply.text) == (503, True)
        assert "disk is full" in (await started.http.get(f"/sessions/{session}")).json()["failed"]
        assert (await started.post(CHAT, body("a"), x_api_key=key, **names)).status_code == 403
        again = await started.http.post("/sessions", json={"id": "new"})
        assert (refused.status_code, again.status_code) == (503, 201)


async def test_a_failure_that_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "turns.journal"
    async with running(journal=journal) as started:
        sessions = started.endpoint.sessions
        names = [(await started.session(limits={"idle_s": 0.01}))[0] for _ in range(2)]
        late, key = await started.session()
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write", full)
            assert (await started.post(CHAT, body("a"), x_api_key=key)).status_code == 503
            await asyncio.sleep(0.05)
            with pytest.raises(JournalError, match="disk is full"):
                await sessions.expire()
            assert [sessions.by_id[name].record.failed for name in names] == ["it was idle for 0.01 s"] * 2
        await sessions.expire()
    async with running(journal=journal) as started:
        for name, cause in ((names[0], "idle"), (names[1], "idle"), (late, "disk is full")):
            assert cause in str((await started.http.get(f"/sessions/{name}")).json()["failed"])


async def test_sessions_that_ended_long_ago_are_forgotten(tmp_path: Path) -> None:
    journal = tmp_path / "turns.journal"
    async with running(journal=journal) as started:
        sessions = started.endpoint.sessions
        limits = {"kept_s": 0.01}
        rewarded, alive, kept = [(await started.session(limits=each))[0] for each in (limits, limits, {})]
        await started.session(limits=limits | {"idle_s": 0.01})
        for name in (rewarded, kept):
            assert (await started.http.post(f"/sessions/{name}/reward", json={"reward": 1})).status_code == 200
        for _ in range(2):
            await asyncio.sleep(0.05)
            await sessions.expire()
        assert [*sessions.by_id] == [alive, kept]
    async with running(journal=journal) as started:
        assert [*started.endpoint.sessions.by_id] == [alive, kept]


async def test_a_session_that_is_ended_twice_by_one_request_is_ended_once(tmp_path: Path) -> None:
    async with running(journal=tmp_path / "turns.journal") as started:
        session, key = await started.session()
        await started.post(CHAT, body("a"), x_api_key=key, x_session_id="sub", x_parent_session_id=session)
        reply = await started.http.delete("/sessions", params={"id": [f"{session}:sub"] * 2})
        assert reply.status_code == 200, reply.text
        assert (await started.http.get(f"/sessions/{session}")).json()["children"] == []


async def test_an_end_that_could_not_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "turns.journal"
    async with running(journal=journal) as started:
        session, key = await started.session()
        assert (await started.post(CHAT, body("a"), x_api_key=key)).status_code == 200
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write", full)
            assert (await started.http.delete(f"/sessions/{session}")).status_code == 503
        assert len(await started.nodes(session)) == 1
        assert (await started.http.delete(f"/sessions/{session}")).status_code == 200
    async with running(journal=journal) as started:
        assert [*started.endpoint.sessions.by_id] == []


async def test_a_reward_that_comes_while_its_session_ends_does_not_bring_it_back(tmp_path: Path) -> None:
    journal = tmp_path / "turns.journal"
    async with running(journal=journal) as started:
        sessions = started.endpoint.sessions
        session = sessions.by_id[(await started.session())[0]]
        await asyncio.gather(sessions.end([session]), session.reward(1.0))
    async with running(journal=journal) as started:
        assert [*started.endpoint.sessions.by_id] == []


async def test_a_call_that_fails_after_it_was_sampled_leaves_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent tries again, and what it gets then is all that is trained."""
    async with running(lambda prompt: CALL) as started:
        session, key = await started.session(tool_parser="vllm:hermes")
        answers = iter([ServerError("the server is gone"), ("", [("search", "{}")])])

        async def parsed(self: StickyRoute, **arguments: object) -> Any:
            if isinstance(answer := next(answers), ServerError):
                raise answer
            return answer

        monkeypatch.setattr(StickyRoute, "parse_tool_calls", parsed)
        replies = [await started.post(CHAT, body("a") | {"tools": TOOLS}, x_api_key=key) for _ in range(2)]
        assert [each.status_code for each in replies] == [502, 200]
        assert len(await started.nodes(session)) == 1


async def test_a_session_whose_one_server_has_left_has_failed_alone_after_a_restart(tmp_path: Path) -> None:
    journal = tmp_path / "turns.journal"
    async with FakeInferenceServer(lambda prompt: "yes", TOKENIZER) as joined:
        async with running(journal=journal) as started:
            await started.manager.follow({joined.base_url.removesuffix("/v1"): "serving"})
            pinned, key = await started.session(base_url=joined.base_url)
            _, other_key = await started.session()
            await started.post(CHAT, body("a"), x_api_key=key)
        async with running(journal=journal) as started:
            refused = await started.post(CHAT, body("b"), x_api_key=key)
            assert (refused.status_code, "no inference server at" in refused.text) == (403, True)
            assert len(await started.nodes(pinned)) == 1
            assert (await started.post(CHAT, body("b"), x_api_key=other_key)).status_code == 200


async def test_a_journal_that_cannot_be_taken_up_is_refused_in_one_line_and_stays_as_it_is(tmp_path: Path) -> None:
    journal = tmp_path / "turns.journal"
    async with running(journal=journal) as started:
        _, key = await started.session()
        await started.post(CHAT, body("a"), x_api_key=key)
    refusing = make_tiny_tokenizer(chat_template="{{ raise_exception('no such role') }}")
    with pytest.raises(JournalError, match=r"no such role.*tokenizer and chat template"):
        async with running(journal=journal, tokenizer=refusing):
            pass
    other = Journal(tmp_path / "api.db")
    other.keep_only(set())
    written = threading.Event()
    other.write(1, msgspec.msgpack.encode(["of", "run-api"]), [], lambda _: written.set())
    assert written.wait(30)
    other.close()
    for _ in range(2):
        with pytest.raises(JournalError, match="another program wrote it"):
            TurnJournal(tmp_path / "api.db")


async def test_a_turn_that_could_not_be_written_is_in_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn(1, "key", "place", {}, [], Tape(), ModelReply("id", 1, "fake", [], 0, 0))
    record = SessionRecord("mine", "key", {}, 1.0)
    monkeypatch.setattr(turn_journal, "CHANGES_KEPT", 1)
    with contextlib.closing(TurnJournal(tmp_path / "turns.journal")) as journal:
        await journal.write_session(record)
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write", full)
            with pytest.raises(JournalError):
                await journal.write_turn("mine", turn)
        await journal.write_turn("mine", turn)
    with contextlib.closing(TurnJournal(tmp_path / "turns.journal")) as journal:
        assert journal.restored() == [(record, [turn])]


async def test_a_turn_that_fails_beside_one_that_brings_a_snapshot_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes the small turn and the snapshot, and the large turn of another call not."""
    small, large = (
        Turn(order, f"key {order}", "place", {"text": text}, [], Tape(), ModelReply("id", 1, "fake", [], 0, 0))
        for order, text in enumerate(("", "x" * 10_000))
    )
    record = SessionRecord("mine", "key", {}, 1.0)
    insert = Journal._insert

    def nearly_full(db: sqlite3.Connection, write: Any, newest: Any) -> Any:
        if sum(len(body.data) for body in write.bodies) > 10_000:
            raise sqlite3.OperationalError("database or disk is full")
        return insert(db, write, newest)

    monkeypatch.setattr(turn_journal, "CHANGES_KEPT", 2)
    monkeypatch.setattr(Journal, "_insert", staticmethod(nearly_full))
    with contextlib.closing(TurnJournal(tmp_path / "turns.journal")) as journal:
        await journal.write_session(record)
        written = asyncio.gather(*(journal.write_turn("mine", each) for each in (small, large)), return_exceptions=True)
        assert list(map(type, await written)) == [type(None), JournalError]
    with contextlib.closing(TurnJournal(tmp_path / "turns.journal")) as journal:
        assert journal.restored() == [(record, [small])]


async def test_a_session_that_is_ended_while_it_is_written_has_ended(tmp_path: Path) -> None:
    turn = Turn(1, "key", "place", {}, [], Tape(), ModelReply("id", 1, "fake", [], 0, 0))
    with contextlib.closing(TurnJournal(tmp_path / "turns.journal")) as journal:
        record = SessionRecord("mine", "key", {}, 1.0)
        await asyncio.gather(
            journal.write_session(record), journal.end(["mine"]), journal.write_turn("mine", turn), journal.end(["no"])
        )
    with contextlib.closing(TurnJournal(tmp_path / "turns.journal")) as journal:
        assert journal.restored() == []


async def test_a_turn_that_is_not_in_its_journal_is_damage_whose_remedies_are_the_endpoints(tmp_path: Path) -> None:
    journal = tmp_path / "turns.journal"
    async with running(journal=journal) as started:
        _, key = await started.session()
        await started.post(CHAT, body("a"), x_api_key=key)
    with contextlib.closing(sqlite3.connect(journal)) as db, db:
        db.execute("DELETE FROM bodies")
    with pytest.raises(JournalError, match=r"1 turns have no body.*give another path$"):  # run-api does not read it
        TurnJournal(journal)


@pytest.mark.services
async def test_an_endpoint_killed_in_the_middle_of_a_session_loses_no_turn_and_samples_none_twice(
    tmp_path: Path,
) -> None:
    turns = 12
    port = free_port()
    folder = save_tiny_tokenizer(tmp_path / "tokenizer", [("a", "t"), ("e", "r"), ("t", "h")])
    async with FakeInferenceServer(lambda prompt: f"turn {prompt.count('next')} {CALL}", TOKENIZER) as server:
        command = (
            sys.executable, "-m", "atroposlib.agents.serve", "--server", server.base_url, "--model", "fake",
            "--tokenizer", str(folder), "--port", str(port), "--journal", str(tmp_path / "turns.journal"),
        )  # fmt: skip
        process = await asyncio.create_subprocess_exec(*command)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
            await until(lambda: _serves(http))
            made = (await http.post("/sessions", json={})).json()
            messages: list[dict[str, Any]] = [{"role": "user", "content": "next"}]
            replies = []
            for turn in range(turns):
                asked = {"messages": messages, "tools": TOOLS, "max_tokens": 99}
                headers = {"authorization": f"Bearer {made['key']}"}
                first = (await http.post(CHAT, json=asked, headers=headers)).json()
                if turn in (4, 8):
                    os.kill(process.pid, signal.SIGKILL)
                    await process.wait()
                    process = await asyncio.create_subprocess_exec(*command)
                    await until(lambda: _serves(http))
                    again = (await http.post(CHAT, json=asked, headers=headers)).json()
                    assert again == first
                replies.append(first["choices"][0]["message"])
                call = replies[-1]["tool_calls"][0]["id"]
                messages += [replies[-1], {"role": "tool", "tool_call_id": call, "content": "next"}]
            state = (await http.get(f"/sessions/{made['id']}/nodes")).json()
        process.send_signal(signal.SIGINT)
        await process.wait()
        assert server.hits["/generate"] == turns
    (node,) = state["nodes"]
    assert (state["turns"], state["branches"]) == (turns, 0)
    trained = TOKENIZER.decode([token for token in node["masked_tokens"] if token != -100])
    assert trained == "".join(f"turn {turn + 1} {CALL}<|im_end|>" for turn in range(turns))


async def _serves(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


async def test_while_a_session_is_ended_it_gets_no_child_that_would_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ending, may_end, end = asyncio.Event(), asyncio.Event(), TurnJournal.end

    async def slowly(journal: TurnJournal, sessions: Any) -> None:
        is_ending.set()
        await may_end.wait()
        await end(journal, sessions)

    monkeypatch.setattr(TurnJournal, "end", slowly)
    async with running(journal=tmp_path / "turns.db") as started:
        session, key = await started.session()
        ended = asyncio.create_task(started.http.delete(f"/sessions/{session}"))
        await is_ending.wait()
        names: list[dict[str, str]] = [{}, {"x_session_id": "sub", "x_parent_session_id": session}]
        late = [await started.post(CHAT, body("a"), x_api_key=key, **more) for more in names]
        may_end.set()
        assert (await ended).status_code == 200
        for reply in late:
            assert (reply.status_code, "nobody trains on it" in reply.text) == (403, True), reply.text
        assert (await started.http.get("/sessions")).json() == {"sessions": []}
        assert started.server.requests == []
    async with running(journal=tmp_path / "turns.db") as started:
        assert (await started.http.get("/sessions")).json() == {"sessions": []}
