"""Wrongly typed and hostile requests on a real vLLM: each is answered, and the engine answers the next plain one."""

import json
from typing import Any

import pytest

from tests.client import http
from tests.integration.conftest import AUTHORIZED, Server

DEEP = "[" * 900 + "]" * 900
PLAIN: dict[str, Any] = {"prompt": {"prompt_token_ids": [1, 2, 3]}, "max_tokens": 2}

WRONG: list[Any] = [
    {"max_tokens": 1.5},
    {"max_tokens": "2"},
    {"seed": 2**70},
    {"seed": 2**63},
    {"ignore_eos": "false"},
    {"temperature": "hot"},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": 5}},
    {"structured_outputs": {"choice": ["a"]}},  # they are off
    {"logit_bias": {"5": "x"}},
    {"logit_bias": {"99999": 1}},
    {"stop_token_ids": [-1]},
    {"allowed_token_ids": [10**9]},
    {"logprob_token_ids": [1.5]},
    {"trace_decode_token_ids": [-1]},
    {"bad_words": "abc"},
    {"stop": ["\ud800"]},
    {"extra_args": {"a": 2**70}},
    {"extra_args": {"kv_transfer_params": "x"}},
    {"repetition_detection": {"max_pattern_size": -1}},
    {"min_tokens": 2**62, "max_tokens": None},
    {"n": 10**9},
    {"prompt": {"prompt_token_ids": [1.5]}},
    {"prompt": {"prompt_token_ids": [1000]}},
    {"prompt": {"prompt_token_ids": [-1]}},
    {"prompt": {"prompt_token_ids": [2**70]}},
    {"prompt": {"prompt_token_ids": [True]}},
    {"prompt": "\ud800"},
    {"model": [1]},
]
RIGHT: list[Any] = [
    {"max_tokens": 2.0},
    {"seed": 1.0, "logprobs": 0.0, "min_tokens": 1.0},
    {"seed": -(2**63)},
    {"top_k": 2.0**40},
    {"logit_bias": {"5": 100}},
    {"stop_token_ids": [3.0]},
    {"prompt": {"prompt_token_ids": [1.0, 2.0, 3.0]}},
    {"extra_args": {"a": 1.5}},
    {"repetition_detection": {"max_pattern_size": 2**62, "min_count": 2}},
]
OPENAI: list[Any] = [
    {"max_tokens": 1.5},
    {"seed": 2**70},
    {"priority": 2**70},
    {"stream_interval": 2**70},
    {"vllm_xargs": {"a": 2**70}},
    {"kv_transfer_params": {"a": 2**70}},
    {"request_id": "\ud800"},
    {"session_id": "\ud800"},
    {"stop": ["\ud800"]},
    {"prompt": [2**70]},
    {"repetition_detection": {"max_pattern_size": 2**70, "min_count": 2}},
    {"stop_token_ids": [2**70]},
    {"structured_outputs": {}},
]


OFFER: dict[str, Any] = {
    "session": "s",
    "address": "127.0.0.1",
    "port": 1,
    "world_size": 2,
    "backend": "gloo",
    "manifest_digest": "d",
    "bucket_bytes": 1,
    "timeout_s": 1,
    "lease_s": 1,
    "trainer": "h:1",
}
PROCESS = {"boot_id": "b", "pid_namespace": 1, "pid": 1, "started": 1}
ATTACH = {"session": "s", "manifest_digest": "d", "lease_s": 1, "trainer": "h:1", "process": PROCESS}
BRIDGE: list[Any] = [
    ("session", OFFER | {"port": 1.5}, "1.5"),
    ("session", OFFER | {"lease_s": 301}, "301"),
    ("session", OFFER | {"trainer": "a\nb"}, "trainer"),
    ("attach", ATTACH | {"process": PROCESS | {"pid": "x"}}, "pid"),
    ("attach", ATTACH | {"process": PROCESS | {"pid": 10**30}}, "pid"),
    ("attach", ATTACH | {"lease_s": 3600}, "3600"),
    ("commit", {"session": "s", "policy_version": 2**70}, "policy_version"),
    ("commit", {"session": "s", "policy_version": "1"}, "policy_version"),
    ("commit", {"session": "s", "policy_version": 1.5}, "1.5"),
    ("resume", {"session": "s", "policy_version": 2**70}, "policy_version"),
    ("resume", {"session": ["s"]}, "session"),
    ("pause", {"session": "a" * 129, "policy_version": 1, "deadline_s": 1}, "session"),
    ("pause", {"session": "s", "policy_version": 1, "deadline_s": 1e9}, "deadline_s"),
    ("fence", {"session": "s\n", "reason": "r"}, "session"),
]


def post(server: Server, path: str, body: Any) -> tuple[int, str]:
    text = body if isinstance(body, str) else json.dumps(body)
    headers = {**AUTHORIZED, "Content-Type": "application/json"}
    reply = http.post(server.url + path, content=text.encode(), headers=headers, timeout=30)
    return reply.status_code, reply.text


def test_wrongly_typed_requests_are_400_and_the_engine_lives_on(vllm_server: Server) -> None:
    for wrong in WRONG:
        status, text = post(vllm_server, "/generate", PLAIN | wrong)
        assert status == 400, (wrong, status, text)
        assert text.isascii(), (wrong, status, text)
        assert next(iter(wrong)) in text, (wrong, status, text)
    for text in (
        f'{{"prompt": {DEEP}}}',
        f'{{"prompt": "a", "extra_args": {{"a": {DEEP}}}}}',
        '{"prompt": "a", "top_p": NaN}',
    ):
        assert post(vllm_server, "/generate", text)[0] in (400, 422), text[:80]
    assert len(vllm_server.generate([1, 2, 3], max_tokens=2, ignore_eos=True)["token_ids"][0]) == 2


def test_what_json_can_only_write_otherwise_is_understood(vllm_server: Server) -> None:
    for right in RIGHT:
        status, text = post(vllm_server, "/generate", PLAIN | right)
        assert status == 200, (right, status, text)
    assert vllm_server.generate([1, 2, 3], max_tokens=3.0, logit_bias={"5": 100}, temperature=0)["token_ids"] == [
        [5, 5, 5]
    ]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_openai_route_reaches_the_engine_with_what_it_cannot_decode(vllm_server: Server, path: str) -> None:
    plain = {"model": vllm_server.model, "max_tokens": 2}
    plain |= {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": [1, 2, 3]}
    for wrong in OPENAI:
        status, text = post(vllm_server, path, plain | wrong)
        assert status == 400 or ("chat" in path and "prompt" in wrong), (wrong, status, text)
    status, text = post(vllm_server, path, plain)
    assert status == 200, text


def test_fields_of_the_bridge_are_typed_and_bounded(vllm_server: Server) -> None:
    for route, body, named in BRIDGE:
        status, text = post(vllm_server, f"/v1/bridge/{route}", body)
        assert status == 400, (route, body, status, text)
        assert named in text, (route, body, status, text)
    bridge = vllm_server.status()
    assert bridge["session"] is None
    assert bridge["refusing"] is None
