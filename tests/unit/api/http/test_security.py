"""Who is let in, and what is not taken from those who are."""

import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient

from atroposlib.api.server import create_app
from atroposlib.api.settings import RunApiConfig
from atroposlib.config import resolve_config
from atroposlib.flags import ConfigError
from atroposlib.http_guard import OwnHosts
from tests.unit.api.support import (
    DEADLINE_S,
    api_settings,
    command,
    environment,
    group,
    register,
    register_env,
    registration,
)

TOKEN = "correct-horse-battery"
MSGPACK = {"Content-Type": "application/msgpack"}


def api(**settings: Any) -> TestClient:
    return TestClient(create_app(api_settings(**settings)))


# --- token ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer ü"]
)
def test_nothing_but_health_and_readiness_answers_without_the_token(header: str | None) -> None:
    client = api(api_token=TOKEN)
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    routes = client.app.openapi()["paths"]  # type: ignore[attr-defined]
    for path, methods in [
        *routes.items(),
        ("/docs", {"get": {}}),
        ("/openapi.json", {"get": {}}),
        ("/nowhere", {"post": {}}),
        ("/healthy", {"get": {}}),
        ("/health/", {"get": {}}),
        ("/ready/batch", {"get": {}}),
    ]:
        for method in methods:
            expected = 200 if path in ("/health", "/ready") else 401
            assert client.request(method, path, headers=headers).status_code == expected, path  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_the_right_token_opens_everything(scheme: str) -> None:
    client = api(api_token=TOKEN)
    for path in ("/status", "/metrics", "/latest_example"):
        assert client.get(path, headers={"Authorization": f"{scheme} {TOKEN}"}).status_code == 200


def config(*flags: str, **env: str) -> RunApiConfig:
    return resolve_config(RunApiConfig, flags, prog="run-api", env=env)[0]


def test_the_token_comes_from_flag_file_or_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    given = [
        config("--api-token", TOKEN),
        config("--api-token-file", str(tmp_path / "token")),
        config(ATROPOS_API_TOKEN=TOKEN),
    ]
    assert [one.token for one in given] == [TOKEN] * 3
    assert config().token is None


@pytest.mark.parametrize("content", ["short", "two words here", "", "ünïcödé-token"])
def test_a_file_without_a_usable_token_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="must hold one token of 8 or more"):
        config("--api-token-file", str(tmp_path / "token"))
    with pytest.raises(ConfigError, match="No such file"):
        config("--api-token-file", str(tmp_path / "none"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "some.host"])
def test_an_address_beyond_this_machine_wants_a_token_or_an_express_word(host: str) -> None:
    with pytest.raises(ConfigError, match=r"lets other machines in.*--api-token-file.*--allow-unauthenticated"):
        config("--host", host)
    for allowed in (config("--host", host, "--allow-unauthenticated"), config("--host", host, ATROPOS_API_TOKEN=TOKEN)):
        assert allowed.host == host
    for loopback in ("127.0.0.1", "127.0.0.5", "::1", "localhost"):
        assert config("--host", loopback).token is None


