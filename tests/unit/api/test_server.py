"""The wire contract: every endpoint, field and reply, as clients of the archived ancestor know them, and what is
new.
"""

import gzip
import json
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient

from atroposlib.api.server import create_app
from atroposlib.wire.batching import IF_POSTED
from tests.unit.api.support import (
    ITEM_KEYS,
    api_settings,
    environment,
    group,
    marks,
    register,
    register_env,
    registration,
)


def refusal(reply: Any) -> tuple[int, list[Any], str]:
    """Status, position and text of a refusal."""
    detail = reply.json()["detail"][0]
    return reply.status_code, detail["loc"], detail["msg"]


# --- before anything ------------------------------------------------------------------------------------------------


def test_an_empty_api_answers_every_get(client: TestClient) -> None:
    unregistered = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
    example = [
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    ]
    expected = {
        "/": {"message": "AtroposLib API"},
        "/health": {"status": "ok"},
        "/wandb_info": {"group": None, "project": None},
        "/info": {"batch_size": -1, "max_token_len": -1},
        "/status": {"current_step": 0, "queue_size": 0},
        "/batch": unregistered,
        "/latest_example": {name: [] for name in example},
        "/evaluations?policy_version=0": {"results": [], "pending": []},
    }
    assert {path: client.get(path).json() for path in expected} == expected


def test_the_app_is_importable_by_both_of_its_names() -> None:
    import atroposlib.api
    import atroposlib.api.server

    assert atroposlib.api.app is atroposlib.api.server.app


def test_openapi_describes_every_route_and_its_body(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["info"]["title"] == "AtroposLib API"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], (method, path)
    body = document["paths"]["/scored_data"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][body["$ref"].split("/")[-1]]["properties"]
    assert list(fields) == [*ITEM_KEYS, *IF_POSTED, "idempotency_key"]


def test_no_web_page_may_read_replies(client: TestClient) -> None:
    assert "access-control-allow-origin" not in client.get("/status", headers={"Origin": "http://elsewhere"}).headers


# --- registration ---------------------------------------------------------------------------------------------------


def test_registering_answers_a_number_that_json_readers_keep_exact(client: TestClient) -> None:
    first, second = (client.post("/register", json=registration()).json() for _ in range(2))
    assert list(first) == ["uuid"]
    assert 0 < first["uuid"] < 2**53
    assert first != second
    assert client.get("/info").json() == {"batch_size": 8, "max_token_len": 512}
    assert client.get("/wandb_info").json() == {"group": "group", "project": "project"}


@pytest.mark.parametrize("missing", list(registration()))
def test_every_field_of_a_registration_is_required(client: TestClient, missing: str) -> None:
    body = registration()
    del body[missing]
    status, location, message = refusal(client.post("/register", json=body))
    assert (status, location) == (422, ["body", missing])
    assert missing in message
    assert client.get("/info").json()["batch_size"] == -1


@pytest.mark.parametrize(
    ("field", "value"), [("batch_size", 0), ("batch_size", 2**40), ("num_steps", 1.5), ("wandb_group", None)]
)
def test_a_registration_that_makes_no_sense_names_field_and_limit(client: TestClient, field: str, value: Any) -> None:
    status, location, _ = refusal(client.post("/register", json=registration(**{field: value})))
    assert (status, location) == (422, ["body", field])


def test_environments_wait_until_a_trainer_has_registered_and_polled(client: TestClient) -> None:
    waiting = {"status": "wait for trainer to start"}
    assert client.post("/register-env", json=environment()).json() == waiting
    client.post("/register", json=registration(starting_step=3))
    assert client.post("/register-env", json=environment()).json() == waiting
    client.get("/batch")
    assert client.post("/register-env", json=environment()).json() == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "math_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 10,
        "num_steps": 100,
        "run": None,
    }


def test_numbers_may_come_as_strings_or_integral_floats(client: TestClient) -> None:
    assert client.post("/register", json=registration(batch_size="8", starting_step=1.0)).status_code == 200
    assert client.get("/info").json()["batch_size"] == 8


