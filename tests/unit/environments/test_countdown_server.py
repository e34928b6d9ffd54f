import json
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

from atroposlib.envs.errors import DataError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.countdown_server import (
    CountdownConfig,
    CountdownEnv,
    Puzzle,
    equation_value,
    make_puzzle,
    read_puzzles,
)
from tests.unit.environments.support import running_env, sampled_texts

PUZZLE = Puzzle((1, 4, 42, 19), 64)


@pytest.mark.parametrize(
    ("equation", "value"),
    [
        ("42 + 19 + 4 - 1", 64),
        ("42 + 19 + 4 - 1 = 64", 64),
        ("42 + 19 + 4 - 1 = 65", None),
        ("(42 - 19) * 4", 92),
        ("42 / 4", Fraction(21, 2)),
        ("42 + 42", None),
        ("42 + 20 + 2", None),
        ("64", None),
        ("1 / (4 - 4)", None),
        ("19 ** 4", None),
        ("__import__('os')", None),
        ("", None),
    ],
)
def test_equation_is_computed_only_if_it_uses_the_given_numbers_once(equation: str, value: Fraction | None) -> None:
    assert equation_value(equation, PUZZLE, use_all=False) == value


def test_all_numbers_can_be_demanded() -> None:
    assert equation_value("42 + 19", PUZZLE, use_all=True) is None
    assert equation_value("42 + 19 + 4 - 1", PUZZLE, use_all=True) == 64


def test_generated_puzzles_stay_within_their_limits_and_differ() -> None:
    config = CountdownConfig(max_numbers=5, largest_number=20, largest_target=30)
    puzzles = [make_puzzle(Random(number), config) for number in range(200)]
    assert {len(puzzle.numbers) for puzzle in puzzles} == {3, 4, 5}
    assert all(
        1 <= puzzle.target <= 30 and max(puzzle.numbers) <= 20 and puzzle.target not in puzzle.numbers
        for puzzle in puzzles
    )
    assert len(set(puzzles)) > 190


async def test_samples_are_scored_and_what_begins_the_answer_is_not_trained(tmp_path: Path) -> None:
    answers = [
        "</think><answer>42 + 19 + 4 - 1</answer>",
        "<answer>1</answer> no: <answer>(42 + 19) + 4 - 1 = 64</answer>",
        "<answer>42 + 19</answer>",
        "42 + 19 + 4 - 1",
    ]
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(CountdownEnv, tmp_path, server, format_score=0.1, max_new_tokens=100) as env,
    ):
        group, _ = await env.collect_trajectories(PUZZLE)
        assert group is not None
        assert group["scores"] == [1.0, 1.0, 0.1, 0.0]
        prompt = env.tokenizer.decode(server.requests[0][1]["prompt"]["prompt_token_ids"])
    assert "[1, 4, 42, 19]" in prompt
    assert prompt.endswith("Let me solve this step by step.\n<think>")
    assert sampled_texts(group) == [f"{answer}<|im_end|>" for answer in answers]
    assert group["messages"] is not None
    assert str(group["messages"][0][-1]["content"]).startswith("Let me solve this step by step.\n<think></think>")


async def test_numbered_puzzles_are_the_same_again_and_not_held_out(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server, running_env(CountdownEnv, tmp_path, server, heldout_size=20) as env:
        first = [await env.get_next_item() for _ in range(20)]
        env.taken = 0
        assert [await env.get_next_item() for _ in range(20)] == first
        assert not set(first) & set(env.held_out)


async def test_puzzles_that_are_all_held_out_are_refused_and_not_searched_for_ever(tmp_path: Path) -> None:
    few = {"min_numbers": 2, "max_numbers": 2, "largest_number": 2, "largest_target": 3, "heldout_size": 64}
    async with FakeInferenceServer() as server, running_env(CountdownEnv, tmp_path, server, **few) as env:
        with pytest.raises(DataError, match=r"among the 64 that are held out: lower --env.heldout_size or --env.final"):
            await env.get_next_item()


async def test_puzzles_of_a_file_are_split(tmp_path: Path) -> None:
    path = tmp_path / "puzzles.jsonl"
    path.write_text("".join(json.dumps({"nums": [n, n + 1], "target": 2 * n + 1}) + "\n" for n in range(10)))
    async with (
        FakeInferenceServer() as server,
        running_env(CountdownEnv, tmp_path, server, dataset_path=str(path)) as env,
    ):
        taken = {await env.get_next_item() for _ in range(12)}
    assert len(env.held_out) == 4
    assert len(taken) == 6
    assert not taken & set(env.held_out)
    path.write_text('{"nums": [1, 2], "target": 3}\n{"nums": 3}\n')
    with pytest.raises(DataError, match=r"puzzles.jsonl:2 is not a puzzle"):
        read_puzzles(path)


def test_a_byte_order_mark_is_no_part_of_a_puzzle(tmp_path: Path) -> None:
    path = tmp_path / "puzzles.jsonl"
    path.write_text('\ufeff{"nums": [1, 2], "target": 3, "note": "a\u2028b"}\r\n\n', encoding="utf-8", newline="")
    assert read_puzzles(path) == [Puzzle((1, 2), 3)]
