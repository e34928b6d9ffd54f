"""What the model answers, in a few lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from atropos_launcher.console.sample_text import FIRST_READ_BYTES, few_lines, last_rows, latest_sample, sample_lines

ROW: dict[str, Any] = {
    "scores": [1.0, 0.0],
    "messages": [
        [{"role": "user", "content": "What is 9 * 4?"}, {"role": "assistant", "content": "It is\n\n36."}],
        [{"role": "user", "content": "What is 9 * 4?"}, {"role": "assistant", "content": "13"}],
    ],
}


def test_a_sample_is_its_reward_the_question_and_the_answer() -> None:
    assert sample_lines(ROW) == [
        "Sample: reward 1.00, mean of its 2 answers 0.50",
        "    > What is 9 * 4?",
        "    < It is",
        "    < 36.",
    ]


def test_a_rollout_of_several_sequences_is_one_answer() -> None:
    row = {"scores": [1.0, 1.0, 0.0], "messages": [*ROW["messages"][:1], *ROW["messages"]], "rollouts": [0, 0, 1]}
    assert sample_lines(row) == sample_lines(ROW)


def test_what_a_model_writes_is_not_obeyed_by_a_terminal() -> None:
    shown = sample_lines({"scores": [0.0], "messages": ["\x1b[2J\r\u202egone\x07"]})
    assert all(line.isprintable() for line in shown)
    assert shown[1:] == ["    < \\x1b[2J", "    < \\u202egone\\x07"]


def test_a_long_answer_is_cut() -> None:
    assert few_lines("a\nb\n\nc\nd", 2) == ["a", "b …"]
    assert [len(line) for line in few_lines("x" * 500, 2)] == [110]
    assert few_lines("", 2) == []


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"scores": [1.0]},
        {"scores": [1.0], "messages": []},
        {"scores": [1.0, 2.0], "messages": ["a"]},
        {"scores": ["x"], "messages": ["a"]},
        {"scores": [1.0], "messages": [None]},
        {"scores": [1.0], "messages": [[{"role": "user", "content": ["an image"]}]]},
    ],
)
def test_a_row_without_text_gives_nothing(row: dict[str, Any]) -> None:
    assert sample_lines(row) == []


@pytest.mark.parametrize("padding", [0, FIRST_READ_BYTES, 3 * FIRST_READ_BYTES])
def test_the_last_complete_row_is_read_however_long(tmp_path: Path, padding: int) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [{"number": number, "tokens": "1" * padding} for number in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"half": ')
    assert next(last_rows(path))["number"] == 2


@pytest.mark.parametrize("content", ["", '{"half"', "not ours\n", "[1]\n", "\n"])
def test_a_file_without_a_row_has_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(content)
    assert list(last_rows(path)) == []


def test_the_newest_file_of_several_environments_is_shown(tmp_path: Path) -> None:
    assert latest_sample(tmp_path) == []
    (tmp_path / "samples_gsm8k.jsonl").write_text(json.dumps(ROW) + "\n")
    assert latest_sample(tmp_path)[0].startswith("Sample: reward 1.00")


def test_a_group_that_was_lost_before_it_had_answers_is_passed_over(tmp_path: Path) -> None:
    lost: dict[str, Any] = {"scores": None, "tokens": [], "dropped": "3 of its 4 answers could not be scored"}
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (ROW, lost)))
    assert latest_sample(tmp_path) == sample_lines(ROW)