def test_booleans_count_as_numbers_where_numbers_belong_and_stay_elsewhere(client: TestClient) -> None:
    register(client, batch_size=2)
    judged = group(2, scores=[True, False], advantages=[[True, 0], [0.5, False]], overrides=[{"sft": True}, {}])
    for reply in (
        client.post("/scored_data", json=judged),
        client.post("/scored_data_list", json=[group(2), judged]),
        client.post(
            "/scored_data", content=msgspec.msgpack.encode(judged), headers={"Content-Type": "application/msgpack"}
        ),
    ):
        assert reply.status_code == 200
    items = [item for _ in range(4) for item in client.get("/batch").json()["batch"]]
    del items[1]
    for item in items:
        assert [type(score) for score in item["scores"]] == [float, float]
        assert item["scores"] == [1.0, 0.0]
        assert item["advantages"] == [[1.0, 0.0], [0.5, 0.0]]
        assert item["overrides"] == [{"sft": True}, {}]


def test_a_boolean_does_not_hide_what_else_is_wrong(client: TestClient) -> None:
    status, location, message = refusal(client.post("/scored_data", json=group(2, masks=[[True, 1], [1, "x"]])))
    assert (status, location) == (422, ["body", "masks", 1, 1])
    assert "got `str`" in message
    status, location, _ = refusal(client.post("/scored_data", json=group(2, generation_params=True)))
    assert (status, location) == (422, ["body", "generation_params"])


def test_half_a_surrogate_pair_behind_a_boolean_is_refused(client: TestClient) -> None:
    body = json.dumps(registration(True, checkpoint_dir="half \ud800"))
    assert client.post("/register", content=body).status_code == 422


def test_a_minimum_is_a_share(client: TestClient) -> None:
    register(client)
    status, location, _ = refusal(client.post("/register-env", json=environment(min_batch_allocation=1.5)))
    assert (status, location) == (422, ["body", "min_batch_allocation"])


def test_disconnecting_answers_success_or_names_the_unknown_id(client: TestClient) -> None:
    register(client)
    env_id = register_env(client)
    assert client.post("/disconnect-env", json={"env_id": env_id}).json() == {"status": "success"}
    for unknown in (-1, 7):
        reply = client.post("/disconnect-env", json={"env_id": unknown})
        assert reply.status_code == 200
        assert reply.json()["status"] == "failure"
        assert f"env_id {unknown}" in reply.json()["error"]


# --- groups and batches ---------------------------------------------------------------------------------------------


def test_an_item_has_fourteen_keys_with_nulls(client: TestClient) -> None:
    register(client, batch_size=4)
    assert client.post("/scored_data", json=group(4, unknown_field=1)).json() == {"status": "received"}
    (item,) = client.get("/batch").json()["batch"]
    assert list(item) == ITEM_KEYS
    assert {name: item[name] for name in item if item[name] is not None} == group(4)
    assert client.get("/batch").json() == {"batch": None}


def test_everything_posted_comes_back_unchanged(client: TestClient) -> None:
    full = group(
        2,
        env_id=None,
        advantages=[[0.1, -1e300], [1 / 3, 2.5e-8]],
        ref_logprobs=[[0.0, -0.5], [0.0, -0.5]],
        inference_logprobs=[[1.0, -0.25], [1.0, -0.125]],
        messages=[[{"role": "anything", "content": [{"type": "text", "text": "ü 🙂"}], "reward": None}], []],
        generation_params={"temperature": 0.7},
        overrides=[{}, {"set_advantage_to_zero": True}],
        group_overrides={"sft": False},
        images=["data:..."],
        distill_token_ids=[[[1, 2]], [[3, 4]]],
        distill_logprobs=[[[-0.1, -2.0]], [[-0.3, -1.0]]],
        policy_versions=[[3, 3], [3, 4]],
        version_spans=[[[0, 3]], [[0, 3], [1, 4]]],
        finish_reasons=["stop", "length"],
        failed={"timeout": 1, "scorer": 2},
    )
    register(client, batch_size=5)
    client.post("/scored_data", json=full)
    assert client.get("/latest_example").json() == full
    assert client.get("/batch").json() == {"batch": [full]}


def test_rollouts_appear_only_when_posted_and_are_what_a_batch_counts(client: TestClient) -> None:
    register(client, batch_size=5)
    client.post("/scored_data", json=group(4, 1, rollouts=[0, 0, 1, 2], scores=[1.0, 1.0, 0.0, 0.5]))
    assert client.get("/batch").json() == {"batch": None}
    client.post("/scored_data", json=group(2, 2, rollouts=None))
    first, second = client.get("/batch").json()["batch"]
    assert (first["rollouts"], len(first["tokens"])) == ([0, 0, 1, 2], 4)
    assert "rollouts" not in second


