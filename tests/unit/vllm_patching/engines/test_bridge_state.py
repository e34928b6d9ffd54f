"""Who may hand weights to a server, and what a commit does: the routes' own promises, in front of a fake client.engine.

A version is served on all ranks or on none, versions rise by one, and what a session has not staged is never served.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atroposlib.processes.identity import this_process
from atroposlib.wire.bridge import SingleCopyOffer
from atroposlib.wire.processes import Process
from tests.unit.vllm_patching.fake_engine import MANIFEST, BridgeClient, FakeEngine, broadcast, serving
from tests.waiting import until
from vllm_patching.compat import vllm_layers

TP_SIZE = 2


@pytest.fixture
async def client() -> AsyncIterator[BridgeClient]:
    async with serving(FakeEngine(TP_SIZE)) as client:
        yield client


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


# --- commit -----------------------------------------------------------------------------------------------------


async def test_a_commit_swaps_all_ranks_between_pause_and_resume(client: BridgeClient) -> None:
    await client.opened()
    client.engine.stage("a", 1)
    reply = (await client.order("commit", session="a", policy_version=1)).json()
    assert client.engine.events == ["pause keep", "bridge_apply", "label 1", "resume"]
    assert [rank.served for rank in client.engine.ranks] == [[1], [1]]
    assert reply["policy_version"] == (await client.status())["policy_version"] == 1
    assert reply["stall_s"] >= reply["pause_s"] >= 0
    assert reply["apply_s"] == 0.001


@pytest.mark.parametrize("staged", [(0,), (1,)])
async def test_a_version_that_some_ranks_have_not_staged_is_served_on_none(
    client: BridgeClient, staged: tuple[int, ...]
) -> None:
    await client.opened()
    client.engine.stage("a", 1, *staged)
    assert await client.refusal("commit", session="a", policy_version=1) == (
        409,
        "policy version 1 is staged on 1 of 2 workers; send it whole first",
    )
    assert (client.engine.events, [rank.served for rank in client.engine.ranks]) == ([], [[], []])
    assert (await client.status())["policy_version"] == 0
    await client.committed(1)


async def test_what_another_session_staged_is_not_served(client: BridgeClient) -> None:
    await client.opened()
    client.engine.stage("before", 1)
    assert "staged on 0 of 2 workers" in (await client.refusal("commit", session="a", policy_version=1))[1]
    code, why = await client.refusal("commit", session="before", policy_version=1)
    assert code == 404
    assert "session before is not the current one (session a of h:1 is)" in why
    assert client.engine.events == []


async def test_versions_rise_by_one_from_the_first_that_a_session_commits(client: BridgeClient) -> None:
    await client.opened()
    await client.committed(7)  # of a run that was resumed
    client.engine.events.clear()
    for version in (5, 6, 7, 9, 10):
        client.engine.stage("a", version)
        code, why = await client.refusal("commit", session="a", policy_version=version)
        assert (code, why) == (409, f"policy version {version} does not follow 7: it must rise by one")
    assert client.engine.events == []
    assert (await client.status())["policy_version"] == 7
    await client.committed(8)
    assert [rank.served for rank in client.engine.ranks] == [[7, 8], [7, 8]]


async def test_a_rank_that_fails_in_the_middle_poisons_the_weights_until_a_whole_version_is_served(
    client: BridgeClient,
) -> None:
    await client.opened()
    await client.committed(1)
    client.engine.events.clear()
    client.engine.ranks[1].breaks = True
    client.engine.stage("a", 2)
    code, why = await client.refusal("commit", session="a", policy_version=2)
    assert code == 500
    assert "bridge_apply failed on rank 1: RuntimeError: this rank is broken" in why
    assert client.engine.events == ["pause keep", "bridge_apply", "pause abort"]
    found = await client.status()
    assert found["policy_version"] == 1
    assert "commit of policy version 2 failed" in found["poisoned"]
    assert found["refusing"] == found["poisoned"]
    sampled = await client.post("/generate", json={"prompt": "x"})
    assert sampled.status_code == 503
    assert "the weights are half updated" in sampled.json()["error"]["message"]

    client.engine.ranks[1].breaks = False
    await client.committed(2)
    found = await client.status()
    assert (found["policy_version"], found["poisoned"], found["refusing"], found["paused"]) == (2, None, None, False)


# --- sessions ---------------------------------------------------------------------------------------------------


async def test_one_trainer_at_a_time(client: BridgeClient) -> None:
    await client.opened()
    for route, offer in (("session", broadcast(TP_SIZE, "b")), ("attach", single_copy("b"))):
        code, why = await client.refusal(route, **offer)
        assert code == 409
        assert "trainer h:1 holds session a for another 60 s: stop it, or wait for its lease to end" in why
    client.engine.ranks[0].status.state = "failed"
    assert (
        await client.order("session", **broadcast(TP_SIZE, "b"))
    ).status_code == 409  # one rank still has its trainer
    client.engine.ranks[1].status.state = "failed"
    assert (await client.order("session", **broadcast(TP_SIZE, "b"))).status_code == 200
    code, _ = await client.refusal("commit", session="a", policy_version=1)
    assert code == 404
    assert (await client.order("session/a/heartbeat")).status_code == 404
    assert (await client.order("session/b/heartbeat")).json() == {"lease_s": 60.0, "policy_version": 0}


async def test_a_lease_ends_unless_it_is_renewed(client: BridgeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    await client.opened()
    now[0] += 59
    assert (await client.status())["lease_left_s"] == 1.0
    assert (await client.order("session", **broadcast(TP_SIZE, "b"))).status_code == 409
    assert (await client.order("session/a/heartbeat")).status_code == 200
    now[0] += 59
    assert (await client.order("session", **broadcast(TP_SIZE, "b"))).status_code == 409
    await client.committed(1)  # a sign of life too
    now[0] += 59
    assert (await client.order("session", **broadcast(TP_SIZE, "b"))).status_code == 409
    now[0] += 2
    assert (await client.order("session", **broadcast(TP_SIZE, "b"))).status_code == 200


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
    client: BridgeClient, change: dict[str, Any], code: int, says: str
) -> None:
    found, why = await client.refusal("session", **broadcast(TP_SIZE) | change)
    assert (found, says in why) == (code, True), why
    assert (await client.status())["session"] is None
    assert [rank.status.state for rank in client.engine.ranks] == ["idle", "idle"]


async def test_a_session_that_was_left_is_over_and_serving_goes_on(client: BridgeClient) -> None:
    await client.opened()
    await client.committed(1)
    assert (await client.delete("/v1/bridge/session/b")).status_code == 404
    assert (await client.delete("/v1/bridge/session/a")).json() == {"policy_version": 1}
    found = await client.status()
    assert (found["session"], found["refusing"], found["policy_version"]) == (None, None, 1)
    await client.opened("b")
    await client.committed(5, session="b")  # another session counts for itself


async def test_a_fenced_server_generates_nothing_until_a_trainer_s_next_whole_version(client: BridgeClient) -> None:
    await client.opened()
    await client.committed(1)
    assert (await client.order("fence", session="b", reason="too slow")).status_code == 404
    assert (await client.order("fence", session="a", reason="too slow")).status_code == 200
    assert client.engine.events[-1] == "pause abort"
    found = await client.status()
    assert (found["session"], found["poisoned"]) == (None, None)
    assert found["refusing"].startswith("too slow; a trainer's next complete sync")
    await client.opened("b")
    assert (await client.status())["refusing"] is not None
    await client.committed(2, session="b")
    assert (await client.status())["refusing"] is None
    assert client.engine.paused is False


async def test_a_server_that_starts_again_in_a_run_generates_nothing_until_the_trainer_has_synced() -> None:
    async with serving(FakeEngine(TP_SIZE), await_sync=True) as client:
        assert (await client.post("/generate", json={"prompt": "x"})).status_code == 503
        assert (await client.status())["refusing"].startswith("--await-sync: m is older than the policy")
        await client.opened()
        assert (await client.status())["refusing"] is not None
        await client.committed(7)
        found = await client.status()
        assert (found["refusing"], found["policy_version"]) == (None, 7)


async def test_a_server_that_is_fenced_while_it_commits_stays_fenced(client: BridgeClient) -> None:
    """The fence does not wait for a commit, which may hang."""
    await client.opened()

    async def fence() -> None:
        assert (await client.order("fence", session="a", reason="too slow")).status_code == 200

    client.engine.during["bridge_apply"] = fence
    await client.committed(1)
    found = await client.status()
    assert (found["policy_version"], found["poisoned"], found["session"]) == (1, None, None)
    assert found["refusing"].startswith("too slow")
    assert client.engine.paused


# --- single copy ------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, to die at the test's wish."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


async def test_a_gpu_has_done_its_work_before_a_trainer_writes(
    client: BridgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_layers, "on_cpu", lambda: False)
    assert (await client.order("attach", **single_copy())).status_code == 200
    await client.paused(0)
    assert client.engine.events == ["pause keep", "bridge_quiesce"]


async def test_a_pause_that_fails_after_it_has_begun_is_ended(
    client: BridgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation hung until the next trainer's sync, without a 503."""
    monkeypatch.setattr(vllm_layers, "on_cpu", lambda: False)
    assert (await client.order("attach", **single_copy())).status_code == 200
    for step in ("bridge_quiesce", "pause"):
        client.engine.during[step] = late
        with contextlib.suppress(TimeoutError):
            await client.order("pause", session="a", policy_version=0, deadline_s=9)
        assert step not in client.engine.during
        assert (client.engine.events[-1], client.engine.paused) == ("resume", False)
    await client.paused(0)


