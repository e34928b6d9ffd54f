"""Groups that the registered trainer cannot use: refused, set aside at delivery, or rejected by the trainer."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fastapi.testclient import TestClient

from atroposlib.api.journal import dead_letters
from atroposlib.api.server import create_app
from atroposlib.api.state.selection import Lanes
from atroposlib.routing import pack
from tests.unit.api.support import environment, registration

HOPELESS: dict[str, Any] = {"inference_logprobs": [[1.0, 0.5], [1.0, -1.0]]}


def trainable(mark: int = 0, **changes: Any) -> dict[str, Any]:
    """Two sequences that our trainer can use, whose first token is `mark`."""
    return {
        "tokens": [[mark, 1], [mark, 2]],
        "masks": [[-100, 1], [-100, 2]],
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, -1.0], [1.0, -1.0]],
    } | changes


def start(client: TestClient, batch_size: int = 4, **other: Any) -> int:
    """Register a trainer like ours; its uuid."""
    uuid: int = client.post("/register", json=registration(batch_size, trainable_only=True, run="a", **other)).json()[
        "uuid"
    ]
    return uuid


def post(client: TestClient, *groups: dict[str, Any]) -> None:
    for each in groups:
        assert client.post("/scored_data", json=each).status_code == 200


def lease(client: TestClient, trainer: int, *holding: int) -> dict[str, Any]:
    reply: dict[str, Any] = client.post(
        "/batch/lease", json={"trainer": trainer, "holding": holding, "ids": True}
    ).json()
    return reply


def marks(reply: dict[str, Any]) -> list[int] | None:
    return None if reply["batch"] is None else [item["tokens"][0][0] for item in reply["batch"]]


def reject(client: TestClient, trainer: int, lease: int, *ids: int) -> dict[str, Any]:
    groups = [{"id": identity, "reason": "no use"} for identity in ids]
    reply: dict[str, Any] = client.post(
        "/batch/reject", json={"trainer": trainer, "lease": lease, "groups": groups}
    ).json()
    return reply


@pytest.mark.parametrize("packed", [False, True])
def test_a_group_that_the_registered_trainer_cannot_use_is_refused_and_another_trainer_gets_it(
    client: TestClient, packed: bool
) -> None:
    def answer(group: dict[str, Any]) -> Any:
        if packed:
            return client.post(
                "/scored_data", content=msgspec.msgpack.encode(group), headers={"Content-Type": "application/msgpack"}
            )
        return client.post("/scored_data", json=group)

    client.post("/register", json=registration(2))
    assert answer(trainable(**HOPELESS)).status_code == 200
    assert client.get("/batch").json()["batch"][0]["inference_logprobs"] == HOPELESS["inference_logprobs"]
    start(client)
    refused = answer(trainable(**HOPELESS))
    assert refused.status_code == 422
    assert refused.json()["detail"][0]["loc"] == ["body", "inference_logprobs", 0, 1]
    assert refused.json()["detail"][0]["msg"].startswith(
        "inference_logprobs[0][1]: 0.5 is not the log-probability of a sampled token"
    )
    assert answer(trainable()).status_code == 200


def test_groups_from_before_the_trainer_are_checked_when_they_are_to_be_delivered(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.post("/register", json=registration(2, run="a"))
    client.get("/batch")
    env_id = client.post("/register-env", json=environment(2, desired_name="maths")).json()["env_id"]
    post(client, trainable(1), trainable(2, env_id=env_id, **HOPELESS), trainable(30), trainable(4))
    trainer = start(client, vocab_size=20)
    got = lease(client, trainer)
    assert marks(got) == [1, 4]
    assert [each["environment"] for each in got["rejected"]] == ["maths_0", "unknown"]
    assert "group 2 of environment maths_0" in caplog.text
    assert "inference_logprobs[0][1]: 0.5 is not the log-probability" in caplog.text


Opened = Callable[[], TestClient]


@pytest.fixture(params=["journal", "memory"])
def client_of(request: pytest.FixtureRequest, path: Path) -> TestClient:
    return TestClient(create_app(journal=path if request.param == "journal" else None))


def test_a_batch_is_formed_of_the_groups_that_pass(client_of: TestClient) -> None:
    with client_of as client:
        post(
            client,
            trainable(1),
            trainable(2, **HOPELESS),
            trainable(30),
            trainable(4),
            trainable(5, masks=[[-100, 1], [-100, 9]]),
        )
        trainer = start(client, vocab_size=20)
        got = lease(client, trainer)
        assert marks(got) == [1, 4]
        assert [each["reason"].split(":")[0] for each in got["rejected"]] == [
            "inference_logprobs[0][1]",
            "tokens[0][0]",
        ]
        assert lease(client, trainer, got["lease"])["rejected"] == []  # the fifth is not in a batch yet
        assert client.get("/status").json()["rejected_groups"] == 2
        post(client, trainable(6), trainable(7))
        assert marks(lease(client, trainer, got["lease"])) == [6, 7]
        letters = client.get("/dead-letters").json()
        assert [letter["id"] for letter in letters] == [3, 2, 1]
        assert all(letter["environment"] == "unknown" for letter in letters)
        assert 'atropos_groups_rejected_total{found_by="delivery"} 3.0' in client.get("/metrics").text
        (letter,) = client.get("/dead-letters?limit=1&groups=true").json()
        assert letter["group"]["tokens"][0][0] == 5
        assert letter["bytes"] > 0
        assert letter["reason"].startswith("masks[1][1]: 9 is neither")


def test_many_groups_from_before_the_trainer_cost_time_in_their_number(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops: list[int] = []
    drop = Lanes.drop

    def counted(lanes: Lanes[Any], orders: set[int]) -> list[Any]:
        drops.append(lanes.groups)
        return drop(lanes, orders)

    monkeypatch.setattr(Lanes, "drop", counted)
    too_large = trainable() | {"tokens": [[1]] * 9, "masks": [[1]] * 9, "scores": [1] * 9}
    too_large["inference_logprobs"] = [[-1.0]] * 9
    posted = [too_large] * 2000 + [trainable(**HOPELESS)] * 5000 + [trainable(7)] * 2
    assert client.post("/scored_data_list", json=posted).status_code == 200
    assert marks(lease(client, start(client))) == [7, 7]
    assert sum(drops) < 20 * len(posted)  # for each batch of two groups again it would be 1700 times


def test_get_batch_passes_them_over_too(client: TestClient) -> None:
    post(client, trainable(1, **HOPELESS), trainable(2), trainable(3))
    start(client)
    assert marks(client.get("/batch").json()) == [2, 3]


def test_a_group_that_is_set_aside_keeps_its_rollouts(client: TestClient) -> None:
    bad = {name: values + values[:1] for name, values in trainable(1, **HOPELESS).items()}
    bad |= {"rollouts": [0, 1, 1], "scores": [0.0, 1.0, 1.0]}
    post(client, bad, trainable(2), trainable(3))
    start(client)
    assert marks(client.get("/batch").json()) == [2, 3]
    (letter,) = client.get("/dead-letters?groups=true").json()
    assert letter["group"]["rollouts"] == [0, 1, 1]


def test_the_trainer_keeps_the_rest_of_a_batch_it_rejected_a_group_of(client_of: TestClient) -> None:
    with client_of as client:
        trainer = start(client)
        post(client, trainable(1), trainable(2), trainable(3), trainable(4))
        first = lease(client, trainer)
        answer = reject(client, trainer, first["lease"], first["ids"][1], 99)
        assert [each["id"] for each in answer["rejected"]] == [first["ids"][1]]
        assert answer["unknown"] == [99]
        # repeated: harmless
        assert reject(client, trainer, first["lease"], first["ids"][1])["unknown"] == [first["ids"][1]]
        again = lease(client, trainer)  # its reply was lost: without the group that was rejected
        assert (again["lease"], marks(again), again["ids"]) == (first["lease"], [1], first["ids"][:1])
        assert client.get("/status").json()["current_step"] == 1
        assert (
            client.post("/batch/ack", json={"trainer": trainer, "leases": [first["lease"]]}).json()["acknowledged"] == 1
        )
        assert 'atropos_groups_rejected_total{found_by="trainer"} 1.0' in client.get("/metrics").text
        assert client.get("/dead-letters").json()[0]["reason"] == "no use"


def test_a_batch_whose_groups_were_all_rejected_counts_as_never_delivered(client: TestClient) -> None:
    trainer = start(client)
    post(client, trainable(1), trainable(2), trainable(3), trainable(4))
    first = lease(client, trainer)
    reject(client, trainer, first["lease"], *first["ids"])
    assert client.get("/status").json()["current_step"] == 0
    assert marks(lease(client, trainer)) == [3, 4]


def test_only_the_trainer_that_has_the_batch_rejects(client: TestClient) -> None:
    post(client, trainable(1), trainable(2))
    assert client.post("/batch/reject", json={"trainer": 1, "lease": 1, "groups": []}).json()["status"] == "error"
    trainer = start(client)
    got = lease(client, trainer)
    other = start(client)
    assert (
        client.post("/batch/reject", json={"trainer": trainer, "lease": got["lease"], "groups": []}).status_code == 409
    )
    assert reject(client, other, got["lease"], *got["ids"])["unknown"] == got["ids"]
    assert (
        client.post(
            "/batch/reject", json={"trainer": other, "lease": 1, "groups": [{"id": 1, "reason": "x" * 1001}]}
        ).status_code
        == 422
    )


def test_rejections_survive_the_death_of_api_and_trainer(path: Path, tmp_path: Path) -> None:
    with TestClient(create_app(journal=path)) as client:
        post(client, trainable(0, **HOPELESS))
        trainer = start(client)
        post(client, trainable(1), trainable(2), trainable(3))
        got = lease(client, trainer)
        assert marks(got) == [1, 2]
        reject(client, trainer, got["lease"], got["ids"][0])
        copy = tmp_path / "killed.db"  # what a kill -9 leaves: nothing was closed
        for file in tmp_path.glob("groups.db*"):
            (tmp_path / file.name.replace("groups.db", "killed.db")).write_bytes(file.read_bytes())
    with TestClient(create_app(journal=copy)) as client:
        assert marks(lease(client, trainer)) == [2]
        resumed = start(client)  # the trainer died, too
        assert marks(lease(client, resumed)) == [2, 3]
        assert client.get("/status").json()["rejected_groups"] == 2
        assert [letter["id"] for letter in client.get("/dead-letters").json()] == [2, 1]
        client.post("/reset_data")
        assert len(client.get("/dead-letters?groups=true").json()) == 2
    with closing(sqlite3.connect(copy)) as db:
        rows = db.execute(
            "SELECT id, env_id, environment, reason, packed, body FROM dead_letters ORDER BY id"
        ).fetchall()
    assert [(row[0], row[3][:22]) for row in rows] == [(1, "inference_logprobs[0]["), (2, "no use")]
    assert [msgspec.json.decode(row[5])["tokens"][0][0] for row in rows] == [0, 1]


def test_the_table_and_memory_keep_the_newest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MAX_LETTERS", 3)
    monkeypatch.setattr(dead_letters, "MAX_LETTERS_IN_MEMORY", 2)
    with TestClient(create_app(journal=path)) as client:
        for mark in range(5):
            post(client, trainable(mark, **HOPELESS))
        trainer = start(client, batch_size=2)
        assert marks(lease(client, trainer)) is None
        assert [letter["id"] for letter in client.get("/dead-letters").json()] == [5, 4]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT id FROM dead_letters").fetchall() == [(3,), (4,), (5,)]
        (stored,) = db.execute("SELECT length(body) FROM dead_letters WHERE id = 5").fetchone()
    monkeypatch.setattr(dead_letters, "MAX_BYTES", 2 * stored)
    monkeypatch.setattr(dead_letters, "MAX_BYTES_IN_MEMORY", stored)
    with TestClient(create_app(journal=path)) as client:
        client.post("/register", json=registration(2, run="a"))
        post(client, trainable(9, **HOPELESS))
        assert marks(lease(client, start(client, batch_size=2))) is None
        newest, older = client.get("/dead-letters?groups=true").json()
        assert newest["id"] == 6
        assert newest["group"]["tokens"][0][0] == 9
        assert "group" not in older
        assert older["bytes"] == stored
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT id FROM dead_letters").fetchall() == [(5,), (6,)]


@pytest.mark.parametrize("optional", [False, True])
def test_a_trainer_says_whether_it_needs_the_samplers_log_probabilities(client: TestClient, optional: bool) -> None:
    """One that is `trainable_only` and does not say, as ours once were, needs them."""
    start(client, 2, **({"logprobs_optional": True} if optional else {}))
    assert client.get("/info").json().get("logprobs_optional", False) is optional
    reply = client.post("/scored_data", json=trainable(inference_logprobs=None))
    assert reply.status_code == (200 if optional else 422)
    assert optional or "--old-logprobs recomputed" in reply.json()["detail"][0]["msg"]
    refused = client.post("/scored_data", json=trainable(**HOPELESS))  # what is sent must be right
    assert refused.status_code == 422


def test_a_trainer_of_experts_says_which_routing_it_can_replay(client: TestClient) -> None:
    start(client, 2, routing=[3, 2, 8], routing_required=True)
    assert client.get("/info").json()["routing"] == [3, 2, 8]
    tokens = trainable()["tokens"]
    experts = [pack(np.zeros((len(ids) - 1, 3, 2), int)) for ids in tokens]
    assert client.post("/scored_data", json=trainable(routed_experts=experts)).status_code == 200
    for hostile, why in (
        (None, "--enable-return-routed-experts"),
        ([*experts[:-1], "AAAA"], r"fewer than the 4"),
        ([pack(np.full((len(ids) - 1, 3, 2), 8)) for ids in tokens], "expert 8 is not one of the model's 8"),
        ([7] * len(tokens), "Expected `str`"),
    ):
        reply = client.post("/scored_data", json=trainable(routed_experts=hostile))
        assert reply.status_code == 422
        assert why in reply.json()["detail"][0]["msg"]
        assert reply.json()["detail"][0]["loc"][1] == "routed_experts"


def test_an_ancestors_trainer_gets_groups_without_log_probabilities(client: TestClient) -> None:
    client.post("/register", json=registration(2))
    post(client, trainable(inference_logprobs=None))
    assert client.get("/batch").json()["batch"][0]["inference_logprobs"] is None
    assert set(client.get("/info").json()) == {"batch_size", "max_token_len"}