def test_groups_are_buffered_by_rollouts(client: TestClient) -> None:
    register(client, batch_size=4)
    client.get("/batch")
    env_id = register_env(client, 4)
    of_one = group(3, 1, rollouts=[0, 0, 0], scores=[1.0] * 3, env_id=env_id)
    of_three = group(4, 2, rollouts=[0, 1, 1, 2], scores=[0.0, 1.0, 1.0, 0.5], env_id=env_id)
    assert client.post("/scored_data", json=of_one).json() == {"status": "buffered", "buffer_size": 1}
    assert client.post("/scored_data", json=of_three).json() == {"status": "buffered", "buffer_size": 0}
    assert [item["rollouts"] for item in client.get("/batch").json()["batch"]] == [[0, 0, 0], [0, 1, 1, 2]]


def test_a_group_with_more_sequences_than_a_batch_has_rollouts_fits(client: TestClient) -> None:
    register(client, batch_size=2)
    posted = group(5, 1, rollouts=[0, 0, 0, 0, 1], scores=[1.0] * 4 + [0.0])
    assert client.post("/scored_data", json=posted).json() == {"status": "received"}
    assert len(client.get("/batch").json()["batch"][0]["tokens"]) == 5
    status, location, message = refusal(client.post("/scored_data", json=group(3, rollouts=[0, 1, 2])))
    assert (status, location) == (422, ["body", "tokens"])
    assert "a group of 3 rollouts does not fit into a batch of 2" in message


def test_fields_that_the_ancestor_did_not_know_appear_only_when_posted(client: TestClient) -> None:
    register(client, batch_size=4)
    given: dict[str, Any] = {
        "policy_versions": [[0, 0], [0, 1]],
        "version_spans": [[[0, 0]], [[0, 0], [1, 1]]],
        "rollouts": [0, 1],
        "finish_reasons": ["stop", "length"],
        "failed": {},
        "routed_experts": ["AA==", "AQ=="],
        "ordinal": ["env", 3, 5],
    }
    client.post("/scored_data", json=group(2, **given))
    client.post("/scored_data", json=group(2) | dict.fromkeys(given))
    first, second = client.get("/batch").json()["batch"]
    assert {name: first[name] for name in IF_POSTED} == given
    assert not set(IF_POSTED) & set(second)


@pytest.mark.parametrize("packed", [False, True])
def test_a_failed_sample_takes_a_place_of_its_group(client: TestClient, packed: bool) -> None:
    """Six of eight samples have a score: the group is neither buffered nor too small for its batch."""
    register(client, batch_size=16)
    env_id = register_env(client, group_size=8)
    short = group(6, env_id=env_id, failed={"timeout": 1, "scorer": 1})
    body = msgspec.msgpack.encode(short) if packed else json.dumps(short)
    headers = {"Content-Type": "application/msgpack"} if packed else {}
    assert client.post("/scored_data", content=body, headers=headers).json() == {"status": "received"}
    assert client.get("/batch").json() == {"batch": None}
    assert client.get(f"/status-env?env_id={env_id}").json()["self_queue_size"] == 1
    client.post("/scored_data", json=group(8, env_id=env_id))
    assert [len(each["tokens"]) for each in client.get("/batch").json()["batch"]] == [6, 8]


def test_batches_are_delivered_oldest_first_and_counted_as_they_leave(client: TestClient) -> None:
    register(client, batch_size=8, starting_step=5)
    client.post("/scored_data_list", json=[group(4, mark) for mark in range(7)])
    assert client.get("/status").json() == {"current_step": 5, "queue_size": 7}
    assert [marks(client) for _ in range(4)] == [[0, 1], [2, 3], [4, 5], None]
    assert client.get("/status").json() == {"current_step": 8, "queue_size": 1}


def test_groups_before_registration_are_kept(client: TestClient) -> None:
    assert client.post("/scored_data", json=group(8, 1)).json() == {"status": "received"}
    register_reply = client.post("/register", json=registration(8))
    assert "uuid" in register_reply.json()
    assert marks(client) == [1]


def test_a_part_of_a_group_is_buffered_and_the_reply_counts_what_still_waits(client: TestClient) -> None:
    register(client)
    env_id = register_env(client, group_size=8)
    assert client.post("/scored_data", json=group(3, env_id=env_id)).json() == {"status": "buffered", "buffer_size": 3}
    assert client.post("/scored_data", json=group(5, env_id=str(env_id))).json() == {
        "status": "buffered",
        "buffer_size": 0,
    }
    assert client.get("/status").json()["queue_size"] == 2
    assert client.post("/scored_data", json=group(5, env_id=99)).json() == {"status": "received"}


