"""Who may hand weights to a server, and what a commit does: the routes' own promises, in front of a fake engine.

A version is served on all ranks or on none, versions rise by one, and what a session has not staged is never served.
"""

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from atroposlib.processes.identity import this_process
from atroposlib.wire.bridge import BroadcastOffer, SingleCopyOffer
from atroposlib.wire.processes import Process
from tests.unit.vllm_patching.fake_engine import MANIFEST, FakeEngine, serving
from tests.waiting import until
from vllm_patching import compat

TP_SIZE = 2


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(TP_SIZE)


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(engine) as client:
        yield client


def broadcast(session: str = "a", **changes: Any) -> dict[str, Any]:
    offer = BroadcastOffer(
        session=session,
        trainer="h:1",
        lease_s=60.0,
        address="127.0.0.1",
        port=29500,
        world_size=1 + TP_SIZE,
        backend="gloo",
        manifest_digest=MANIFEST.digest(),
        bucket_bytes=1000,
        timeout_s=10.0,
    )
    return msgspec.to_builtins(msgspec.structs.replace(offer, **changes))  # type: ignore[no-any-return]


def single_copy(session: str = "a", process: Process | None = None, **changes: Any) -> dict[str, Any]:
    offer = SingleCopyOffer(
        session=session,
        trainer="h:1",
        lease_s=60.0,
        manifest_digest=MANIFEST.digest(),
        process=process or this_process(),
    )
    return msgspec.to_builtins(msgspec.structs.replace(offer, **changes))  # type: ignore[no-any-return]


def process_of(pid: int) -> Process:
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return msgspec.structs.replace(this_process(), pid=pid, started=started)


async def post(client: httpx.AsyncClient, route: str, **body: Any) -> httpx.Response:
    return await client.post(f"/v1/bridge/{route}", json=body)


async def refusal(client: httpx.AsyncClient, route: str, **body: Any) -> tuple[int, str]:
    reply = await post(client, route, **body)
    return reply.status_code, reply.json()["error"]["message"]