@pytest.mark.services
def test_a_dry_run_masks_the_token() -> None:
    ended = subprocess.run(
        command("--dry-run", "--api-token", TOKEN), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 0
    assert TOKEN not in ended.stdout + ended.stderr


# --- browsers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://elsewhere"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_a_web_page_can_change_nothing(headers: dict[str, str]) -> None:
    client = api()
    client.post("/register", json=registration(4))
    client.post("/scored_data", json=group(4))
    assert client.get("/batch", headers=headers).status_code == 403
    assert client.post("/reset_data", headers=headers).status_code == 403
    assert client.get("/status").json()["queue_size"] == 1


def test_the_apis_own_page_may_use_it() -> None:
    assert (
        api().get("/status", headers={"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}).status_code
        == 200
    )


@pytest.mark.parametrize(("legacy_gets", "batch", "reset"), [(None, 200, 405), (False, 404, 405), (True, 200, 200)])
def test_a_get_resets_only_with_the_legacy_flag(legacy_gets: bool | None, batch: int, reset: int) -> None:
    client = api(legacy_gets=legacy_gets)
    assert client.get("/reset_data").status_code == reset
    assert client.get("/batch").status_code == batch
    assert client.post("/reset_data").text == "Reset successful"


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Dest": "document"},
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"},  # beyond loopback browsers send nothing else
    ],
)
def test_no_link_takes_a_batch_or_resets_the_run_even_with_the_legacy_flag(headers: dict[str, str]) -> None:
    client = api(legacy_gets=True)
    client.post("/register", json=registration(4))
    client.post("/scored_data", json=group(4))
    for path in ("/batch", "/reset_data", "/batch/", "/reset_data?x", "/%72eset_data"):
        assert client.get(path, headers=headers).status_code == 403, path
    assert client.get("/status", headers=headers).json()["queue_size"] == 1
    assert client.get("/batch").json()["batch"]


def test_a_form_that_a_browser_navigates_with_is_refused() -> None:
    headers = {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Content-Type": "text/plain"}
    client = api()
    client.post("/register", json=registration(4))
    assert client.post("/reset_data", headers=headers).status_code == 403
    assert client.get("/info").json()["batch_size"] == 4


# --- Host -----------------------------------------------------------------------------------------------------------


def test_the_api_answers_no_foreign_host_on_any_route() -> None:
    client = api()
    routes = client.app.openapi()["paths"]  # type: ignore[attr-defined]
    for path, methods in [*routes.items(), ("/docs", {"get": {}}), ("/nowhere", {"post": {}})]:
        for method in methods:
            reply = client.request(method, path, headers={"Host": "evil.test:8000"})
            assert reply.status_code == 403, path
            assert "evil.test" in reply.json()["detail"], path
            assert "--allowed-host evil.test" in reply.json()["detail"]


def test_only_a_request_with_the_token_and_from_no_page_is_answered_under_any_host() -> None:
    client = api(api_token=TOKEN)
    bearer = {"Authorization": f"Bearer {TOKEN}", "Host": "trainer.cluster.local"}
    assert client.get("/status", headers=bearer).status_code == 200
    origin = {"Origin": "http://trainer.cluster.local"}
    for more in (origin, {"Sec-Fetch-Site": "same-origin"}, {"Authorization": "Bearer x"}):
        assert client.get("/status", headers=bearer | more).status_code == 403
    assert client.get("/health", headers={"Host": "trainer.cluster.local"}).status_code == 403


def test_allowed_hosts_are_those_of_the_flags() -> None:
    def hosts(*flags: str, **env: str) -> OwnHosts:
        app = create_app(config(*flags, **env))
        (found,) = (each.kwargs["hosts"] for each in app.user_middleware if "hosts" in each.kwargs)
        assert isinstance(found, OwnHosts)
        return found

    assert hosts() == OwnHosts()
    flags = ["--allowed-host", "Trainer.Example.", "--allowed-host=fd00::1"]
    assert hosts(*flags).names == OwnHosts().names | {"trainer.example", "fd00::1"}
    beyond = hosts("--host", "0.0.0.0", ATROPOS_API_TOKEN=TOKEN)
    assert beyond.addresses
    assert socket.gethostname().lower() in beyond.names


@pytest.mark.parametrize("name", ["", "*", "http://a", "a:8000", "a b", "a/", "::g", "ünï.de", "x" * 300])
def test_an_allowed_host_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="without scheme and port"):
        config(f"--allowed-host={name}")


@pytest.mark.parametrize("name", ["[::1", "a\nb", '{"a'])
def test_a_list_that_cannot_be_read_is_an_error_that_names_its_flag(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_host"):
        config(f"--allowed-host={name}")


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_queued_groups": 3}, {"max_queued_bytes": 1000}])
def test_a_full_queue_is_429_with_a_pause_and_has_room_again_after_a_batch(limit: dict[str, int]) -> None:
    client = api(**limit)
    register(client, batch_size=4)
    replies = [client.post("/scored_data", json=group(4, mark)) for mark in range(8)]
    taken = [reply.status_code for reply in replies].index(429)
    assert taken in (3, 4)
    assert {reply.status_code for reply in replies[taken:]} == {429}
    assert int(replies[-1].headers["Retry-After"]) >= 1
    assert "when the trainer has taken some" in replies[-1].json()["detail"]
    assert client.post("/scored_data_list", json=[group(1)] * 9).status_code == 429
    client.get("/batch")
    assert client.post("/scored_data", json=group(4)).status_code == 200


def test_a_group_of_too_many_sequences_is_refused_before_a_trainer_is_there() -> None:
    reply = api(max_sequences=3).post("/scored_data", json=group(4))
    assert reply.status_code == 422
    assert "at most 3" in reply.text


def test_an_environment_whose_groups_no_post_could_hold_is_not_registered() -> None:
    client = api(max_sequences=3)
    register(client, batch_size=8)
    client.get("/batch")
    env = {"max_token_length": 8, "desired_name": "env", "weight": 1.0}
    reply = client.post("/register-env", json=env | {"group_size": 4})
    assert reply.status_code == 422
    assert "group_size: a group of 4 sequences; at most 3 are accepted (--max-sequences)" in reply.text
    assert client.post("/register-env", json=env | {"group_size": 3}).json()["status"] == "success"


@pytest.mark.parametrize("wrong", [-1, 100, 2**40])
@pytest.mark.parametrize("registered", [True, False])
def test_ids_outside_a_known_vocabulary_are_refused_with_their_position(wrong: int, registered: bool) -> None:
    client = api(vocab_size=None if registered else 100)
    register(client, batch_size=2, **({"vocab_size": 100} if registered else {}))
    good = {"tokens": [[0, 99], [5, 6]], "masks": [[0, 99], [5, 6]], "scores": [0, 1]}
    assert client.post("/scored_data", json=good).status_code == 200
    reply = client.post("/scored_data", json=good | {"tokens": [[0, 99], [5, wrong]]})
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"] == ["body", "tokens", 1, 1]
    assert str(wrong) in reply.text


# --- MessagePack ----------------------------------------------------------------------------------------------------


def pack(content: Any) -> bytes:
    return msgspec.msgpack.encode(content)


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack, application/json"])
def test_a_batch_is_the_same_in_both_formats(accept: str) -> None:
    client = api()
    register(client, batch_size=8)
    full = group(4, 1, policy_versions=[[1, 2]] * 4, overrides=[{"a": 1.5}] * 4, env_id=None)
    assert client.post("/scored_data", content=pack(full), headers=MSGPACK).json() == {"status": "received"}
    client.post("/scored_data_list", content=pack([full]), headers=MSGPACK)
    assert client.get("/latest_example").json() == {**dict.fromkeys(client.get("/latest_example").json()), **full}
    reply = client.get("/batch", headers={"Accept": accept})
    assert reply.headers["content-type"] == accept.split(",")[0]
    batch = reply.json() if "json" in reply.headers["content-type"] else msgspec.msgpack.decode(reply.content)
    assert [{name: item[name] for name in full} for item in batch["batch"]] == [full, full]
    assert all(len(item) == 15 for item in batch["batch"])


def test_a_mixed_batch_is_json() -> None:
    client = api()
    register(client, batch_size=8)
    client.post("/scored_data", content=pack(group(4, 1)), headers=MSGPACK)
    client.post("/scored_data", json=group(4, 2))
    reply = client.get("/batch", headers={"Accept": "application/msgpack"})
    assert [item["tokens"][0][0] for item in reply.json()["batch"]] == [1, 2]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"scores": [float("nan"), 1.0]}, "scores"),
        ({"inference_logprobs": [[0.0, float("-inf")], [0.0, 0.0]]}, "inference_logprobs"),
        ({"distill_logprobs": [[[float("nan")]]]}, "distill_logprobs"),
        ({"generation_params": {"temperature": float("nan")}}, "generation_params"),
        ({"generation_params": {"seed": b"bytes"}}, "generation_params"),
        ({"images": [msgspec.msgpack.Ext(5, b"x")]}, "images"),
        ({"overrides": [{}, {"when": {1: 2}}]}, "overrides"),
        ({"tokens": [[1, "2"], [1, 2]]}, "tokens"),
    ],
)
def test_what_json_cannot_say_is_refused_in_messagepack_too(change: dict[str, Any], where: str) -> None:
    client = api()
    reply = client.post("/scored_data", content=pack(group(2, **change)), headers=MSGPACK)
    assert reply.status_code == 422
    assert where in reply.text
    assert client.get("/status").json()["queue_size"] == 0


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91" * 10_000, b"\xdd\xff\xff\xff\xff", b"{}", pack([1]), pack({"tokens": 1})]
)
def test_what_is_not_messagepack_of_the_right_shape_is_422(body: bytes) -> None:
    for path in ("/scored_data", "/scored_data_list"):
        assert api().post(path, content=body, headers=MSGPACK).status_code == 422


