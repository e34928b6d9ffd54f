import json
import re
import time
from pathlib import Path

import pytest

from atroposlib.envs.data.problems import (
    Fields,
    Problem,
    ProblemStream,
    arithmetic_problems,
    hub_problem_set,
    read_problem_set,
    read_problems,
)
from atroposlib.envs.errors import DataError


def write(path: Path, count: int) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(
        "".join(
            json.dumps({"question": f"q{n} of {path.stem}", "answer": f"because\n#### {n},000"}) + "\n"
            for n in range(count)
        )
    )
    return path


def test_arithmetic_set_is_145_facts_in_four_wordings_with_their_results() -> None:
    problems = arithmetic_problems(256)
    assert (len(problems.train), len(problems.held_out)) == (324, 256)
    everything = problems.train + problems.held_out
    assert len({problem.question for problem in everything}) == 580
    for problem in everything:
        found = re.fullmatch(r"(What is|How much is|Calculate)? ?([1-9]) ([+*]) ([1-9])( = \?|\?|\.)", problem.question)
        assert found is not None
        a, b = int(found[2]), int(found[4])
        assert problem.result == str(a + b if found[3] == "+" else a * b)
        assert found[3] == "+" or min(a, b) >= 2


@pytest.mark.parametrize("held_out", [1, 16, 64, 65, 200, 256])
def test_no_fact_is_trained_on_and_held_out(held_out: int) -> None:
    problems = arithmetic_problems(held_out)
    trained, tested = ({problem.answer for problem in each} for each in (problems.train, problems.held_out))
    assert not trained & tested
    assert (len(problems.held_out), len(tested)) == (held_out, min(held_out, 64))
    assert problems.report is not None
    assert (problems.report.train, problems.report.held_out) == (len(problems.train), held_out)


def test_the_first_held_out_questions_are_facts_in_the_first_wording() -> None:
    problems = arithmetic_problems(256)
    assert problems.held_out[:64] == arithmetic_problems(64).held_out
    assert problems.train == arithmetic_problems(64).train
    assert all(problem.question.startswith("What is ") for problem in problems.held_out[:64])


def test_more_than_there_are_cannot_be_held_out() -> None:
    with pytest.raises(DataError, match="at most 256 questions to hold out, not 257"):
        arithmetic_problems(257)


def test_arithmetic_split_is_the_same_in_every_run() -> None:
    assert arithmetic_problems(64) == arithmetic_problems(64)
    assert [problem.question for problem in arithmetic_problems(64).held_out[:3]] == [
        "What is 4 * 3?",
        "What is 5 * 4?",
        "What is 2 + 2?",
    ]


def test_result_is_what_follows_the_mark_without_separators() -> None:
    assert Problem("q", "1 #### not this\n#### 12,345 ").result == "12345"


@pytest.mark.parametrize(
    ("marked", "result"),
    [
        ("-1,234.5", "-1234.5"),
        ("$1,234,567", "$1234567"),
        ("1,234 km", "1234 km"),
        ("(1, 2)", "(1, 2)"),
        ("1,2", "1,2"),
        ("x = 1, y = 200", "x = 1, y = 200"),
        ("[0,100)", "[0,100)"),
        ("1,234, 5", "1,234, 5"),
        (r"\{1,2,3\}", r"\{1,2,3\}"),
    ],
)
def test_a_comma_that_parts_several_values_stays_in_the_result(marked: str, result: str) -> None:
    assert Problem("q", f"worked out\n#### {marked}").result == result


def test_one_file_is_split_and_the_parts_are_disjoint(tmp_path: Path) -> None:
    problems = read_problem_set(write(tmp_path / "p.jsonl", 10), None, 3, seed=1)
    assert len(problems.train) == 7
    assert len(problems.held_out) == 3
    assert not set(problems.train) & set(problems.held_out)


def test_problems_come_from_a_table_too(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text('prompt,result\n"1, 2?","#### 3"\n')
    assert read_problems(tmp_path / "p.csv", Fields("prompt", "result")) == [Problem("1, 2?", "#### 3")]


def test_folder_has_its_own_test_file(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", 10)
    write(tmp_path / "test.jsonl", 5)
    problems = read_problem_set(tmp_path, None, 3, seed=1)
    assert len(problems.train) == 10
    assert len(problems.held_out) == 3
    assert all("of test" in problem.question for problem in problems.held_out)
    assert len(read_problem_set(tmp_path, None, 64, seed=1).held_out) == 5


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", r"p.jsonl:1 is not JSON"),
        ('{"question": "q", "solution": "1"}', r"p.jsonl:1 has no column 'answer'; it has question, solution"),
        ('{"question": "q", "answer": "x = 12"}', r"p.jsonl:1 is not a problem: expected .*#### 12"),
        ('{"question": "q", "answer": "12"}\n[]', r"p.jsonl:2 is not an object with columns: found \[\]"),
        ('{"question": "q", "answer": "#### 1"}\n[]', r"p.jsonl:2 is not an object with columns: found \[\]"),
        ("", r"p.jsonl contains no rows"),
        (None, "No such file"),
    ],
)
def test_malformed_file_is_named_with_its_line(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(DataError, match=complaint):
        read_problems(tmp_path / "p.jsonl")


def test_stream_goes_through_all_problems_before_it_repeats_and_the_seed_fixes_its_order() -> None:
    problems = arithmetic_problems(64).train
    stream, again, other = ProblemStream(problems, 1), ProblemStream(problems, 1), ProblemStream(problems, 2)
    taken = [stream[number] for number in range(648)]
    assert taken == [again[number] for number in reversed(range(648))][::-1]
    assert taken != [other[number] for number in range(648)]
    assert set(taken[:324]) == set(taken[324:]) == set(problems)
    assert taken[:324] != taken[324:]


@pytest.mark.services
async def test_hub_dataset_is_read_by_the_child(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.jsonl", 4)
    write(tmp_path / "set" / "test.jsonl", 2)
    problems = await hub_problem_set(str(tmp_path / "set"), "default", 2, 0, deadline_s=60)
    assert len(problems.train) == 4
    assert {problem.question for problem in problems.held_out} == {
        "q0 of test",
        "q1 of test",
    }


@pytest.mark.services
async def test_hub_that_gives_nothing_is_reported_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"the hub did not deliver \S*nowhere: .+; check the network, or pass --env.dataset arithmetic"
    ):
        await hub_problem_set(str(tmp_path / "nowhere"), "default", 2, 0, deadline_s=60)


@pytest.mark.services
async def test_slow_hub_is_given_up_at_its_deadline() -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match=r"within 0 s \(hub_timeout\)"):
        await hub_problem_set("openai/gsm8k", "main", 2, 0, deadline_s=0.2)
    assert time.monotonic() - start < 5