def test_a_list_reports_how_many_were_buffered(client: TestClient) -> None:
    register(client)
    env_id = register_env(client, group_size=4)
    assert client.post("/scored_data_list", json=[]).json() == {"status": "received", "groups_processed": 0}
    assert client.post("/scored_data_list", json=[group(4), group(4)]).json() == {
        "status": "received",
        "groups_processed": 2,
    }
    mixed = [group(4, env_id=env_id), group(1, env_id=env_id), group(2, env_id=env_id)]
    assert client.post("/scored_data_list", json=mixed).json() == {
        "status": "received",
        "groups_processed": 3,
        "buffered": 2,
        "last_buffer_size": 3,
    }


def test_a_list_is_accepted_whole_or_not_at_all(client: TestClient) -> None:
    register(client)
    status, location, _ = refusal(client.post("/scored_data_list", json=[group(4), group(4, scores=[1.0])]))
    assert (status, location) == (422, ["body", 1, "scores"])
    assert client.get("/status").json()["queue_size"] == 0


def test_reset_forgets_everything(client: TestClient) -> None:
    register(client, starting_step=9)
    register_env(client)
    client.post("/scored_data", json=group(4))
    reply = client.post("/reset_data")
    assert (reply.status_code, reply.text) == (200, "Reset successful")
    assert client.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert client.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert client.get("/batch").json()["status"] == "error"
    assert client.post("/register-env", json=environment()).json() == {"status": "wait for trainer to start"}
    assert client.post("/status-env", json={"env_id": 0}).status_code == 404


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_env_takes_its_id_from_body_or_query_by_get_or_post(client: TestClient) -> None:
    register(client, batch_size=8)
    env_id = register_env(client, group_size=4)
    client.post("/scored_data", json=group(4, env_id=env_id))
    replies = [
        client.request("GET", "/status-env", json={"env_id": env_id}),
        client.get(f"/status-env?env_id={env_id}"),
        client.post("/status-env", json={"env_id": str(env_id)}),
        client.post(f"/status-env?env_id={env_id}"),
    ]
    expected = {
        "current_step": 0,
        "queue_size": 1,
        "unallocated_fraction": 1.0,
        "self_queue_size": 1,
        "max_group_size": 4,
        "env_weight": 1.0,
        "num_steps": 100,
    }
    bodies = [reply.json() for reply in replies]
    assert len({body.pop("instance") for body in bodies}) == 1
    assert bodies == [expected] * 4


def test_status_env_without_a_usable_id_says_so(client: TestClient) -> None:
    assert client.get("/status-env").status_code == 422
    assert client.get("/status-env?env_id=x").status_code == 422
    for unknown in (-1, 0, 5):
        reply = client.get(f"/status-env?env_id={unknown}")
        assert reply.status_code == 404
        assert f"env_id {unknown}" in reply.json()["detail"]


def test_trainer_progress_shows_in_both_statuses(client: TestClient) -> None:
    register(client)
    env_id = register_env(client)
    assert client.post("/trainer-step", json={"step": 4, "policy_version": 5}).json() == {"status": "success"}
    for path in ("/status", f"/status-env?env_id={env_id}"):
        status = client.get(path).json()
        assert (status["trained_steps"], status["policy_version"]) == (4, 5)


def test_evaluations_are_pending_until_posted(client: TestClient) -> None:
    register(client)
    env_id = register_env(client, steps_per_eval=5, eval_at_start=True)
    assert client.get("/evaluations?policy_version=5").json() == {"results": [], "pending": ["math_0"]}
    posted = {"env_id": env_id, "policy_version": 5, "accuracy": 0.5, "metrics": {"pass": 1}}
    assert client.post("/evaluation", json=posted).json() == {"status": "success"}
    assert client.get("/evaluations?policy_version=5").json() == {
        "results": [
            {"env_id": 0, "env_name": "math_0", "policy_version": 5, "accuracy": 0.5, "metrics": {"pass": 1.0}}
        ],
        "pending": [],
    }
    assert client.post("/evaluation", json={**posted, "env_id": 3}).status_code == 404
    many = {f"metric {number}": 0.5 for number in range(257)}
    refused = client.post("/evaluation", json={**posted, "metrics": many})
    assert refused.status_code == 422
    assert "257 metrics; at most 256 are accepted" in refused.text
    assert client.get("/evaluations").status_code == 422


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "-NaN", "1e999", '"nan"'])
@pytest.mark.parametrize("field", ["scores", "inference_logprobs"])
def test_a_number_that_is_not_finite_is_refused_with_its_position(client: TestClient, field: str, literal: str) -> None:
    values: Any = [0.5, "HERE"] if field == "scores" else [[0.0, 0.0], [0.0, "HERE"]]
    body = json.dumps(group(2, **{field: values})).replace('"HERE"', literal)
    status, location, message = refusal(client.post("/scored_data", content=body))
    assert (status, location) == (422, ["body", field, 1] if field == "scores" else ["body", field, 1, 1])
    assert ("that large is not finite" if literal == "1e999" else "is not a finite number") in message
    assert client.get("/status").json()["queue_size"] == 0


