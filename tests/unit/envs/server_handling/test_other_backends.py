"""SGLang and TRL: clients written against their documented replies, on fake servers that give those."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer, save_tiny_tokenizer
from tests.serving import serving

TOKENIZER = make_tiny_tokenizer()
YES = [*TOKENIZER.encode("yes"), TOKENIZER.eos_token_id]
Handler = Callable[[dict[str, Any]], Any]


@contextlib.asynccontextmanager
async def manager(folder: Path, server_type: str, path: str, handler: Handler) -> AsyncIterator[ServerManager]:
    """A manager of one fake server that answers POST `path` by `handler`."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(handler(await request.json()))

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    tokenizer = str(save_tiny_tokenizer(folder / "tokenizer"))
    routes = [web.post(path, answer), web.get("/health", health), web.get("/health/", health)]
    async with serving(routes) as url:
        config = APIServerConfig.model_validate(
            {"server_type": server_type, "base_url": url, "model_name": "m", "tokenizer_name": tokenizer}
        )
        servers = ServerManager([config])
        try:
            yield servers
        finally:
            await servers.close()


def sglang(body: dict[str, Any]) -> Any:
    if "logprob_start_len" in body:
        first, *rest = body["input_ids"]
        own = [[None, first, None], *([-2.0, token, None] for token in rest)]
        top = (
            [None, *([[-0.1, token + 1, None], [-2.0, token, None]] for token in rest)]
            if body["top_logprobs_num"]
            else []
        )
        return {
            "text": "",
            "meta_info": {"input_token_logprobs": own, "input_top_logprobs": top, "finish_reason": None},
        }
    assert body["return_logprob"]
    assert body["sampling_params"]["max_new_tokens"] == 8
    assert "max_tokens" not in body["sampling_params"]
    info = {
        "output_token_logprobs": [[-0.5, token, None] for token in YES],
        "finish_reason": {"type": "stop", "matched": TOKENIZER.eos_token_id},
        "weight_version": "3",
    }
    n = body["sampling_params"].get("n", 1)
    return [{"text": "yes", "meta_info": info}] * n if n > 1 else {"text": "yes", "meta_info": info}


@pytest.mark.parametrize("n", [1, 3])
async def test_sglang_gives_tokens_log_probabilities_and_versions(tmp_path: Path, n: int) -> None:
    async with manager(tmp_path, "sglang", "/generate", sglang) as servers, servers.managed_server() as managed:
        reply = await managed.chat_completion(messages=[{"role": "user", "content": "?"}], n=n, max_tokens=8)
        nodes = managed.get_state()["nodes"]
    assert [choice.message.content for choice in reply.choices] == ["yes"] * n
    assert len(nodes) == n
    assert nodes[0].tokens[-len(YES) :] == YES
    assert nodes[0].logprobs[-len(YES) :] == [-0.5] * len(YES)
    assert nodes[0].metadata == {"finish_reason": "stop", "policy_versions": [3, 3], "version_spans": None}


@pytest.mark.parametrize(
    ("versions", "policy_versions", "spans"),
    [
        ([("2", 0, 1), ("3", 1, 2)], (2, 3), [(0, 2), (1, 3)]),
        ([("3", 0, 2)], (3, 3), [(0, 3)]),
        ([("default", 0, 1), ("0", 1, 2)], None, None),
    ],
)
async def test_weights_that_change_in_mid_generation_are_told_token_by_token(
    tmp_path: Path, versions: list[tuple[str, int, int]], policy_versions: Any, spans: Any
) -> None:
    def changed(body: dict[str, Any]) -> Any:
        reply = sglang(body)
        told = [{"version": version, "start": start, "end": end} for version, start, end in versions]
        reply["meta_info"] |= {"weight_version": versions[-1][0], "weight_versions": told}
        return reply

    async with manager(tmp_path, "sglang", "/generate", changed) as servers:
        (sequence,) = (await servers.sample_tokens(prompt="?", max_tokens=8)).sequences
    assert (sequence.policy_versions, sequence.version_spans) == (policy_versions, spans)


async def test_sglang_gives_prompt_log_probabilities(tmp_path: Path) -> None:
    async with manager(tmp_path, "sglang", "/generate", sglang) as servers:
        found = await servers.get_logprobs(input_ids=[5, 6, 7], top_k=2)
        own = await servers.get_logprobs(input_ids=[5, 6, 7], top_k=0)
    assert found["prompt_topk_token_ids"] == [[], [6, 7], [7, 8]]
    assert found["prompt_topk_logprobs"][1] == [-2.0, -0.1]
    assert own["prompt_topk_token_ids"] == [[], [6], [7]]
    assert own["prompt_topk_logprobs"] == [[], [-2.0], [-2.0]]


async def test_reply_without_log_probabilities_is_no_sglang(tmp_path: Path) -> None:
    async with manager(tmp_path, "sglang", "/generate", lambda body: {"meta_info": {}}) as servers:
        with pytest.raises(PermanentServerError, match="no output_token_logprobs; is that SGLang"):
            await servers.sample_tokens(prompt="?", max_tokens=8)