async def status(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/v1/bridge/status")).json()
    return found


async def opened(client: httpx.AsyncClient, session: str = "a", **changes: Any) -> None:
    reply = await post(client, "session", **broadcast(session, **changes))
    assert reply.status_code == 200, reply.text


async def committed(client: httpx.AsyncClient, engine: FakeEngine, version: int, session: str = "a") -> None:
    engine.stage(session, version)
    assert (await post(client, "commit", session=session, policy_version=version)).json()["policy_version"] == version


# --- commit -----------------------------------------------------------------------------------------------------


async def test_a_commit_swaps_all_ranks_between_pause_and_resume(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await opened(client)
    engine.stage("a", 1)
    reply = (await post(client, "commit", session="a", policy_version=1)).json()
    assert engine.events == ["pause keep", "bridge_apply", "label 1", "resume"]
    assert [rank.served for rank in engine.ranks] == [[1], [1]]
    assert reply["policy_version"] == (await status(client))["policy_version"] == 1
    assert reply["stall_s"] >= reply["pause_s"] >= 0
    assert reply["apply_s"] == 0.001


@pytest.mark.parametrize("staged", [(0,), (1,)])
async def test_a_version_that_some_ranks_have_not_staged_is_served_on_none(
    client: httpx.AsyncClient, engine: FakeEngine, staged: tuple[int, ...]
) -> None:
    await opened(client)
    engine.stage("a", 1, *staged)
    assert await refusal(client, "commit", session="a", policy_version=1) == (
        409,
        "policy version 1 is staged on 1 of 2 workers; send it whole first",
    )
    assert (engine.events, [rank.served for rank in engine.ranks]) == ([], [[], []])
    assert (await status(client))["policy_version"] == 0
    await committed(client, engine, 1)


async def test_what_another_session_staged_is_not_served(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await opened(client)
    engine.stage("before", 1)
    assert "staged on 0 of 2 workers" in (await refusal(client, "commit", session="a", policy_version=1))[1]
    code, why = await refusal(client, "commit", session="before", policy_version=1)
    assert code == 404
    assert "session before is not the current one (session a of h:1 is)" in why
    assert engine.events == []


async def test_versions_rise_by_one_from_the_first_that_a_session_commits(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await opened(client)
    await committed(client, engine, 7)  # of a run that was resumed
    engine.events.clear()
    for version in (5, 6, 7, 9, 10):
        engine.stage("a", version)
        code, why = await refusal(client, "commit", session="a", policy_version=version)
        assert (code, why) == (409, f"policy version {version} does not follow 7: it must rise by one")
    assert engine.events == []
    assert (await status(client))["policy_version"] == 7
    await committed(client, engine, 8)
    assert [rank.served for rank in engine.ranks] == [[7, 8], [7, 8]]


async def test_a_rank_that_fails_in_the_middle_poisons_the_weights_until_a_whole_version_is_served(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await opened(client)
    await committed(client, engine, 1)
    engine.events.clear()
    engine.ranks[1].breaks = True
    engine.stage("a", 2)
    code, why = await refusal(client, "commit", session="a", policy_version=2)
    assert code == 500
    assert "bridge_apply failed on rank 1: RuntimeError: this rank is broken" in why
    assert engine.events == ["pause keep", "bridge_apply", "pause abort"]
    found = await status(client)
    assert found["policy_version"] == 1
    assert "commit of policy version 2 failed" in found["poisoned"]
    assert found["refusing"] == found["poisoned"]
    sampled = await client.post("/generate", json={"prompt": "x"})
    assert sampled.status_code == 503
    assert "the weights are half updated" in sampled.json()["error"]["message"]

    engine.ranks[1].breaks = False
    await committed(client, engine, 2)
    found = await status(client)
    assert (found["policy_version"], found["poisoned"], found["refusing"], found["paused"]) == (2, None, None, False)


# --- sessions ---------------------------------------------------------------------------------------------------


async def test_one_trainer_at_a_time(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await opened(client)
    for route, offer in (("session", broadcast("b")), ("attach", single_copy("b"))):
        code, why = await refusal(client, route, **offer)
        assert code == 409
        assert "trainer h:1 holds session a for another 60 s: stop it, or wait for its lease to end" in why
    engine.ranks[0].status.state = "failed"
    assert (await post(client, "session", **broadcast("b"))).status_code == 409  # one rank still has its trainer
    engine.ranks[1].status.state = "failed"
    assert (await post(client, "session", **broadcast("b"))).status_code == 200
    code, _ = await refusal(client, "commit", session="a", policy_version=1)
    assert code == 404
    assert (await post(client, "session/a/heartbeat")).status_code == 404
    assert (await post(client, "session/b/heartbeat")).json() == {"lease_s": 60.0, "policy_version": 0}


async def test_a_lease_ends_unless_it_is_renewed(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    await opened(client)
    now[0] += 59
    assert (await status(client))["lease_left_s"] == 1.0
    assert (await post(client, "session", **broadcast("b"))).status_code == 409
    assert (await post(client, "session/a/heartbeat")).status_code == 200
    now[0] += 59
    assert (await post(client, "session", **broadcast("b"))).status_code == 409
    await committed(client, engine, 1)  # a sign of life too
    now[0] += 59
    assert (await post(client, "session", **broadcast("b"))).status_code == 409
    now[0] += 2
    assert (await post(client, "session", **broadcast("b"))).status_code == 200


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"world_size": 2}, 422, "world_size 2: this server has 2 worker(s), so it must be 3"),
        ({"world_size": 4}, 422, "world_size 4: this server has 2 worker(s), so it must be 3"),
        ({"manifest_digest": "0" * 64}, 409, "trainer and vLLM have different models"),
        ({"lease_s": -1.0}, 400, "lease_s"),
        ({"senders": {"shard_size": 2, "layouts": ["x", "x"]}}, 422, "sender 0 divides the tensors differently"),
        ({"senders": {"shard_size": 2}}, 422, "0 layouts for 2 senders"),
        ({"senders": {"shard_size": 64, "tp_size": 32}}, 422, "2048 senders: a server takes at most 1024"),
        ({"senders": {"shard_size": 0}}, 400, "shard_size"),
        ({"cuts": 2}, 400, "unknown fields ['cuts']"),  # as a server of protocol 1 says of `senders`
    ],
)
async def test_an_offer_that_does_not_fit_opens_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, change: dict[str, Any], code: int, says: str
) -> None:
    found, why = await refusal(client, "session", **broadcast() | change)
    assert (found, says in why) == (code, True), why
    assert (await status(client))["session"] is None
    assert [rank.status.state for rank in engine.ranks] == ["idle", "idle"]


async def test_a_session_that_was_left_is_over_and_serving_goes_on(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await opened(client)
    await committed(client, engine, 1)
    assert (await client.delete("/v1/bridge/session/b")).status_code == 404
    assert (await client.delete("/v1/bridge/session/a")).json() == {"policy_version": 1}
    found = await status(client)
    assert (found["session"], found["refusing"], found["policy_version"]) == (None, None, 1)
    await opened(client, "b")
    await committed(client, engine, 5, session="b")  # another session counts for itself


async def test_a_fenced_server_generates_nothing_until_a_trainer_s_next_whole_version(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await opened(client)
    await committed(client, engine, 1)
    assert (await post(client, "fence", session="b", reason="too slow")).status_code == 404
    assert (await post(client, "fence", session="a", reason="too slow")).status_code == 200
    assert engine.events[-1] == "pause abort"
    found = await status(client)
    assert (found["session"], found["poisoned"]) == (None, None)
    assert found["refusing"].startswith("too slow; a trainer's next complete sync")
    await opened(client, "b")
    assert (await status(client))["refusing"] is not None
    await committed(client, engine, 2, session="b")
    assert (await status(client))["refusing"] is None
    assert engine.paused is False


async def test_a_server_that_is_fenced_while_it_commits_stays_fenced(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """The fence does not wait for a commit, which may hang."""
    await opened(client)

    async def fence() -> None:
        assert (await post(client, "fence", session="a", reason="too slow")).status_code == 200

    engine.during["bridge_apply"] = fence
    await committed(client, engine, 1)
    found = await status(client)
    assert (found["policy_version"], found["poisoned"], found["session"]) == (1, None, None)
    assert found["refusing"].startswith("too slow")
    assert engine.paused


# --- single copy ------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, to die at the test's wish."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


async def paused(client: httpx.AsyncClient, version: int, session: str = "a", deadline_s: float = 60.0) -> None:
    reply = await post(client, "pause", session=session, policy_version=version, deadline_s=deadline_s)
    assert reply.status_code == 200, reply.text


async def test_a_gpu_has_done_its_work_before_a_trainer_writes(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "on_cpu", lambda: False)
    assert (await post(client, "attach", **single_copy())).status_code == 200
    await paused(client, 0)
    assert engine.events == ["pause keep", "bridge_quiesce"]


async def test_a_step_in_place_is_served_at_resume_and_only_as_what_it_was_announced(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert (await post(client, "attach", **single_copy())).status_code == 200
    code, why = await refusal(client, "resume", session="a", policy_version=0)
    assert code == 409
    assert "is paused not at all" in why
    await paused(client, 0)
    assert engine.events == ["pause keep"]
    for version in (1, 7):
        assert (
            "is paused for policy version 0"
            in (await refusal(client, "resume", session="a", policy_version=version))[1]
        )
    assert "is paused already" in (await refusal(client, "pause", session="a", policy_version=0, deadline_s=9))[1]
    assert engine.paused
    assert (await post(client, "resume", session="a", policy_version=0)).json()["policy_version"] == 0
    assert engine.events == ["pause keep", "label 0", "resume"]
    for version in (0, 2):
        code, why = await refusal(client, "pause", session="a", policy_version=version, deadline_s=9)
        assert (code, why) == (409, f"policy version {version} does not follow 0: it must rise by one")
    await paused(client, 1)
    assert (await post(client, "resume", session="a")).json()["policy_version"] == 0  # it wrote nothing
    assert engine.paused is False
    await paused(client, 1)
    assert (await post(client, "resume", session="a", policy_version=1)).json()["policy_version"] == 1


@pytest.mark.parametrize(
    ("elsewhere", "says"),
    [
        ({"boot_id": "another"}, "runs on another machine: single copy shares memory within one"),
        ({"pid_namespace": 1}, "runs in another container: single copy needs the same process namespace"),
    ],
)
async def test_a_trainer_whose_memory_cannot_be_shared_is_not_attached(
    client: httpx.AsyncClient, engine: FakeEngine, elsewhere: dict[str, Any], says: str
) -> None:
    offer = single_copy(process=msgspec.structs.replace(this_process(), **elsewhere))
    code, why = await refusal(client, "attach", **offer)
    assert (code, says in why) == (422, True), why
    assert (await status(client))["session"] is None


async def test_a_broadcast_s_session_cannot_pause_and_a_single_copy_s_cannot_be_fenced(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await opened(client)
    assert (await post(client, "pause", session="a", policy_version=0, deadline_s=9)).status_code == 409
    await client.delete("/v1/bridge/session/a")
    await post(client, "attach", **single_copy())
    assert (await post(client, "fence", session="a", reason="x")).status_code == 409
    assert engine.events == []


async def test_a_trainer_that_leaves_in_the_middle_of_a_step_poisons_the_weights(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await post(client, "attach", **single_copy())
    await paused(client, 0)
    assert (await client.delete("/v1/bridge/session/a")).status_code == 200
    found = await status(client)
    assert "left in the middle of policy version 0: the weights are half updated" in found["poisoned"]
    assert engine.events == ["pause keep", "pause abort"]
    await opened(client, "b")
    await committed(client, engine, 1, session="b")
    assert (await status(client))["poisoned"] is None


@pytest.mark.services
@pytest.mark.parametrize("end", ["death", "deadline"])
async def test_a_trainer_that_ends_in_the_middle_of_a_step_poisons_the_weights(
    client: httpx.AsyncClient, engine: FakeEngine, trainer: subprocess.Popen[bytes], end: str
) -> None:
    await post(client, "attach", **single_copy(process=process_of(trainer.pid)))
    await paused(client, 0, deadline_s=60.0 if end == "death" else 0.01)
    if end == "death":
        trainer.kill()
        trainer.wait()

    async def is_poisoned() -> bool:
        return (await status(client))["poisoned"] is not None

    await until(is_poisoned)
    words = {"death": "died while it updated", "deadline": "exceeded its deadline while it updated"}
    found = await status(client)
    assert words[end] in found["poisoned"]
    assert found["session"] is None
    assert (await refusal(client, "resume", session="a", policy_version=0))[0] == 404


@pytest.mark.services
async def test_a_trainer_that_may_still_write_is_kept_away_from_the_next_one_s_weights(
    client: httpx.AsyncClient, engine: FakeEngine, trainer: subprocess.Popen[bytes]
) -> None:
    await post(client, "attach", **single_copy(process=process_of(trainer.pid)))
    await paused(client, 0, deadline_s=0.01)
    await until(lambda: engine.events == ["pause keep", "pause abort"])
    engine.ranks[1].immovable = "captured CUDA graphs hold the addresses of the weights"
    code, why = await refusal(client, "attach", **single_copy("b"))
    assert code == 409
    assert f"process {trainer.pid} was in the middle of an update and still runs; end it first (captured" in why
    assert (await status(client))["session"] is None
    engine.ranks[1].immovable = None
    assert (await post(client, "attach", **single_copy("b"))).status_code == 200
    assert engine.events[2:] == ["bridge_renew", "bridge_renew"]


async def test_a_trainer_that_falls_silent_in_the_middle_of_a_step_poisons_the_weights(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    for module in ("session", "single_copy"):
        monkeypatch.setattr(f"vllm_patching.engines.{module}.time", clock)
    await post(client, "attach", **single_copy())

    async def long_step() -> None:
        now[0] += 50

    engine.during["pause"] = long_step  # the engine pauses after the step in progress, a long prefill
    await paused(client, 0, deadline_s=1000.0)
    assert (await status(client))["lease_left_s"] == 60.0  # the wait is not the trainer's silence
    now[0] += 59
    assert (await post(client, "session/a/heartbeat")).status_code == 200
    now[0] += 61
    await until(lambda: "pause abort" in engine.events)
    found = await status(client)
    assert "fell silent while it updated the weights to policy version 0" in found["poisoned"]
    assert found["session"] is None


@pytest.mark.services
async def test_who_takes_over_from_a_trainer_that_died_in_the_middle_finds_the_weights_poisoned(
    client: httpx.AsyncClient, engine: FakeEngine, trainer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before anybody has looked whether the trainer still lives."""
    monkeypatch.setattr("vllm_patching.engines.single_copy.WATCH_S", 1000.0)
    await post(client, "attach", **single_copy(process=process_of(trainer.pid)))
    await paused(client, 0)
    trainer.kill()
    trainer.wait()
    assert (await status(client))["poisoned"] is None
    await opened(client, "b")
    found = await status(client)
    assert "died while it updated the weights to policy version 0" in found["poisoned"]
    assert found["session"] == "b"
    await committed(client, engine, 1, session="b")
    assert (await status(client))["poisoned"] is None


@pytest.mark.services
async def test_a_dead_trainer_s_memory_stays_where_it_is(
    client: httpx.AsyncClient, engine: FakeEngine, trainer: subprocess.Popen[bytes]
) -> None:
    await post(client, "attach", **single_copy(process=process_of(trainer.pid)))
    await paused(client, 0)
    trainer.kill()
    trainer.wait()
    await until(lambda: "pause abort" in engine.events)
    assert (await post(client, "attach", **single_copy("b"))).status_code == 200
    assert "bridge_renew" not in engine.events


@pytest.mark.services
async def test_a_trainer_that_ends_between_steps_leaves_the_weights_whole_and_another_may_come(
    client: httpx.AsyncClient, engine: FakeEngine, trainer: subprocess.Popen[bytes]
) -> None:
    await post(client, "attach", **single_copy(process=process_of(trainer.pid)))
    await paused(client, 3)
    await post(client, "resume", session="a", policy_version=3)
    assert (await post(client, "attach", **single_copy("b"))).status_code == 409
    trainer.kill()
    trainer.wait()
    assert (await status(client))["refusing"] is None
    assert (await post(client, "attach", **single_copy("b"))).status_code == 200
    assert (await status(client))["policy_version"] == 3
