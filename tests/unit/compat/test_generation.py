import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atroposlib.cli import dpo, sft  # type: ignore[attr-defined]  # an old path
from atroposlib.compat.commands import generation
from atroposlib.compat.commands.generation import GenerationError, generate
from atroposlib.files import NotRegularFile
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer, save_tiny_tokenizer
from atroposlib.wire.batching import ScoredData
from tests.client import http
from tests.unit.envs.fakes import Api, Trainer, running_api
from tests.waiting import until

TOKENIZER = make_tiny_tokenizer()


def group(*scores: float, messages: bool = False) -> dict[str, Any]:
    """One group: sample i answers `ask ask` with `ask i`, so that the prompt's text comes again in the answer."""
    prompt, answers = TOKENIZER.encode("ask ask "), [TOKENIZER.encode(f"ask {index}") for index in range(len(scores))]
    said = [
        [{"role": "user", "content": "ask"}, {"role": "assistant", "content": str(index)}]
        for index in range(len(scores))
    ]
    return {
        "tokens": [prompt + answer for answer in answers],
        "masks": [[-100] * len(prompt) + answer for answer in answers],
        "scores": list(scores),
        "messages": said if messages else None,
    }


def scored(*scores: float, messages: bool = False) -> ScoredData:
    return msgspec.convert(group(*scores, messages=messages), ScoredData)


def test_what_is_no_file_is_refused_before_a_batch_is_taken(tmp_path: Path) -> None:
    config = sft.SftConfig(append_to_previous=True, api_url="http://127.0.0.1:9")
    with pytest.raises(NotRegularFile, match="it is a directory"):
        generate(config, tmp_path, sft.records)


def test_best_samples_are_kept_with_prompt_and_completion_apart() -> None:
    lines = list(sft.records(sft.SftConfig(save_top_n_per_group=2), scored(0.0, 1.0, -1.0), TOKENIZER))
    assert lines == [
        {"prefix": "ask ask ", "completion": "ask 1", "score": 1.0},
        {"prefix": "ask ask ", "completion": "ask 0", "score": 0.0},
    ]
    assert [line["score"] for line in sft.records(sft.SftConfig(), scored(0.0, 1.0, -1.0), TOKENIZER)] == [1.0, 0.0]
    assert list(sft.records(sft.SftConfig(minimum_score_diff_max_min=3.0), scored(0.0, 1.0, -1.0), TOKENIZER)) == []


def test_messages_are_kept_if_there_are_some() -> None:
    config = sft.SftConfig(save_messages=True, save_top_n_per_group=1)
    (line,) = sft.records(config, scored(0.0, 1.0, messages=True), TOKENIZER)
    assert line["messages"][-1]["content"] == "1"
    with pytest.raises(GenerationError, match="include_messages"):
        list(sft.records(config, scored(0.0, 1.0), TOKENIZER))


def test_pairs_are_best_with_worst_and_differ_enough() -> None:
    lines = list(dpo.records(dpo.DpoConfig(), scored(0.0, 1.0, 0.9, 0.2), TOKENIZER))
    assert [(line["score"], line["neg_score"]) for line in lines] == [(1.0, 0.0), (0.9, 0.2)]
    assert lines[0] == {"prefix": "ask ask ", "pos": "ask 1", "neg": "ask 0", "score": 1.0, "neg_score": 0.0}
    assert list(dpo.records(dpo.DpoConfig(), scored(0.4, 0.5), TOKENIZER)) == []


def test_a_rollout_of_several_sequences_is_one_sample() -> None:
    several = msgspec.structs.replace(scored(1.0, 1.0, 0.2), rollouts=[0, 0, 1])
    kept = list(sft.records(sft.SftConfig(save_top_n_per_group=1), several, TOKENIZER))
    assert [line["completion"] for line in kept] == ["ask 0", "ask 1"]
    pairs = list(dpo.records(dpo.DpoConfig(), several, TOKENIZER))
    assert [(pair["pos"], pair["neg"]) for pair in pairs] == [("ask 0", "ask 2")]


async def test_exactly_as_many_records_are_written_as_asked_for(tmp_path: Path) -> None:
    async with running_api() as api:
        written = asyncio.create_task(
            asyncio.to_thread(generate, config_for(api, tmp_path), tmp_path / "out.jsonl", sft.records)
        )

        async def registered() -> bool:
            size: int = (await asyncio.to_thread(http.get, f"{api.url}/info")).json()["batch_size"]
            return size >= 0

        for _ in range(2):
            await until(registered)
            await asyncio.to_thread(http.post, f"{api.url}/scored_data_list", json=[group(0.0, 1.0), group(1.0, 0.5)])
        assert await asyncio.wait_for(written, 60) == 7
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert len(lines) == 7
        assert lines[0]["score"] == 1.0
        with pytest.raises(GenerationError, match=r"out.jsonl exists"):
            generate(config_for(api, tmp_path), tmp_path / "out.jsonl", sft.records)


async def test_a_collector_follows_one_that_has_finished_and_refuses_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "FINISHED_S", 1.0)
    async with running_api() as api:
        for name in ("first", "second"):
            path = tmp_path / f"{name}.jsonl"
            written = asyncio.create_task(asyncio.to_thread(generate, config_for(api, tmp_path), path, sft.records))
            while not written.done():
                reply = await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=group(0.0, 1.0))
                assert reply.status_code == 200
                await asyncio.sleep(0.05)
            assert await written == 7
        await Trainer(api.url).register()
        with pytest.raises(GenerationError, match="a trainer has registered"):
            await asyncio.to_thread(generate, config_for(api, tmp_path), tmp_path / "other.jsonl", sft.records)


async def test_a_collector_at_work_is_not_displaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "FINISHED_S", 3.0)
    monkeypatch.setattr(generation, "FOLLOWS_WITHIN_S", 0.5)
    async with running_api() as api:
        first = asyncio.create_task(
            asyncio.to_thread(generate, config_for(api, tmp_path), tmp_path / "first.jsonl", sft.records)
        )

        async def asked() -> bool:
            reply = await asyncio.to_thread(http.get, f"{api.url}/activity")
            return reply.json().get("asked_s") is not None

        await until(asked)
        with pytest.raises(GenerationError, match="a collector has asked for a batch lately"):
            await asyncio.to_thread(generate, config_for(api, tmp_path), tmp_path / "second.jsonl", sft.records)
        while not first.done():
            await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=group(0.0, 1.0))
            await asyncio.sleep(0.05)


def config_for(api: Api, folder: Path) -> sft.SftConfig:
    tokenizer = str(save_tiny_tokenizer(folder / "tokenizer"))
    return sft.SftConfig(api_url=api.url, tokenizer=tokenizer, num_seqs_to_save=7, tasks_per_step=2, timeout=60)
