"""One bad value costs what a good one costs; a body is bounded by what it would build; the event loop stays free."""

import gzip
import json
import re
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi.testclient import TestClient

from atroposlib.api.groups import posted_groups
from atroposlib.api.groups.decoding import MAX_GZIP_MEMBERS, RefusedBody, gunzip
from atroposlib.api.groups.posted_groups import as_json, read_groups, with_weight
from tests.client import http
from tests.unit.api.support import DEADLINE_S, group, read_group, register

MSGPACK = {"Content-Type": "application/msgpack"}
ENCODE: dict[bool, Callable[[Any], bytes]] = {
    False: lambda content: json.dumps(content).encode(),
    True: msgspec.msgpack.encode,
}
SEQUENCES = 16


def large(tokens: int) -> dict[str, Any]:
    """A group of 16 sequences; about 35 bytes of JSON for each token."""
    ids = [[(7 * place * place + row) % 49_152 for place in range(tokens)] for row in range(SEQUENCES)]
    logprobs = [[-1.0 / (1 + place + row) for place in range(tokens)] for row in range(SEQUENCES)]
    prompts = [[{"role": "user", "content": "How many, [x] or {y}? " * 20}]] * SEQUENCES
    return {
        "tokens": ids,
        "masks": ids,
        "scores": [0.5] * SEQUENCES,
        "inference_logprobs": logprobs,
        "messages": prompts,
        "images": [0.5],
    }


