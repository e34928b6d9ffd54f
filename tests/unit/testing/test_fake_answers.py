"""Where the fake inference server's answers come from: a list, at random, or the right one at a rate."""

import asyncio
import contextlib
import json
from itertools import islice
from pathlib import Path

import aiohttp
import pytest

from atroposlib.config import resolve_config
from atroposlib.flags import ConfigError
from atroposlib.testing.fake_answers import AtRandom, CannotAnswer, InTurn, Right
from atroposlib.testing.fake_inference_server import Answer, FakeServerConfig, _serve, configured_answer
from tests.serving import free_port


def answers(*flags: str) -> Answer:
    config, _ = resolve_config(FakeServerConfig, flags, prog="fake_inference_server", env={})
    return configured_answer(config)


def drawn(answer: Answer, prompt: str, n: int) -> list[str]:
    return list(islice(answer(prompt), n))


def test_answers_of_a_list_are_given_in_turn_across_requests() -> None:
    answer = answers("--answer", "It is 50, I think.", "--answer", "[7]")
    assert drawn(answer, "1?", 3) == ["It is 50, I think.", "[7]", "It is 50, I think."]
    assert drawn(answer, "2?", 2) == ["[7]", "It is 50, I think."]
    assert drawn(answers(), "1?", 2) == ["I do not know."] * 2


def test_a_file_has_an_answer_per_line_or_a_json_string_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one, two\nthree\n")
    (tmp_path / "a.jsonl").write_text(json.dumps("two\nlines") + "\n")
    assert drawn(answers("--answers", str(tmp_path / "a.txt")), "?", 3) == ["one, two", "three", "one, two"]
    assert drawn(answers("--answers", str(tmp_path / "a.jsonl")), "?", 1) == ["two\nlines"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "none.txt: No such file or directory"),
        ("empty.txt", "", "empty.txt: expected one answer per line"),
        ("bad.jsonl", "{", "bad.jsonl: "),
        ("records.jsonl", '{"a": 1}', "records.jsonl: expected one answer per line"),
    ],
)
def test_a_file_without_answers_is_one_line(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        answers("--answers", str(tmp_path / name))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--answer", "a", "--random"], "--answer and --random cannot be combined"),
        (["--right", "1.5"], "right: Input should be less than or equal to 1"),
        (["--right", "0.5", "--right-answer", "<answer></answer>"], "does not contain REFERENCE"),
    ],
)
def test_a_wrong_choice_of_answers_is_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        answers(*flags)


def test_random_answers_are_those_of_the_seed_in_whatever_order_prompts_come() -> None:
    first, second, other = AtRandom(seed=1), AtRandom(seed=1), AtRandom(seed=2)
    found = {prompt: drawn(first, prompt, 4) for prompt in ("a", "b")}
    assert {prompt: drawn(second, prompt, 4) for prompt in ("b", "a")} == found
    assert len({*found["a"], *found["b"]}) == 8
    assert drawn(first, "a", 4) != found["a"]
    assert drawn(other, "a", 4) != found["a"]


def right(rate: float, seed: int = 0) -> Right:
    made = Right(rate, InTurn(["no"]), text="It is REFERENCE.", seed=seed)
    made.reference = "7"
    return made


@pytest.mark.parametrize(("rate", "counts"), [(0.0, {0}), (0.25, {1}), (0.5, {2}), (0.6, {2, 3}), (1.0, {4})])
def test_each_group_has_its_share_of_right_answers(rate: float, counts: set[int]) -> None:
    groups = [drawn(right(rate), f"question {number}", 4) for number in range(50)]
    assert {group.count("It is 7.") for group in groups} == counts
    assert {text for group in groups for text in group} <= {"It is 7.", "no"}


def test_a_rate_below_one_per_group_holds_over_all_groups() -> None:
    answer = right(0.1)
    count = sum(drawn(answer, f"question {number}", 4).count("It is 7.") for number in range(500))
    assert abs(count - 200) < 50  # the phases of 500 prompts are random: a standard deviation is 11


def test_samples_asked_one_by_one_are_those_asked_together() -> None:
    one_by_one = right(0.5)
    assert [drawn(one_by_one, "?", 1)[0] for _ in range(4)] == drawn(right(0.5), "?", 4)
    assert len({tuple(drawn(right(0.5, seed), "?", 4)) for seed in range(20)}) == 2


def test_a_right_answer_needs_a_reference() -> None:
    with pytest.raises(CannotAnswer, match=r"--right needs: only `process`"):
        drawn(Right(1.0, InTurn(["no"])), "?", 1)


async def test_the_command_tells_a_context_so_that_process_can_name_what_is_longer() -> None:
    """As vLLM does: without one, `process` has nothing to compare a prompt or --env.max_new_tokens with."""
    config = FakeServerConfig(port=free_port(), answer=["7"])
    serving = asyncio.create_task(_serve(config, configured_answer(config)))
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                listed = await (await session.get(f"http://127.0.0.1:{config.port}/v1/models")).json()
                break
            await asyncio.sleep(0.02)
            assert not serving.done()
    serving.cancel()
    assert listed["data"][0]["max_model_len"] == 32_768
