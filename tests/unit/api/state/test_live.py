"""Leases over HTTP, signs of life, staleness, metrics and events."""

from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from fastapi.testclient import TestClient

from atroposlib.api.server import create_app
from atroposlib.api.state.activity import MAX_REGISTERED, Reports
from atroposlib.api.state.liveness import Liveness
from atroposlib.groups import staleness_weight
from atroposlib.processes import identity
from atroposlib.processes.identity import this_process
from atroposlib.wire.batching import MSGPACK, EnvReport
from tests.unit.api.support import ITEM_KEYS, api_settings, group, marks, register, register_env, registration
from tests.waiting import Clock


def api(**settings: Any) -> tuple[TestClient, Clock]:
    app = create_app(api_settings(env_timeout=60, trainer_timeout=60, **settings))
    clock = app.state.service._clock = Clock()
    app.state.service.new_lease = count(1).__next__
    return TestClient(app), clock


@pytest.fixture
def leased() -> tuple[TestClient, Clock, int]:
    """A client of an API with four groups for two batches, and its trainer's uuid."""
    client, clock = api()
    trainer = client.post("/register", json=registration(8)).json()["uuid"]
    client.post("/scored_data_list", json=[group(4, mark) for mark in range(4)])
    return client, clock, trainer


def lease(client: TestClient, trainer: int, *holding: int) -> tuple[int | None, list[int] | None]:
    reply = client.post("/batch/lease", json={"trainer": trainer, "holding": list(holding)}).json()
    return reply["lease"], None if reply["batch"] is None else [item["tokens"][0][0] for item in reply["batch"]]


# --- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_without_a_trainer_is_answered_as_batch_is(client: TestClient) -> None:
    assert client.post("/batch/lease", json={"trainer": 1}).json() == client.get("/batch").json()


def test_a_leased_item_is_as_any_other(leased: tuple[TestClient, Clock, int]) -> None:
    client, _, trainer = leased
    reply = client.post("/batch/lease", json={"trainer": trainer}).json()
    assert list(reply) == ["batch", "lease"]
    assert list(reply["batch"][0]) == ITEM_KEYS


def test_batches_are_lent_once_and_forgotten_when_acknowledged(leased: tuple[TestClient, Clock, int]) -> None:
    client, _, trainer = leased
    assert [lease(client, trainer), lease(client, trainer, 1), lease(client, trainer, 1, 2)] == [
        (1, [0, 1]),
        (2, [2, 3]),
        (None, None),
    ]
    acknowledgement = {"trainer": trainer, "leases": [1, 7]}
    assert client.post("/batch/ack", json=acknowledgement).json() == {
        "status": "success",
        "acknowledged": 1,
        "unknown": [7],
    }
    assert client.post("/batch/ack", json=acknowledgement).json() == {
        "status": "success",
        "acknowledged": 0,
        "unknown": [1, 7],
    }
    assert "atropos_held_bytes 0.0" not in client.get("/metrics").text
    client.post("/batch/ack", json={"trainer": trainer, "leases": [2]})
    assert "atropos_held_bytes 0.0" in client.get("/metrics").text


def test_a_batch_that_the_trainer_does_not_name_is_given_again(leased: tuple[TestClient, Clock, int]) -> None:
    client, _, trainer = leased
    assert [lease(client, trainer), lease(client, trainer)] == [(1, [0, 1])] * 2
    assert client.get("/status").json()["current_step"] == 1


def test_a_new_trainer_gets_what_the_old_one_held_and_the_old_one_nothing_more(
    leased: tuple[TestClient, Clock, int],
) -> None:
    client, _, old = leased
    lease(client, old), lease(client, old, 1)
    client.post("/batch/ack", json={"trainer": old, "leases": [1]})
    new = client.post("/register", json=registration(8, starting_step=1)).json()["uuid"]
    for path, more in (("/batch/lease", {}), ("/batch/ack", {"leases": [2]}), ("/heartbeat", {})):
        assert client.post(path, json={"trainer": old, **more}).status_code == 409
    for trainer, code in ((old, 409), (new, 200)):
        report = {"trainer": trainer, "step": 1, "policy_version": 1}
        assert client.post("/trainer-step", json=report | {"done": trainer == old}).status_code == code
    assert client.get("/status").json()["policy_version"] == 1
    assert [lease(client, new), lease(client, new, 2)] == [(2, [2, 3]), (None, None)]