async def test_trl_chats_and_completes_by_its_template(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def trl(body: dict[str, Any]) -> Any:
        seen.append(body)
        return {"completion_ids": [YES, YES[:-1]][: body["n"]]}

    async with manager(tmp_path, "trl", "/generate/", trl) as servers:
        reply = await servers.chat_completion(messages=[{"role": "user", "content": "?"}], n=2, temperature=0.5)
        text = await servers.completion(prompt="say", max_tokens=4)
        with pytest.raises(PermanentServerError, match=r"returned no logprobs.*update TRL"):
            await servers.sample_tokens(prompt="?")
    assert [(choice.message.content, choice.finish_reason) for choice in reply.choices] == [
        ("yes", "stop"),
        ("yes", "length"),
    ]
    assert text.choices[0].text == "yes"
    assert seen[0]["prompts"] == ["<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"]
    assert seen[0]["temperature"] == 0.5
    assert seen[1]["prompts"] == ["say"]
    assert seen[1]["max_tokens"] == 4
    assert seen[1]["top_k"] == -1


async def test_trl_of_today_feeds_a_managed_server(tmp_path: Path) -> None:
    def trl(body: dict[str, Any]) -> Any:
        ids = TOKENIZER.encode(body["prompts"][0])
        return {"prompt_ids": [ids], "completion_ids": [YES] * body["n"], "logprobs": [[-0.25] * len(YES)] * body["n"]}

    async with manager(tmp_path, "trl", "/generate/", trl) as servers, servers.managed_server() as managed:
        await managed.chat_completion(messages=[{"role": "user", "content": "?"}], n=2)
        nodes = managed.get_state()["nodes"]
    assert len(nodes) == 2
    assert nodes[0].logprobs[-1] == -0.25
    assert nodes[0].masked_tokens[-len(YES) :] == YES


def odd_sglang(**told: Any) -> Handler:
    def handler(body: dict[str, Any]) -> Any:
        reply = sglang(body)
        reply["meta_info"] |= told
        return reply

    return handler


def odd_trl(**told: Any) -> Handler:
    def handler(body: dict[str, Any]) -> Any:
        ids = TOKENIZER.encode(body["prompts"][0])
        return {"prompt_ids": [ids], "completion_ids": [YES], "logprobs": [[-0.5] * len(YES)]} | told

    return handler


def odd_vllm(**told: Any) -> Handler:
    def handler(body: dict[str, Any]) -> Any:
        logprobs = [[{str(token): -0.5}] for token in YES]
        ids = body["prompt"]["prompt_token_ids"]
        sampled = {"token_ids": [YES], "finish_reasons": ["stop"], "logprobs": [logprobs], "prompt_token_ids": ids}
        return sampled | told

    return handler


@pytest.mark.parametrize(
    ("server_type", "handler", "words"),
    [
        ("sglang", odd_sglang(output_token_logprobs=[[-0.5, 5, None], [None, 6, None]]), "1 sampled token.s. without"),
        ("sglang", odd_sglang(weight_versions=[{"version": "3", "start": 5}]), "version_spans"),
        ("trl", odd_trl(logprobs=[[-0.5]]), "came with 1 log-probabilities"),
        ("trl", odd_trl(logprobs=[]), "shorter"),
        ("trl", odd_trl(completion_ids=[[]], logprobs=[[]]), "no tokens"),
        ("vllm", odd_vllm(version_spans=[[]]), "version_spans"),
        ("vllm", odd_vllm(version_spans=[[[0, 2], [0, 3]]]), "version_spans"),
        ("vllm", odd_vllm(policy_versions=[[2**70, 2**70]]), "policy_versions"),
        ("vllm", odd_vllm(prompt_token_ids=[2**70]), "prompt_token_ids"),
        ("vllm", odd_vllm(prompt_token_ids=[-1]), "prompt_token_ids"),
    ],
)
async def test_what_no_model_samples_is_one_line_about_the_server(
    tmp_path: Path, server_type: str, handler: Handler, words: str
) -> None:
    path = "/generate/" if server_type == "trl" else "/generate"
    async with manager(tmp_path, server_type, path, handler) as servers, servers.managed_server() as managed:
        with pytest.raises(PermanentServerError, match=words) as refusal:
            await managed.chat_completion(messages=[{"role": "user", "content": "?"}], max_tokens=8)
        assert not managed.get_state()["nodes"]
    assert str(refusal.value).startswith("http://127.0.0.1:")


async def test_a_weight_version_that_is_no_policy_version_is_none(tmp_path: Path) -> None:
    handler = odd_sglang(weight_version="9" * 5000)
    async with manager(tmp_path, "sglang", "/generate", handler) as servers:
        (sequence,) = (await servers.sample_tokens(prompt="?", max_tokens=8)).sequences
    assert sequence.policy_versions is None