@pytest.mark.parametrize(
    ("change", "location", "text"),
    [
        ({"scores": [1.0]}, ["scores"], "1 entries for 2 sequences"),
        ({"masks": [[1, 1]]}, ["masks"], "1 entries for 2 sequences"),
        ({"masks": [[1, 1], [1]]}, ["masks", 1], "1 entries for the 2 tokens"),
        ({"ref_logprobs": [[0.0, 0.0], [0.0] * 3]}, ["ref_logprobs", 1], "3 entries for the 2 tokens"),
        ({"inference_logprobs": [[0.0, 0.0]]}, ["inference_logprobs"], "1 entries for 2 sequences"),
        ({"policy_versions": [[0, 0]]}, ["policy_versions"], "1 entries for 2 sequences"),
        ({"policy_versions": [[0, 0], [1]]}, ["policy_versions", 1], "length 2"),
        ({"version_spans": [[[0, 0]]]}, ["version_spans"], "1 entries for 2 sequences"),
        ({"version_spans": [[[0, 0]], [[0]]]}, ["version_spans", 1, 0], "length 2"),
        ({"rollouts": [0]}, ["rollouts"], "1 entries for 2 sequences"),
        ({"rollouts": []}, ["rollouts"], "0 entries for 2 sequences"),
        ({"rollouts": [1, 1]}, ["rollouts", 0], "1 is not 0; rollouts are counted from 0 in order"),
        ({"rollouts": [0, 2]}, ["rollouts", 1], "2 is not 0 or 1"),
        ({"rollouts": [0, -1]}, ["rollouts", 1], "-1 is not 0 or 1"),
        ({"rollouts": [-1, -1]}, ["rollouts", 0], "-1 is not 0;"),
        ({"rollouts": [0, 2**53 - 1]}, ["rollouts", 1], "9007199254740991 is not 0 or 1"),
        ({"rollouts": [0, 2**60]}, ["rollouts", 1], "<="),
        ({"rollouts": [0, 10**400]}, ["rollouts", 1], ""),
        ({"rollouts": [0, 0.5]}, ["rollouts", 1], "float"),
        ({"rollouts": [0, "x"]}, ["rollouts", 1], "str"),
        ({"rollouts": [[0], [1]]}, ["rollouts", 0], "array"),
        ({"rollouts": 0}, ["rollouts"], "got `int`"),
        ({"rollouts": [0, 0], "scores": [1.0, 0.5]}, ["scores", 1], "0.5 is not the 1.0 of the sequence before it"),
        ({"finish_reasons": ["stop"]}, ["finish_reasons"], "1 entries for 2 sequences"),
        ({"finish_reasons": ["stop", None]}, ["finish_reasons", 1], "got `null`"),
        ({"finish_reasons": ["stop", "x" * 65]}, ["finish_reasons", 1], "length <= 64"),
        ({"finish_reasons": "stop"}, ["finish_reasons"], "got `str`"),
        ({"failed": {"bored": 1}}, ["failed"], "Invalid enum value 'bored'"),
        ({"failed": {"timeout": -1}}, ["failed", "..."], ">= 0"),
        ({"failed": {"timeout": True}}, ["failed", "..."], "got `bool`"),
        ({"failed": {"timeout": 1.5}}, ["failed", "..."], "got `float`"),
        ({"failed": {"timeout": 2**40}}, ["failed", "..."], "<= 2147483647"),
        ({"failed": {"timeout": 70_000}}, ["failed"], "a group of 70002 sequences; at most 65536"),
        ({"failed": 2}, ["failed"], "got `int`"),
        ({"messages": [[{"role": "user"}]]}, ["messages", 0, 0], "'role' and 'content'"),
        ({"messages": [None]}, ["messages", 0], "got `null`"),
        ({"tokens": [[1, "x"], [1, 2]]}, ["tokens", 0, 1], "got `str`"),
        ({"tokens": [[1, 2**60], [1, 2]]}, ["tokens", 0, 1], "<="),
        ({"tokens": [], "masks": [], "scores": []}, ["tokens"], "at least one sequence"),
    ],
)
def test_a_group_that_cannot_be_trained_is_refused_with_its_position(
    client: TestClient, change: dict[str, Any], location: list[Any], text: str
) -> None:
    status, where, message = refusal(client.post("/scored_data", json=group(2, **change)))
    assert (status, where) == (422, ["body", *location])
    assert text in message


