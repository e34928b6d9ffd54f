"""One group with every token: what environment, sampler and trainer have written of it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from atroposlib.view import group_view
from atroposlib.view.run_data.rows import read_sample
from tests.unit.hostile_answers.hostile import assert_linear
from tests.unit.view.support import client, get, held_out, sample, trained, write_rows

GROUPS = "/api/runs/r/groups"


def opened(window: TestClient, row: int = 0, source: str = "samples", **query: object) -> Any:
    listed = get(window, GROUPS, source=source)["rows"][row]
    return get(window, f"{GROUPS}/{listed['n']}", source=source, **query)


def test_a_group_is_shown_token_by_token(run: Path) -> None:
    found = opened(client(run))
    assert (found["step"], found["sampled_at_step"], found["reference"], found["left_out"]) == (3, 2, "10", None)
    first, second = found["rollouts"]
    assert (first["score"], first["advantage"], first["finish_reason"]) == (1.0, 1.0, "stop")
    assert [message["content"] for message in first["messages"]] == ["What is 5 + 5?", "It is 10."]
    (sequence,) = first["sequences"]
    assert sequence["tokens"] == [5, 6, 7, 8, 14]
    assert sequence["mask"] == [0, 0, 1, 1, 1]
    assert sequence["sampler_logprobs"] == [None, None, -0.5, -0.25, -0.125]
    assert sequence["trainer_logprobs"] == [None, None, -0.5, -0.25, -0.0625]
    assert sequence["versions"] == [None, None, 2, 2, 2]
    assert len(sequence["pieces"]) == 5
    assert second["advantage"] == -1.0
    assert second["sequences"][0]["trainer_logprobs"] == [None] * 5  # the trainer computed none
    assert second["sequences"][0]["versions"] == [None, None, 2, 2, 3]


def test_values_of_the_trainer_are_placed_at_the_tokens_that_it_computed(run: Path) -> None:
    write_rows(run / "samples.jsonl", [sample(0, 0)])
    row = trained(0, 1, logprobs=[[None, -0.25], [-1.0] * 9], advantages=[[0.0, 0.0, 0.5], None])
    write_rows(run / "trained.jsonl", [trained(0, 1, group=None), row])
    first, second = opened(client(run))["rollouts"]
    assert first["sequences"][0]["trainer_logprobs"] == [None, None, None, -0.25, None]  # it was cut
    assert first["advantage"] == 0.5
    assert second["sequences"][0]["trainer_logprobs"] == [None] * 5  # too many to be its own
    assert second["advantage"] is None


def test_a_held_out_sample_of_an_author_is_shown_as_it_is(run: Path) -> None:
    write_rows(run / "held_out.jsonl", [held_out(0, 0, messages=None, sample={"asked": "this"}, outcome="wrong")])
    window = client(run)
    (listed,) = get(window, GROUPS, source="held_out")["rows"]
    assert (listed["outcome"], "this" in listed["question"]) == ("wrong", True)
    (message,) = opened(window, source="held_out")["rollouts"][0]["messages"]
    assert message == {"role": "sample", "content": '{\n  "asked": "this"\n}'}


def test_pieces_are_the_text_of_each_token(run: Path) -> None:
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(run / "model" / "tokenizer.json")).encode(
        "It is 10 € 🙂", add_special_tokens=False
    )
    write_rows(run / "samples.jsonl", [sample(0, 0, tokens=[[*tokens.ids, 10**6]], scores=[1.0])])
    (rollout, *_) = opened(client(run))["rollouts"]
    pieces = rollout["sequences"][0]["pieces"]
    assert "".join(pieces) == f"It is 10 € 🙂<{10**6}>"


def test_without_the_model_there_are_ids_alone(run: Path) -> None:
    (run / "model" / "tokenizer.json").write_text("{")
    assert opened(client(run))["rollouts"][0]["sequences"][0]["pieces"] is None


LIKE_LLAMA = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]
GROWS = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 1000}


@pytest.mark.parametrize(
    ("decoder", "texts"),
    [
        ({"type": "Sequence", "decoders": LIKE_LLAMA}, ["aaa", " b"]),
        ({"type": "Strip", "content": "a", "start": 5, "stop": 5}, None),  # panics
        ({"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""}, None),  # takes for ever
        (GROWS, None),
        ({"type": "Sequence", "decoders": [*LIKE_LLAMA, GROWS]}, None),
        ({"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 9}, None),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}] * 99}, None),
    ],
)
@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_a_tokenizer_is_obeyed_only_where_it_makes_no_text_longer(
    run: Path, kind: str, decoder: dict[str, Any], texts: list[str] | None
) -> None:
    vocab: Any = {"aaa": 0, "\u2581b": 1} if kind == "BPE" else [["aaa", -1.0], ["\u2581b", -2.0]]
    tokenizer = {"version": "1.0", "model": {"type": kind, "vocab": vocab, "merges": []}, "decoder": decoder}
    (run / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_rows(run / "samples.jsonl", [sample(0, 0, tokens=[[0, 1]], scores=[1.0])])
    assert opened(client(run))["rollouts"][0]["sequences"][0]["pieces"] == texts


def test_a_long_answer_of_broken_characters_is_shown_at_once(run: Path) -> None:
    (broken,) = (
        number
        for piece, number in json.loads((run / "model" / "tokenizer.json").read_bytes())["model"]["vocab"].items()
        if piece == "\u0122"  # the byte 0x80
    )
    write_rows(run / "samples.jsonl", [sample(0, 0, tokens=[[broken] * 20_000], scores=[1.0])])
    began = time.monotonic()
    pieces = opened(client(run))["rollouts"][0]["sequences"][0]["pieces"]
    assert time.monotonic() - began < 5
    assert (len(pieces), "".join(pieces)) == (20_000, "\ufffd" * 20_000)


def test_sequences_of_one_rollout_stand_together_and_failed_rollouts_are_shown(run: Path) -> None:
    failure = {"cause": "timeout", "error": "no answer in 5 s", "messages": [{"role": "user", "content": "slow"}]}
    row = sample(0, 0, rollouts=[4, 4], scores=[0.5, 0.5], failures=[failure], failed={"timeout": 1})
    write_rows(run / "samples.jsonl", [row])
    window = client(run)
    (listed,) = get(window, GROUPS)["rows"]
    assert (listed["scores"], listed["failed"]) == ([0.5], 1)
    rollout, failed = opened(window)["rollouts"]
    assert len(rollout["sequences"]) == 2
    assert rollout["advantage"] == -1.0  # of its last sequence
    assert (failed["failed"], failed["error"], failed["score"]) == ("timeout", "no answer in 5 s", None)
    assert failed["messages"][0]["content"] == "slow"


def test_rollouts_that_failed_in_an_older_run_are_counted_by_cause(run: Path) -> None:
    write_rows(run / "samples.jsonl", [sample(0, 0, failures=None, failed={"scorer": 2, "timeout": 10**9, "other": 1})])
    failed = [rollout["failed"] for rollout in opened(client(run))["rollouts"][2:]]
    assert failed == ["scorer", "scorer", *["timeout"] * (group_view.MAX_FAILED - 2)]


def test_a_group_that_gave_nothing_shows_its_prompt(run: Path) -> None:
    lost = sample(0, 0, dropped="no answer", prompt=[{"role": "user", "content": "Why?"}], scores=None)
    write_rows(run / "samples.jsonl", [lost | {"tokens": [], "masks": [], "messages": None}])
    window = client(run)
    (listed,) = get(window, GROUPS)["rows"]
    assert (listed["question"], listed["dropped"], listed["scores"], listed["mean"]) == ("Why?", "no answer", [], None)
    assert opened(window)["rollouts"] == []


def test_tools_thoughts_and_parts_of_messages_are_kept(run: Path) -> None:
    said = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "d"}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "reasoning_content": "hm"},
        {"role": "tool", "content": {"a": 1}, "name": "f"},
    ]
    write_rows(run / "samples.jsonl", [sample(0, 0, messages=[said, said])])
    user, assistant, tool = opened(client(run))["rollouts"][0]["messages"]
    assert user["content"].startswith("See\n[image_url, ")
    assert (assistant["content"], assistant["tool_calls"], assistant["reasoning_content"]) == (
        "",
        [{"name": "f"}],
        "hm",
    )
    assert (tool["content"], tool["name"]) == ('{"a":1}', "f")


def test_a_long_answer_of_thoughts_without_an_end_is_shown_at_once(run: Path) -> None:
    said = [{"role": "assistant", "content": f"before</think>{'<think>' * 20_000}"}]
    write_rows(run / "samples.jsonl", [sample(0, 0, messages=[said, said])])
    began = time.monotonic()
    (answer,) = opened(client(run))["rollouts"][0]["messages"]
    assert time.monotonic() - began < 5
    assert answer["parts"][0] == {"thought": "before"}


def test_parts_of_a_message_are_ours_and_those_of_an_author_are_left_out(run: Path) -> None:
    said = [{"role": role, "content": "hm", "parts": ["hello"]} for role in ("user", "assistant")]
    write_rows(run / "samples.jsonl", [sample(0, 0, messages=[said, said])])
    user, assistant = opened(client(run))["rollouts"][0]["messages"]
    assert (user["parts"], assistant["parts"]) == (None, [{"text": "hm"}])


def test_a_group_that_is_too_large_comes_in_parts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_view, "MAX_TOKENS", 5)
    window = client(run)
    found = opened(window)
    assert found["shortened"]
    first, second = (rollout["sequences"][0] for rollout in found["rollouts"])
    assert len(first["tokens"]) == 5
    assert (second["tokens"], second["length"]) == ([], 5)
    alone = opened(window, rollout=1)
    assert not alone["shortened"]
    assert alone["rollouts"][0]["sequences"] == []
    assert len(alone["rollouts"][1]["sequences"][0]["tokens"]) == 5


def test_named_rewards_are_shown_with_each_score(run: Path) -> None:
    write_rows(run / "samples.jsonl", [sample(0, 0, rewards=[{"right": 1, "brief": 0.5}, {"right": None}])])
    write_rows(run / "held_out.jsonl", [held_out(0, 0, rewards={"right": 0})])
    window = client(run)
    assert [each["rewards"] for each in opened(window)["rollouts"]] == ["right 1, brief 0.5", "right ?"]
    assert opened(window, source="held_out")["rollouts"][0]["rewards"] == "right 0"
    write_rows(run / "samples.jsonl", [sample(0, 0, rewards="none"), sample(0, 0, rewards=[["right"]])])
    for row in range(2):
        assert [each["rewards"] for each in opened(client(run), row)["rollouts"]] == ["", ""]


def test_a_held_out_answer_opens_as_a_group_of_one(run: Path) -> None:
    found = opened(client(run), source="held_out")
    (rollout,) = found["rollouts"]
    assert (found["index"], found["reference"], rollout["score"], rollout["sequences"]) == (3, "3", 0.0, [])
    assert rollout["messages"][1]["content"] == "3!"


def _spans_back_and_forth(count: int) -> object:
    row = {
        "scores": [1],
        "tokens": [[1] * count],
        "masks": [[1] * count],
        "version_spans": [[[0, 1], [count, 1]] * count],
    }
    return group_view.whole(read_sample(json.dumps(row).encode()), None, None)


def _images_of_everyone(count: int) -> object:
    row = {"scores": [1] * count, "images": ["data:image/png;base64,AAAA"] * (count + 1)}
    return group_view.whole(read_sample(json.dumps(row).encode()), None, None)


@pytest.mark.parametrize("shown", [_spans_back_and_forth, _images_of_everyone])
def test_a_group_of_somebody_else_opens_in_linear_time(shown: Callable[[int], object]) -> None:
    assert_linear(lambda pieces: shown(len(pieces)), "x" * 3000)


def test_images_that_every_rollout_has_do_not_fill_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "data:image/png;base64,AAAA"
    monkeypatch.setattr(group_view, "MAX_IMAGE_CHARACTERS", 5 * len(url))
    write_rows(run / "samples.jsonl", [{"scores": [1.0] * 4, "images": [url, url]}])
    assert [len(rollout["images"]) for rollout in opened(client(run))["rollouts"]] == [2, 2, 0, 0]