def with_value(body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """The group with this value at the very end of a field."""
    *before, last = body[field]
    return body | {field: [*before, [*last[:-1], value] if isinstance(last, list) else value]}


def cpu_seconds(work: Callable[[], object]) -> float:
    """The least of three."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


def refusal_of(body: bytes, packed: bool) -> RefusedBody:
    with pytest.raises(RefusedBody) as refused:
        read_group(body, packed)
    return refused.value


BAD = [
    ("scores", None),
    ("scores", float("nan")),
    ("scores", "x"),
    ("scores", {"deep": [1]}),
    ("tokens", None),
    ("tokens", 1.5),
    ("tokens", 2**60),
    ("inference_logprobs", None),
    ("inference_logprobs", float("nan")),
    ("inference_logprobs", float("-inf")),
    ("inference_logprobs", "x"),
    ("images", float("inf")),
]


def expect_cheap_refusals(tokens: int, packed: bool) -> None:
    good = large(tokens)
    accepted = cpu_seconds(lambda: read_group(ENCODE[packed](good), packed)) - cpu_seconds(lambda: ENCODE[packed](good))
    for field, value in BAD:
        body = ENCODE[packed](with_value(good, field, value))
        location = (field, 0) if field == "images" else (field, 15) if field == "scores" else (field, 15, tokens - 1)
        assert refusal_of(body, packed).location == location, (field, value)
        spent = cpu_seconds(lambda body=body: refusal_of(body, packed))  # type: ignore[misc]
        assert spent < 1.5 * accepted + 0.01, (field, value, spent, accepted)


@pytest.mark.parametrize("packed", [False, True])
def test_refusing_one_bad_value_costs_what_accepting_costs_and_names_its_position(packed: bool) -> None:
    expect_cheap_refusals(4_000, packed)


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [False, True])
def test_refusing_one_bad_value_of_40_megabytes_costs_what_accepting_costs(packed: bool) -> None:
    expect_cheap_refusals(70_000, packed)


@pytest.mark.parametrize("packed", [False, True])
def test_a_boolean_in_a_large_group_becomes_a_number_and_the_rest_stays_as_it_was(packed: bool) -> None:
    good = large(2_000)
    _, item = read_group(ENCODE[packed](with_value(good, "inference_logprobs", True)), packed)
    back = (msgspec.msgpack if packed else msgspec.json).decode(item)
    assert {name: back[name] for name in good} == with_value(good, "inference_logprobs", 1.0)
    assert type(back["inference_logprobs"][-1][-1]) is float


def test_words_for_no_number_inside_of_strings_do_not_confuse_the_position(client: TestClient) -> None:
    tricky = group(
        2,
        messages=[[{"role": "user", "content": 'NaN "Infinity" [-Infinity]'}], []],
        scores=[float("-inf"), float("nan")],
    )
    detail = client.post("/scored_data", content=json.dumps(tricky)).json()["detail"][0]
    assert detail["loc"] == ["body", "scores", 0]
    assert detail["msg"] == "scores[0]: -inf is not a finite number"
    assert detail["input"] == "-inf"
    nested = group(2, generation_params={"a": [{"NaN": [1, float("nan")]}]})
    detail = client.post("/scored_data", content=json.dumps(nested)).json()["detail"][0]
    assert detail["loc"] == ["body", "generation_params", "a", 0, "NaN", 1]
    listed = client.post("/scored_data_list", content=json.dumps([group(2), nested])).json()["detail"][0]
    assert listed["loc"] == ["body", 1, "generation_params", "a", 0, "NaN", 1]
    assert client.post("/scored_data", content=json.dumps(group(2, unknown=float("nan")))).status_code == 422


# --- what a body would build ----------------------------------------------------------------------


def packed_array(field: str, entry: bytes, count: int) -> bytes:
    """A small group with one large array, in MessagePack."""
    key = bytes([0xA0 + len(field)]) + field.encode()
    return (
        b"\x84\xa6tokens\x91\x91\x01\xa5masks\x91\x91\x01\xa6scores\x91\x01"
        + key
        + b"\xdd"
        + count.to_bytes(4, "big")
        + entry * count
    )


def json_array(field: str, entry: bytes, count: int) -> bytes:
    """The same in JSON."""
    return b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"%s":[%s]}' % (field.encode(), b",".join([entry] * count))


@pytest.fixture
def few_nodes(monkeypatch: pytest.MonkeyPatch) -> int:
    """The bound on what a body builds, lowered so that small bodies pass it."""
    monkeypatch.setattr(posted_groups, "MAX_ARRAYS", 20_000)
    monkeypatch.setattr(posted_groups, "MAX_VALUES", 20_000)
    return 20_000


@pytest.mark.parametrize(
    "field", ["images", "messages", "overrides", "advantages", "distill_token_ids", "tokens", "env_id"]
)
@pytest.mark.parametrize(
    ("packed", "entry"),
    [(True, b"\x80"), (True, b"\x90"), (True, b"\x81\xa1a\x80"), (False, b"{}"), (False, b"[]"), (False, b'{"a":[]}')],
)
def test_a_body_that_would_build_too_many_objects_is_refused_before_it_does(
    few_nodes: int, field: str, packed: bool, entry: bytes
) -> None:
    body = (packed_array if packed else json_array)(field, entry, 10 * few_nodes)
    tracemalloc.start()
    try:
        assert refusal_of(body, packed).status in (413, 422)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body) + 1e6  # objects would be 60 times as large
    finally:
        tracemalloc.stop()


@pytest.mark.services
def test_20_megabytes_of_empty_maps_are_refused_with_little_memory(process: tuple[subprocess.Popen[str], str]) -> None:
    served, url = process
    reply = http.post(
        f"{url}/scored_data", content=packed_array("images", b"\x80", 20_000_000), headers=MSGPACK, timeout=DEADLINE_S
    )
    peak_kb = int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{served.pid}/status").read_text())[0])
    assert reply.status_code == 413, (reply.text, peak_kb)
    assert peak_kb < 300_000, (reply.text, peak_kb)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("field", ["scores", "advantages", "inference_logprobs", "distill_logprobs"])
def test_short_numbers_that_would_take_much_memory_are_refused_before_they_do(
    few_nodes: int, field: str, packed: bool
) -> None:
    count = 50 * few_nodes
    numbers: Any = [1] * count
    for _ in range({"scores": 0, "distill_logprobs": 2}.get(field, 1)):
        numbers = [numbers]
    body = ENCODE[packed](group(1) | {field: numbers})
    tracemalloc.start()
    try:
        refusal = refusal_of(body, packed)
        assert refusal.status == 413
        assert refusal.location == (field,)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body) + 1e6  # floats would be 32 times as large
    finally:
        tracemalloc.stop()
    usual = 0.5 if packed else 1.0
    assert read_group(ENCODE[packed](group(1, inference_logprobs=[[usual] * count])), packed)


def test_a_list_of_more_groups_than_are_stored_at_once_is_refused(client: TestClient) -> None:
    body = [{"tokens": [[1]], "masks": [[1]], "scores": [1]}] * (posted_groups.MAX_LISTED + 1)
    for packed, headers in ((False, {}), (True, MSGPACK)):
        refused = client.post("/scored_data_list", content=ENCODE[packed](body), headers=headers)
        assert refused.status_code == 422
        assert "16384" in refused.text
        stored = client.post("/scored_data_list", content=ENCODE[packed](body[1:]), headers=headers)
        assert stored.json()["groups_processed"] == 16_384


def test_the_groups_of_a_list_share_the_bound(few_nodes: int) -> None:
    part = group(1, images=[1] * (few_nodes // 4))
    with pytest.raises(RefusedBody, match="more than"):
        read_groups(msgspec.json.encode([part] * 5), packed=False, in_list=True)
    assert len(read_groups(msgspec.json.encode([part] * 3), packed=False, in_list=True)) == 3


@pytest.mark.parametrize("packed", [False, True])
def test_long_texts_full_of_punctuation_are_no_objects(few_nodes: int, packed: bool) -> None:
    text = 'a, "b": [{é' * few_nodes
    data, item = read_group(ENCODE[packed](group(1, messages=[[{"role": "user", "content": text}]])), packed)
    assert data.messages is not None
    assert data.messages[0][0]["content"] == text
    assert len(item) > len(text)


@pytest.mark.parametrize("field", ["images", "tokens", "messages", "env_id"])
@pytest.mark.parametrize("depth", [200, 900, 100_000])
def test_deep_nesting_is_refused_in_both_formats(client: TestClient, field: str, depth: int) -> None:
    deep = b'{"tokens":[[true],%s],"masks":[[1]],"scores":[1]}' % (b"[" * depth + b"]" * depth)
    if field != "tokens":
        deep = b'{"tokens":[[true]],"masks":[[1]],"scores":[1],"%s":%s}' % (field.encode(), b"[" * depth + b"]" * depth)
    assert client.post("/scored_data", content=deep).status_code == 422
    packed = packed_array(field, b"\x91" * depth + b"\x90", 1)
    assert client.post("/scored_data", content=packed, headers=MSGPACK).status_code == 422
    for path in ("/register", "/evaluation"):
        assert (
            client.post(
                path, content=b'{"metrics":{"a":true,"b":%s},"env_id":true}' % (b"[" * depth + b"]" * depth)
            ).status_code
            == 422
        )


def test_a_field_that_stands_twice_is_stored_once_as_it_was_checked(client: TestClient) -> None:
    register(client, batch_size=1)
    twice = b'{"images":"\xff","tokens":[[1]],"masks":[[1]],"scores":[1],"images":"seen"}'
    assert client.post("/scored_data", content=twice).status_code == 200
    assert client.get("/batch").json()["batch"][0]["images"] == "seen"


def test_a_request_without_groups_is_small(client: TestClient) -> None:
    for path in ("/register", "/register-env", "/evaluation", "/heartbeat", "/batch/ack"):
        assert client.post(path, content=b"[" + b"{}," * 500_000 + b"{}]").status_code == 413


def test_weights_and_translations_touch_what_they_must() -> None:
    full = group(2, images=[{"a": 1.5, "b": ["é"]}], group_overrides={"sft": True})
    _, plain = read_group(msgspec.json.encode(full), packed=False)
    _, item = read_group(msgspec.msgpack.encode(full), packed=True)
    assert msgspec.json.decode(as_json(item)) == msgspec.json.decode(plain)
    weighted = msgspec.msgpack.decode(with_weight(item, True, 0.5, 2))
    assert weighted == msgspec.msgpack.decode(item) | {
        "group_overrides": {"sft": True, "staleness_weight": 0.5, "staleness_limit": 2}
    }


# --- gzip -----------------------------------------------------------------------------------------


def test_gzip_of_many_members_takes_time_in_their_number() -> None:
    member = gzip.compress(b"")
    few = cpu_seconds(lambda: gunzip(member * (MAX_GZIP_MEMBERS // 8), 1))
    many = cpu_seconds(lambda: gunzip(member * MAX_GZIP_MEMBERS, 1))
    assert many < 24 * few  # 8 times as many; quadratic time would be 64
    with pytest.raises(RefusedBody, match="Invalid gzip"):
        gunzip(member * (5 * MAX_GZIP_MEMBERS), 1)


def test_gzip_members_of_any_size_and_zeros_behind_them_are_read() -> None:
    parts = [bytes([number % 251]) * (37 * number * number) for number in range(40)]
    together = b"".join(gzip.compress(part, 1) + b"\0" * (number % 3) for number, part in enumerate(parts))
    assert gunzip(together, 10**7) == b"".join(parts)


# --- the event loop -------------------------------------------------------------------------------


def worst_health(url: str, post: Callable[[], None]) -> float:
    """The longest that /health took while posts continued."""
    ended = threading.Event()
    times = [0.0]

    def ask() -> None:
        with httpx.Client(trust_env=False) as session:
            while not ended.is_set():
                start = time.monotonic()
                session.get(f"{url}/health", timeout=DEADLINE_S)
                times.append(time.monotonic() - start)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        post()
    finally:
        ended.set()
        asking.join()
    return max(times)


@pytest.mark.services
def test_health_is_answered_while_large_posts_are_accepted_and_refused(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    _, url = process
    good = large(9_000)
    many = [group(1)] * 10_000
    posts = [
        ("scored_data", ENCODE[False](good), {}, 200),
        ("scored_data", ENCODE[False](with_value(good, "scores", None)), {}, 422),
        ("scored_data", ENCODE[False](with_value(good, "inference_logprobs", float("nan"))), {}, 422),
        ("scored_data", ENCODE[True](with_value(good, "inference_logprobs", float("nan"))), MSGPACK, 422),
        (
            "scored_data",
            gzip.compress(ENCODE[False](with_value(good, "scores", None)), 1),
            {"Content-Encoding": "gzip"},
            422,
        ),
        ("scored_data", packed_array("images", b"\x80", 5_000_000), MSGPACK, 413),
        ("scored_data_list", ENCODE[False](many), {}, 200),
        ("scored_data_list", ENCODE[False]([*many, group(1, scores=[None])]), {}, 422),
    ]

    def post() -> None:
        for path, body, headers, status in posts:
            reply = http.post(f"{url}/{path}", content=body, headers=headers, timeout=DEADLINE_S)
            assert reply.status_code == status, reply.text

    # tens of milliseconds on a free machine; it was 1 s for each MB refused, each time
    late = list(takewhile(lambda worst_s: worst_s >= 1.0, (worst_health(url, post) for _ in range(3))))
    assert len(late) < 3, f"/health took {late} s"
    assert http.get(f"{url}/status", timeout=DEADLINE_S).json()["queue_size"] == 10_001 * (len(late) + 1)