def test_optional_fields_that_do_not_match_are_passed_on(client: TestClient) -> None:
    odd = group(2, advantages=[[0.5]], messages=[[]], inference_logprobs=[], overrides=[{}])
    register(client, batch_size=2)
    assert client.post("/scored_data", json=odd).json() == {"status": "received"}
    assert client.get("/batch").json()["batch"][0]["advantages"] == [[0.5]]


def test_a_group_larger_than_the_batch_is_refused_with_both_sizes(client: TestClient) -> None:
    register(client, batch_size=8)
    status, _, message = refusal(client.post("/scored_data", json=group(9)))
    assert status == 422
    assert "9 rollouts does not fit into a batch of 8" in message


def test_a_batch_that_can_never_fill_is_diagnosed_once_in_the_log(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    register(client, batch_size=10)
    client.post("/scored_data_list", json=[group(8), group(8)])
    for _ in range(3):
        assert client.get("/batch").json() == {"batch": None}
    told = [record.getMessage() for record in caplog.records if "no choice of whole groups" in record.getMessage()]
    assert len(told) == 1
    assert "batch_size=10" in told[0]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1", b"\xff\xfe", b'{"tokens": "\\ud800"}', b"[" * 100_000, b"null", b"7"]
)
@pytest.mark.parametrize(
    "path", ["/register", "/register-env", "/scored_data", "/scored_data_list", "/status-env", "/evaluation"]
)
def test_what_is_not_json_of_the_right_shape_is_422(client: TestClient, path: str, body: bytes) -> None:
    assert client.post(path, content=body).status_code == 422


# --- compression and size -------------------------------------------------------------------------------------------


def test_a_gzipped_body_is_read(client: TestClient) -> None:
    packed = gzip.compress(json.dumps(group(4, 3)).encode())
    assert client.post("/scored_data", content=packed, headers={"Content-Encoding": "gzip"}).json() == {
        "status": "received"
    }
    assert client.get("/latest_example").json()["tokens"][0][0] == 3


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "plain"])
def test_a_broken_gzip_body_is_400(client: TestClient, damage: str) -> None:
    packed = gzip.compress(json.dumps(group(4)).encode())
    body = {"truncated": packed[:-9], "corrupt": packed[:20] + b"\0\0\0\0" + packed[24:], "plain": b"{}"}[damage]
    reply = client.post("/scored_data", content=body, headers={"Content-Encoding": "gzip"})
    assert (reply.status_code, reply.text) == (400, "Invalid gzip payload")


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}])
def test_a_body_above_the_limit_is_413_as_sent_and_as_decompressed(headers: dict[str, str]) -> None:
    with TestClient(create_app(api_settings(max_body_bytes=10_000))) as client:
        body = b" " * 10_001
        reply = client.post("/scored_data", content=gzip.compress(body) if headers else body, headers=headers)
        assert reply.status_code == 413
        assert "10000 bytes" in reply.text


def test_large_replies_are_compressed_for_distant_clients_only() -> None:
    for host, expected in (("192.0.2.1", "gzip"), ("127.0.0.1", None), ("::1", None)):
        with TestClient(create_app(), client=(host, 1)) as client:
            register(client, batch_size=8)
            client.post("/scored_data", json=group(8, messages=[[{"role": "user", "content": "x" * 2000}]] * 8))
            reply = client.get("/batch")
            assert reply.headers.get("content-encoding") == expected
            assert reply.json()["batch"][0]["tokens"] == group(8)["tokens"]
            assert "content-encoding" not in client.get("/info").headers