def test_a_trainer_cannot_acknowledge_or_reject_a_batch_that_it_was_not_given(
    leased: tuple[TestClient, Clock, int],
) -> None:
    client, _, old = leased
    lease(client, old)
    new = client.post("/register", json=registration(8)).json()["uuid"]
    reply = client.post("/batch/ack", json={"trainer": new, "leases": [1]}).json()
    assert (reply["acknowledged"], reply["unknown"]) == (0, [1])
    rejection = {"trainer": new, "lease": 1, "groups": [{"id": 1, "reason": "it is another's"}]}
    taken = client.post("/batch/reject", json=rejection).json()
    assert (taken["rejected"], taken["unknown"], client.get("/dead-letters").json()) == ([], [1], [])
    assert lease(client, new) == (1, [0, 1])
    assert client.post("/batch/ack", json={"trainer": new, "leases": [1]}).json()["acknowledged"] == 1


def test_a_silent_trainers_batch_goes_to_whoever_asks(leased: tuple[TestClient, Clock, int]) -> None:
    client, clock, trainer = leased
    lease(client, trainer)
    clock.now = 59
    assert marks(client) == [2, 3]
    clock.now = 61
    assert [marks(client), marks(client)] == [[0, 1], None]
    assert client.post("/batch/ack", json={"trainer": trainer, "leases": [1]}).json()["unknown"] == [1]


def test_a_trainer_that_speaks_up_in_time_keeps_its_batch(leased: tuple[TestClient, Clock, int]) -> None:
    client, clock, trainer = leased
    lease(client, trainer)
    clock.now = 61
    assert marks(client) == [0, 1], "the first that waits again"
    client.post("/scored_data_list", json=[group(4, 4), group(4, 5)])
    assert lease(client, trainer) == (2, [2, 3])
    clock.now = 122
    client.app.state.service.expire_silent()  # type: ignore[attr-defined]
    assert client.post("/heartbeat", json={"trainer": trainer}).json() == {"status": "success"}
    assert [marks(client), marks(client)] == [[4, 5], None]


def test_the_peer_that_was_heard_last_falls_silent_last() -> None:
    peers = Liveness(60)
    assert [peers.heard(peer, now) for peer, now in ((1, 0), (2, 10), (1, 50))] == [False] * 3
    assert [peers.newly_silent(now) for now in (70, 71, 110, 111)] == [[], [2], [], [1]]
    assert peers.heard(2, 112)
    assert peers.silent == {1}
    peers.forget(1)
    assert not peers.silent


# --- environments ---------------------------------------------------------------------------------------------------


def test_a_silent_environments_minimum_weight_and_evaluation_lapse_until_it_is_back() -> None:
    client, clock = api()
    register(client, batch_size=4)
    silent = register_env(client, group_size=4, min_batch_allocation=0.5, steps_per_eval=1)
    lively = register_env(client, group_size=4)
    client.post("/scored_data", json=group(4, 1, env_id=lively))
    assert marks(client) is None
    clock.now = 59
    assert client.get(f"/status-env?env_id={lively}").json()["env_weight"] == 0.5
    assert client.get("/evaluations?policy_version=1").json()["pending"] == ["math_0"]
    clock.now = 61
    status = client.get(f"/status-env?env_id={lively}").json()
    assert (status["env_weight"], status["unallocated_fraction"]) == (1.0, 1.0)
    assert client.get("/evaluations?policy_version=1").json()["pending"] == []
    assert marks(client) == [1]
    assert client.post("/heartbeat", json={"env_id": silent}).json() == {"status": "success"}
    assert client.get(f"/status-env?env_id={lively}").json()["unallocated_fraction"] == 0.5


def test_an_environment_whose_process_has_ended_is_not_waited_for() -> None:
    client, clock = api()
    register(client)
    ended = msgspec.structs.replace(this_process(), started=1)  # its pid was given to another
    elsewhere = msgspec.structs.replace(ended, pid_namespace=1)
    for process in (ended, elsewhere, this_process()):
        announced = msgspec.to_builtins(process)
        env_id = register_env(client, min_batch_allocation=0.3, steps_per_eval=1, process=announced)
    clock.now = 2
    assert client.get("/evaluations?policy_version=1").json()["pending"] == ["math_1", "math_2"]
    assert client.get(f"/status-env?env_id={env_id}").json()["unallocated_fraction"] == pytest.approx(0.4)