def test_sums_that_overflow_are_no_reason_to_refuse() -> None:
    large = group(2, ref_logprobs=[[1e308, 1e308], [0.0, 0.0]])
    assert api().post("/scored_data", content=pack(large), headers=MSGPACK).status_code == 200


# --- names ----------------------------------------------------------------------------------------------------------

EVIL = "evil\n12:00:00 INFO [api] Trainer registered: batch_size=999\x1b[2J\x1b]0;owned\x07"


@pytest.mark.parametrize("name", [EVIL, "x" * 129, "a\u202eb", "a\n"], ids=ascii)
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/register-env", environment(4), "desired_name"),
        ("/register", registration(4), "wandb_group"),
        ("/register", registration(4), "wandb_project"),
        ("/register", registration(4), "run"),
    ],
)
def test_a_name_that_is_long_or_not_printable_is_refused_with_field_and_limit(
    path: str, body: dict[str, Any], field: str, name: str
) -> None:
    client = api()
    register(client, batch_size=4)
    reply = client.post(path, json=body | {field: name})
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"] == ["body", field]
    assert "at most 128 characters" in reply.text
    assert reply.text.isascii()
    assert "\x1b" not in reply.text
    assert client.post(path, json=body | {field: "Ω" * 128}).status_code == 200


def test_a_metric_is_a_name_too() -> None:
    client = api()
    register(client, batch_size=4)
    body = {"env_id": register_env(client), "policy_version": 1, "accuracy": 0.5}
    assert client.post("/evaluation", json=body | {"metrics": {EVIL: 1.0}}).status_code == 422
    assert client.post("/evaluation", json=body | {"metrics": {"eval/percent_correct": 1.0}}).status_code == 200