async def late() -> None:
    raise TimeoutError


async def test_a_commit_that_fails_before_or_after_its_swap_does_not_leave_generation_paused(
    client: BridgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.opened()
    client.engine.stage("a", 1)
    client.engine.during["pause"] = late
    with pytest.raises(TimeoutError):
        await client.order("commit", session="a", policy_version=1)
    assert (client.engine.events, client.engine.paused) == (["pause keep", "resume"], False)
    monkeypatch.setattr(client.engine, "update_weight_version", lambda version: late())
    with pytest.raises(TimeoutError):
        await client.order("commit", session="a", policy_version=1)
    assert "commit of policy version 1 failed" in (await client.status())["poisoned"]


async def test_a_resume_that_fails_is_watched_like_the_pause_it_has_not_ended(
    client: BridgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.order("attach", **single_copy())
    await client.paused(0, deadline_s=0.3)
    with monkeypatch.context() as patch:
        patch.setattr(client.engine, "update_weight_version", lambda version: late())
        with pytest.raises(TimeoutError):
            await client.order("resume", session="a", policy_version=0)

    async def is_poisoned() -> bool:
        return (await client.status())["poisoned"] is not None

    await until(is_poisoned)


async def test_a_step_in_place_is_served_at_resume_and_only_as_what_it_was_announced(client: BridgeClient) -> None:
    assert (await client.order("attach", **single_copy())).status_code == 200
    code, why = await client.refusal("resume", session="a", policy_version=0)
    assert code == 409
    assert "is paused not at all" in why
    await client.paused(0)
    assert client.engine.events == ["pause keep"]
    for version in (1, 7):
        assert (
            "is paused for policy version 0" in (await client.refusal("resume", session="a", policy_version=version))[1]
        )
    assert "is paused already" in (await client.refusal("pause", session="a", policy_version=0, deadline_s=9))[1]
    assert client.engine.paused
    assert (await client.order("resume", session="a", policy_version=0)).json()["policy_version"] == 0
    assert client.engine.events == ["pause keep", "label 0", "resume"]
    for version in (0, 2):
        code, why = await client.refusal("pause", session="a", policy_version=version, deadline_s=9)
        assert (code, why) == (409, f"policy version {version} does not follow 0: it must rise by one")
    await client.paused(1)
    assert (await client.order("resume", session="a")).json()["policy_version"] == 0  # it wrote nothing
    assert client.engine.paused is False
    await client.paused(1)
    assert (await client.order("resume", session="a", policy_version=1)).json()["policy_version"] == 1


@pytest.mark.parametrize(
    ("elsewhere", "says"),
    [
        ({"boot_id": "another"}, "runs on another machine: single copy shares memory within one"),
        ({"pid_namespace": 1}, "runs in another container: single copy needs the same process namespace"),
    ],
)
async def test_a_trainer_whose_memory_cannot_be_shared_is_not_attached(
    client: BridgeClient, elsewhere: dict[str, Any], says: str
) -> None:
    offer = single_copy(process=msgspec.structs.replace(this_process(), **elsewhere))
    code, why = await client.refusal("attach", **offer)
    assert (code, says in why) == (422, True), why
    assert (await client.status())["session"] is None


async def test_a_broadcast_s_session_cannot_pause_and_a_single_copy_s_cannot_be_fenced(client: BridgeClient) -> None:
    await client.opened()
    assert (await client.order("pause", session="a", policy_version=0, deadline_s=9)).status_code == 409
    await client.delete("/v1/bridge/session/a")
    await client.order("attach", **single_copy())
    assert (await client.order("fence", session="a", reason="x")).status_code == 409
    assert client.engine.events == []


async def test_a_trainer_that_leaves_in_the_middle_of_a_step_poisons_the_weights(client: BridgeClient) -> None:
    await client.order("attach", **single_copy())
    await client.paused(0)
    assert (await client.delete("/v1/bridge/session/a")).status_code == 200
    found = await client.status()
    assert "left in the middle of policy version 0: the weights are half updated" in found["poisoned"]
    assert client.engine.events == ["pause keep", "pause abort"]
    await client.opened("b")
    await client.committed(1, session="b")
    assert (await client.status())["poisoned"] is None


@pytest.mark.services
@pytest.mark.parametrize("end", ["death", "deadline"])
async def test_a_trainer_that_ends_in_the_middle_of_a_step_poisons_the_weights(
    client: BridgeClient, trainer: subprocess.Popen[bytes], end: str
) -> None:
    await client.order("attach", **single_copy(process=process_of(trainer.pid)))
    await client.paused(0, deadline_s=60.0 if end == "death" else 0.01)
    if end == "death":
        trainer.kill()
        trainer.wait()

    async def is_poisoned() -> bool:
        return (await client.status())["poisoned"] is not None

    await until(is_poisoned)
    words = {"death": "died while it updated", "deadline": "exceeded its deadline while it updated"}
    found = await client.status()
    assert words[end] in found["poisoned"]
    assert found["session"] is None
    assert (await client.refusal("resume", session="a", policy_version=0))[0] == 404


@pytest.mark.services
async def test_a_trainer_that_may_still_write_is_kept_away_from_the_next_one_s_weights(
    client: BridgeClient, trainer: subprocess.Popen[bytes]
) -> None:
    await client.order("attach", **single_copy(process=process_of(trainer.pid)))
    await client.paused(0, deadline_s=0.01)
    await until(lambda: client.engine.events == ["pause keep", "pause abort"])
    client.engine.ranks[1].immovable = "captured CUDA graphs hold the addresses of the weights"
    code, why = await client.refusal("attach", **single_copy("b"))
    assert code == 409
    assert f"process {trainer.pid} was in the middle of an update and still runs; end it first (captured" in why
    assert (await client.status())["session"] is None
    client.engine.ranks[1].immovable = None
    assert (await client.order("attach", **single_copy("b"))).status_code == 200
    assert client.engine.events[2:] == ["bridge_renew", "bridge_renew"]


async def test_a_trainer_that_falls_silent_in_the_middle_of_a_step_poisons_the_weights(
    client: BridgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    for module in ("session", "single_copy"):
        monkeypatch.setattr(f"vllm_patching.engines.{module}.time", clock)
    await client.order("attach", **single_copy())

    async def long_step() -> None:
        now[0] += 50

    client.engine.during["pause"] = long_step  # the engine pauses after the step in progress, a long prefill
    await client.paused(0, deadline_s=1000.0)
    assert (await client.status())["lease_left_s"] == 60.0  # the wait is not the trainer's silence
    now[0] += 59
    assert (await client.order("session/a/heartbeat")).status_code == 200
    now[0] += 61
    await until(lambda: "pause abort" in client.engine.events)
    found = await client.status()
    assert "fell silent while it updated the weights to policy version 0" in found["poisoned"]
    assert found["session"] is None


@pytest.mark.services
async def test_who_takes_over_from_a_trainer_that_died_in_the_middle_finds_the_weights_poisoned(
    client: BridgeClient, trainer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before anybody has looked whether the trainer still lives."""
    monkeypatch.setattr("vllm_patching.engines.single_copy.WATCH_S", 1000.0)
    await client.order("attach", **single_copy(process=process_of(trainer.pid)))
    await client.paused(0)
    trainer.kill()
    trainer.wait()
    assert (await client.status())["poisoned"] is None
    await client.opened("b")
    found = await client.status()
    assert "died while it updated the weights to policy version 0" in found["poisoned"]
    assert found["session"] == "b"
    await client.committed(1, session="b")
    assert (await client.status())["poisoned"] is None


@pytest.mark.services
async def test_a_dead_trainer_s_memory_stays_where_it_is(
    client: BridgeClient, trainer: subprocess.Popen[bytes]
) -> None:
    await client.order("attach", **single_copy(process=process_of(trainer.pid)))
    await client.paused(0)
    trainer.kill()
    trainer.wait()
    await until(lambda: "pause abort" in client.engine.events)
    assert (await client.order("attach", **single_copy("b"))).status_code == 200
    assert "bridge_renew" not in client.engine.events


@pytest.mark.services
async def test_a_trainer_that_ends_between_steps_leaves_the_weights_whole_and_another_may_come(
    client: BridgeClient, trainer: subprocess.Popen[bytes]
) -> None:
    await client.order("attach", **single_copy(process=process_of(trainer.pid)))
    await client.paused(3)
    await client.order("resume", session="a", policy_version=3)
    assert (await client.order("attach", **single_copy("b"))).status_code == 409
    trainer.kill()
    trainer.wait()
    assert (await client.status())["refusing"] is None
    assert (await client.order("attach", **single_copy("b"))).status_code == 200
    assert (await client.status())["policy_version"] == 3


# --- what the KV cache keeps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "second"), [("reset", "pause keep"), ("keep", "pause keep with its cache")])
async def test_a_cache_outlives_the_syncs_of_one_trainer_where_it_is_kept(kept: str, second: str) -> None:
    async with serving(FakeEngine(TP_SIZE), kv_on_sync=kept) as client:
        assert (await client.status())["kv_on_sync"] == kept
        await client.opened()
        await client.committed(1)
        await client.committed(2)
        assert [event for event in client.engine.events if "pause" in event] == ["pause keep", second]


async def test_what_was_computed_for_another_trainer_is_never_kept() -> None:
    """It counts its versions from the start."""
    async with serving(FakeEngine(TP_SIZE), kv_on_sync="salt") as client:
        for session in ("a", "b"):
            await client.opened(session)
            await client.committed(1, session=session)
            await client.committed(2, session=session)
            await client.delete(f"/v1/bridge/session/{session}")
        pauses = [event for event in client.engine.events if "pause" in event]
        assert pauses == ["pause keep", "pause keep with its cache"] * 2


async def test_a_single_copy_keeps_the_cache_of_its_trainer_too() -> None:
    async with serving(FakeEngine(TP_SIZE), kv_on_sync="keep") as client:
        assert (await client.order("attach", **single_copy())).status_code == 200
        for version in (0, 1):
            await client.paused(version)
            await client.order("resume", session="a", policy_version=version)
        pauses = [event for event in client.engine.events if "pause" in event]
        assert pauses == ["pause keep", "pause keep with its cache"]


async def test_weights_that_were_half_updated_leave_nothing_in_the_cache() -> None:
    async with serving(FakeEngine(TP_SIZE), kv_on_sync="keep") as client:
        await client.opened()
        await client.committed(1)
        client.engine.stage("a", 2)
        client.engine.ranks[1].breaks = True
        assert (await client.order("commit", session="a", policy_version=2)).status_code == 500
        client.engine.ranks[1].breaks = False
        await client.committed(2)
        pauses = [event for event in client.engine.events if "pause" in event]
        assert pauses == ["pause keep", "pause keep with its cache", "pause abort", "pause keep"]


async def test_a_request_tells_the_engine_its_conversation_only_where_salts_are_by_version() -> None:
    for kept, sent in (("salt", 'request with [null,"mine"]'), ("keep", "request with mine")):
        async with serving(FakeEngine(TP_SIZE), kv_on_sync=kept) as client:
            await client.engine.engine_core.add_request_async(SimpleNamespace(cache_salt="mine"))
            assert client.engine.events == [sent]


async def test_tokens_read_are_counted_by_what_the_cache_had(client: BridgeClient) -> None:
    steps = [
        SimpleNamespace(
            prefix_cache_stats=SimpleNamespace(queries=100, hits=64, preempted_queries=0, preempted_hits=0)
        ),
        None,
        SimpleNamespace(prefix_cache_stats=SimpleNamespace(queries=10, hits=0, preempted_queries=50, preempted_hits=8)),
    ]
    for step in steps:
        client.engine.logger_manager.record(step, engine_idx=0)
    assert client.engine.stats == steps
    found = (await client.get("/v1/bridge/activity")).json()
    assert (found["prompt_tokens"], found["cached_tokens"], found["tokens_again"]) == (110, 64, 42)