def test_of_many_environments_the_reports_of_those_heard_last_are_kept() -> None:
    """Each may have as many texts as it likes, and the API as many environments."""
    reports = Reports(lambda: 0.0)
    for env_id in (*range(MAX_REGISTERED), 0, MAX_REGISTERED):
        reports.note(env_id, EnvReport("math", "process", posted=env_id))
    assert [*reports.registered] == [*range(2, MAX_REGISTERED), 0, MAX_REGISTERED]


def test_for_environments_of_other_machines_no_process_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them would hold up everyone each second."""
    client, clock = api()
    register(client)
    elsewhere = msgspec.to_builtins(msgspec.structs.replace(this_process(), boot_id="of another machine"))
    env_id = register_env(client, process=elsewhere)
    looked_at: list[int] = []
    monkeypatch.setattr(identity, "_fields", looked_at.append)
    clock.now = 2
    assert client.get(f"/status-env?env_id={env_id}").status_code == 200
    assert looked_at == []


@pytest.mark.parametrize("sign", ["status", "post", "evaluation", "heartbeat"])
def test_whatever_an_environment_does_is_a_sign_of_life(sign: str) -> None:
    client, clock = api()
    register(client)
    env_id = register_env(client)
    clock.now = 50
    {
        "status": lambda: client.get(f"/status-env?env_id={env_id}"),
        "post": lambda: client.post("/scored_data", json=group(4, env_id=env_id)),
        "evaluation": lambda: client.post("/evaluation", json={"env_id": env_id, "policy_version": 1}),
        "heartbeat": lambda: client.post("/heartbeat", json={"env_id": env_id}),
    }[sign]()
    clock.now = 100
    client.get("/metrics")
    assert client.app.state.service.state.queue.environment(env_id).counts  # type: ignore[attr-defined]


def test_unknown_peers_are_told_so_by_their_heartbeat(client: TestClient) -> None:
    assert client.post("/heartbeat", json={"env_id": 3}).status_code == 404
    assert client.post("/heartbeat", json={"trainer": 3}).json()["status"] == "failure"
    assert client.post("/heartbeat", json={}).json() == {"status": "success"}


def test_the_instance_changes_only_when_environments_are_forgotten(client: TestClient) -> None:
    def instance() -> str:
        register(client)
        found: str = client.get(f"/status-env?env_id={register_env(client)}").json()["instance"]
        return found

    first, second = instance(), instance()
    client.post("/reset_data")
    assert first == second != instance()


# --- staleness ------------------------------------------------------------------------------------------------------


def stale_api(**settings: Any) -> TestClient:
    """An API at policy version 5 with one group of each version 0 to 5, and one without."""
    client, _ = api(max_staleness=2, **settings)
    register(client, batch_size=4)
    client.post("/scored_data", json=group(4, 9))
    client.post(
        "/scored_data_list",
        json=[group(4, mark, policy_versions=[[mark, 5], [5, 5], [5, 5], [5, 5]]) for mark in range(6)],
    )
    client.post("/trainer-step", json={"step": 5, "policy_version": 5})
    return client


def test_groups_above_the_staleness_limit_are_dropped_and_counted() -> None:
    client = stale_api()
    assert [marks(client) for _ in range(5)] == [[9], [3], [4], [5], None]
    assert 'atropos_stale_groups_total{action="dropped"} 3.0' in client.get("/metrics").text


def test_or_they_are_weighted_down() -> None:
    client = stale_api(stale_groups="down-weight")
    batches = [client.get("/batch").json()["batch"][0] for _ in range(7)]
    assert [batch["group_overrides"] for batch in batches] == [
        None,
        {"staleness_weight": 0.5, "staleness_limit": 2},
        {"staleness_weight": 0.6, "staleness_limit": 2},
        {"staleness_weight": 0.75, "staleness_limit": 2},
        None,
        None,
        None,
    ]
    assert 'atropos_stale_groups_total{action="down-weighted"} 3.0' in client.get("/metrics").text


def test_a_weight_falls_with_age_from_one() -> None:
    assert staleness_weight(np.arange(4), 1).tolist() == [1.0, 1.0, 2 / 3, 0.5]
    assert staleness_weight(3, 0) == 0.25


@pytest.mark.parametrize(("oldest", "kept"), [(2, False), (3, True)])
def test_a_group_is_as_old_as_its_oldest_token_where_each_token_s_version_is_known(oldest: int, kept: bool) -> None:
    client, _ = api(max_staleness=2)
    register(client, batch_size=2)
    client.post("/scored_data", json=group(2, 7, version_spans=[[[0, 5]], [[0, 5], [1, oldest]]]))
    client.post("/trainer-step", json={"step": 5, "policy_version": 5})
    assert (marks(client) == [7]) == kept


# --- repeated posts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["header", "body"])
def test_a_repeated_post_is_answered_alike_and_stored_once(client: TestClient, form: str) -> None:
    register(client)
    env_id = register_env(client, group_size=8)
    body = group(3, env_id=env_id) | ({"idempotency_key": "a"} if form == "body" else {})
    headers = {"Idempotency-Key": "a"} if form == "header" else {}
    replies = [client.post("/scored_data", json=body, headers=headers).json() for _ in range(3)]
    assert replies == [{"status": "buffered", "buffer_size": 3}] * 3
    lists = [
        client.post("/scored_data_list", json=[group(4), group(4)], headers={"Idempotency-Key": "b"}).json()
        for _ in range(2)
    ]
    assert lists == [{"status": "received", "groups_processed": 2}] * 2
    assert client.get("/status").json()["queue_size"] == 2
    assert "idempotency_key" not in client.get("/latest_example").json()


def test_a_key_of_a_post_of_another_number_of_groups_is_refused(client: TestClient) -> None:
    key = {"Idempotency-Key": "a"}
    assert client.post("/scored_data_list", json=[group(4), group(4)], headers=key).status_code == 200
    for path, body in (("/scored_data", group(4)), ("/scored_data_list", [group(4)] * 3)):
        refused = client.post(path, json=body, headers=key)
        assert refused.status_code == 422
        assert "each post needs its own" in refused.text
    assert client.get("/status").json()["queue_size"] == 2


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
def test_a_key_that_is_used_for_other_groups_is_refused_and_for_the_same_is_not(client: TestClient, path: str) -> None:
    def post(mark: int) -> Any:
        body = group(4, mark)
        return client.post(path, json=body if path == "/scored_data" else [body], headers={"Idempotency-Key": "a"})

    first = post(1)
    assert first.status_code == 200
    assert post(1).json() == first.json()
    refused = post(2)
    assert refused.status_code == 422
    assert "other groups: nothing was stored" in refused.text
    assert post(1).json() == first.json()
    assert client.get("/status").json()["queue_size"] == 1


def test_a_repeated_post_is_not_counted_as_groups(client: TestClient) -> None:
    for _ in range(2):
        assert client.post("/scored_data", json=group(4), headers={"Idempotency-Key": "a"}).status_code == 200
    found = client.get("/metrics").text
    for name, total in (("groups", 1), ("rollouts", 4), ("sequences", 4), ("tokens", 8)):
        assert f"atropos_{name}_posted_total {total}.0" in found
    assert "atropos_posts_repeated_total 1.0" in found


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
def test_a_post_with_an_integer_of_more_than_64_bits_is_stored_once_and_delivered(
    client: TestClient, path: str
) -> None:
    register(client)
    for seed, status in ((2**70, 200), (2**70, 200), (2**70 + 1, 422)):
        body = group(8, generation_params={"seed": seed}, group_overrides={"a": seed})
        content = body if path == "/scored_data" else [body]
        assert client.post(path, json=content, headers={"Idempotency-Key": "a"}).status_code == status
    packed = client.post("/scored_data", content=msgspec.msgpack.encode(group(8)), headers={"Content-Type": MSGPACK})
    assert packed.status_code == 200
    (item,) = client.get("/batch", headers={"Accept": MSGPACK}).json()["batch"]
    assert (item["generation_params"], item["group_overrides"]) == ({"seed": 2**70}, {"a": 2**70})


@pytest.mark.parametrize("key", ["", "x" * 201])
def test_a_key_that_is_none_is_refused(client: TestClient, key: str) -> None:
    assert client.post("/scored_data", json=group(4), headers={"Idempotency-Key": key}).status_code == 422
    assert client.post("/scored_data", json=group(4, idempotency_key=key)).status_code == 422


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_count_what_happened(client: TestClient) -> None:
    register(client, batch_size=4)
    client.post("/scored_data", json=group(4))
    client.post("/scored_data", json={})
    client.get("/batch")
    text = client.get("/metrics").text
    for line in (
        "atropos_groups_posted_total 1.0",
        "atropos_sequences_posted_total 4.0",
        "atropos_tokens_posted_total 8.0",
        "atropos_batches_delivered_total 1.0",
        'atropos_refused_total{status="422"} 1.0',
        "atropos_post_seconds_count 2.0",
        "atropos_queued_groups 0.0",
        "atropos_current_step 1.0",
    ):
        assert line in text, line
