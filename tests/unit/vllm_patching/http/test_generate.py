"""What /generate answers: ids, log-probabilities and the policy versions that each sequence was sampled under."""

from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from packaging.version import Version

from atroposlib.routing import unpack
from tests.unit.vllm_patching.fake_engine import VOCABULARY, FakeEngine, serving
from vllm_patching.compat import vllm_engine

PROMPT = {"prompt_token_ids": [5, 6]}


def sequence(ids: list[int], *versions: int, finish_reason: str = "stop") -> Any:
    """One sampled sequence as vLLM describes it, each token labelled with the version that it came from."""
    logprobs = [
        {token: SimpleNamespace(logprob=-token / 10), 1: SimpleNamespace(logprob=-0.05)}
        if token != 1
        else {token: SimpleNamespace(logprob=-token / 10)}
        for token in ids
    ]
    spans = [SimpleNamespace(version=str(version), start=start) for start, version in enumerate(versions)]
    return SimpleNamespace(
        text="t" * len(ids),
        finish_reason=finish_reason,
        token_ids=ids,
        logprobs=logprobs,
        weight_versions=spans,
        routed_experts=None,
    )


def output(*sequences: Any, prompt_logprobs: Any = None) -> Any:
    return SimpleNamespace(
        outputs=list(sequences), prompt=None, prompt_token_ids=(5, 6), prompt_logprobs=prompt_logprobs
    )


async def generate(engine: FakeEngine, **body: Any) -> httpx.Response:
    async with serving(engine) as client:
        return await client.post("/generate", json={"prompt": PROMPT, **body})


async def test_each_sequence_comes_with_its_ids_and_their_own_log_probabilities() -> None:
    engine = FakeEngine(1)
    engine.output = output(sequence([7, 8], 3), sequence([9], 3, finish_reason="length"))
    reply = (await generate(engine, n=2, logprobs=0)).json()
    assert reply == {
        "text": ["tt", "t"],
        "prompt": None,
        "finish_reasons": ["stop", "length"],
        "prompt_token_ids": [5, 6],
        "token_ids": [[7, 8], [9]],
        "policy_versions": [[3, 3], [3, 3]],
        "version_spans": [[[0, 3]], [[0, 3]]],
        "logprobs": [[[{"7": -0.7}], [{"8": -0.8}]], [[{"9": -0.9}]]],
    }


async def test_the_experts_of_each_sequence_are_given_if_vllm_returns_them() -> None:
    engine = FakeEngine(1)
    engine.output = output(sequence([7, 8], 3), sequence([9], 3))
    experts = [np.arange(12).reshape(3, 2, 2), np.arange(300, 308).reshape(2, 2, 2)]
    for each, ids in zip(engine.output.outputs, experts, strict=True):
        each.routed_experts = np.concatenate([ids, ids[:1]])  # a stop string removed a token
    reply = (await generate(engine, n=2)).json()
    for text, ids in zip(reply["routed_experts"], experts, strict=True):
        assert np.array_equal(unpack(text), ids)


async def test_the_prompt_s_log_probabilities_are_given_where_asked_for() -> None:
    engine = FakeEngine(1)
    entries = [None, {6: SimpleNamespace(logprob=-0.6), 2: SimpleNamespace(logprob=-0.2)}]
    engine.output = output(sequence([7], 1), prompt_logprobs=entries)
    reply = (await generate(engine, prompt_logprobs=1)).json()
    assert reply["prompt_logprobs"] == [None, {"6": -0.6, "2": -0.2}]
    assert "logprobs" not in reply


@pytest.mark.parametrize(
    ("versions", "expected", "spans"),
    [
        ((3,), [3, 3], [[0, 3]]),
        ((3, 4), [3, 4], [[0, 3], [1, 4]]),
        ((3, 4, 6), [3, 6], [[0, 3], [1, 4], [2, 6]]),
        ((3, 4, 6, 7), [3, 6], [[0, 3], [1, 4], [2, 6]]),  # the last token was taken back
        ((), [1, 2], None),
    ],
)
async def test_a_sequence_names_the_versions_of_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
    versions: tuple[int, ...],
    expected: list[int],
    spans: list[list[int]] | None,
) -> None:
    monkeypatch.setattr(vllm_engine, "VERSION", Version("0.32"))
    engine = FakeEngine(1)
    engine.output = output(sequence([7, 8, 9], *versions))
    async with serving(engine) as client:
        await client.opened()
        await client.committed(1)

        async def sync() -> None:
            await client.committed(2)

        engine.during["generate"] = sync
        reply = await client.post("/generate", json={"prompt": PROMPT})
    assert (reply.json()["policy_versions"], reply.json()["version_spans"]) == ([expected], [spans])


async def test_before_vllm_labels_tokens_the_versions_are_those_at_the_request_s_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_engine, "VERSION", Version("0.31"))
    engine = FakeEngine(1)
    engine.output = output(sequence([7]), sequence([8]))
    async with serving(engine) as client:
        await client.opened()
        await client.committed(1)

        async def sync() -> None:
            await client.committed(2)

        engine.during["generate"] = sync
        across = await client.post("/generate", json={"prompt": PROMPT, "n": 2})
        after = await client.post("/generate", json={"prompt": PROMPT, "n": 2})
    assert (across.json()["policy_versions"], across.json()["version_spans"]) == ([[1, 2]] * 2, [None] * 2)
    assert (after.json()["policy_versions"], after.json()["version_spans"]) == ([[2, 2]] * 2, [[[0, 2]]] * 2)


async def test_what_a_poisoned_engine_gave_up_is_refused_with_the_reason() -> None:
    engine = FakeEngine(1)
    engine.output = output(sequence([7], 1), sequence([8], 1, finish_reason="abort"))
    async with serving(engine) as client:
        reply = await client.post("/generate", json={"prompt": PROMPT, "n": 2})
        assert reply.json()["finish_reasons"] == ["stop", "abort"]
        await client.opened()

        async def fence() -> None:
            await client.post("/v1/bridge/fence", json={"session": "a", "reason": "too slow"})

        engine.during["generate"] = fence
        reply = await client.post("/generate", json={"prompt": PROMPT, "n": 2})
    assert reply.status_code == 503
    assert reply.json()["error"]["message"].startswith("too slow")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "prompt must be a string or"),
        ([1, VOCABULARY], rf"prompt_token_ids[1]={VOCABULARY}: expected ids below {VOCABULARY}, the vocabulary"),
        ([-1], "prompt_token_ids"),
        ([True], "prompt_token_ids"),
    ],
)
async def test_ids_that_no_prompt_can_have_are_refused(ids: list[Any], says: str) -> None:
    engine = FakeEngine(1)
    reply = await generate(engine, prompt={"prompt_token_ids": ids})
    assert reply.status_code in (400, 422)
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
async def test_log_probabilities_that_are_no_numbers_are_an_error_not_a_reply(value: float) -> None:
    engine = FakeEngine(1)
    bad = sequence([7, 8], 1)
    bad.logprobs[1][8].logprob = value
    engine.output = output(bad)
    reply = await generate(engine, logprobs=0)
    assert reply.status_code == 500
    assert "log-probabilities are not finite" in reply.json()["error"]["message"]


async def test_the_key_of_the_server_guards_generation() -> None:
    engine = FakeEngine(1)
    engine.output = output(sequence([7], 1))
    async with serving(engine, api_key=["secret"]) as client:
        codes = [
            (await client.post(path, json={"prompt": PROMPT}, headers=headers)).status_code
            for path in ("/generate", "/v1/generate")
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secret"})
        ]
    assert codes == [401, 401, 200] * 2
