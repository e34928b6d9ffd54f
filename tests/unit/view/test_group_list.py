"""Which groups the list shows, in which order, and what it says of each."""

import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from atroposlib.view import replies
from atroposlib.view.run_data import group_files, jsonl_index
from atroposlib.view.run_data.rows import read_sample
from tests.unit.view.support import client, get, held_out, make_run, sample, trained, write_rows

GROUPS = "/api/runs/r/groups"


@pytest.fixture
def window(run: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr(group_files, "LOOK_EVERY_S", 0.0)
    return client(run)


def numbers(window: TestClient, **query: object) -> list[int]:
    """The groups that are listed, by the number in their question."""
    found = get(window, GROUPS, **query)
    assert found["complete"]
    assert found["total"] == len(found["rows"])
    return [int(row["question"].split()[2]) for row in found["rows"]]


def test_the_newest_group_is_first_with_all_that_is_known_of_it(window: TestClient) -> None:
    found = get(window, GROUPS, limit=1)
    assert (found["total"], found["complete"]) == (6, True)
    (row,) = found["rows"]
    assert row["question"] == "What is 5 + 5?"
    assert (row["step"], row["sampled_at_step"], row["policy_version"], row["env"]) == (3, 2, 2, "gsm8k")
    assert (row["scores"], row["mean"], row["reference"]) == ([1.0, 0.0], 0.5, "10")
    assert (row["tokens"], row["truncated"], row["failed"]) == (6, 1, 0)
    assert (row["dropped"], row["left_out"], row["finish_reasons"]) == (None, None, {"stop": 1, "length": 1})


def test_pages_follow_each_other(window: TestClient) -> None:
    pages = [get(window, GROUPS, offset=offset, limit=4)["rows"] for offset in (0, 4, 8)]
    assert [row["question"].split()[2] for page in pages for row in page] == ["5", "4", "3", "2", "1", "0"]


def test_filters(window: TestClient, run: Path) -> None:
    write_rows(
        run / "samples.jsonl",
        (
            sample(10, 3, dropped="all scores are 0", scores=[0.0, 0.1 + 0.2 - 0.3], finish_reasons=["stop", "stop"]),
            sample(11, 3, env="tools", failed={"scorer": 2}, scores=[0.75, 0.25], finish_reasons=None),
            sample(12, 3, finish_reasons=["stop", "stop"]),
        ),
        "a",
    )
    write_rows(run / "trained.jsonl", (trained(12, 4, left_out="a mismatch"), trained(11, 4)), "a")
    assert numbers(window, step=2) == [3, 2]
    assert numbers(window, step=4) == [12, 11]
    assert numbers(window, version=3) == [12, 11, 10]
    assert numbers(window, env="tools") == [11]
    assert numbers(window, env="nobody") == []
    assert numbers(window, dropped="yes") == [12, 10]  # by the environment, or left out by the trainer
    assert numbers(window, dropped="no") == [11, 5, 4, 3, 2, 1, 0]
    assert numbers(window, failed="yes") == [11]
    assert numbers(window, truncated="yes") == [5, 4, 3, 2, 1, 0]
    assert numbers(window, signal="no") == [10]
    assert numbers(window, signal="yes", version=3) == [12, 11]
    assert numbers(window, max_score=0.1) == [10]
    assert numbers(window, min_score=0.5, version=3) == [12, 11]
    assert numbers(window, version=3, sort="score") == [10, 12, 11]
    assert numbers(window, version=3, sort="spread") == [12, 11, 10]
    assert numbers(window, sort="oldest")[:3] == [0, 1, 2]
    row = get(window, GROUPS, step=4)["rows"][0]
    assert row["left_out"] == "a mismatch"


def test_a_search_finds_texts_and_no_token_ids(window: TestClient, run: Path) -> None:
    assert numbers(window, q="IS 3 +") == [3]
    assert numbers(window, q="knöw") == [5, 4, 3, 2, 1, 0]
    assert numbers(window, q="<b>", step=1) == [1, 0]
    assert numbers(window, q="gsm8k") == []  # not a text that anybody wrote
    assert numbers(window, q="-0.125") == []
    write_rows(run / "samples.jsonl", [sample(7, 3, dropped='the "judge" said no')], "a")
    assert numbers(window, q='"judge"') == [7]
    assert numbers(window, q="14") == [7]  # its reference


def test_a_search_of_a_large_file_goes_on_where_it_was(
    window: TestClient, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_index, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(group_files, "SEARCH_S", 0.0)
    write_rows(run / "samples.jsonl", (sample(number, 3) for number in range(20)))
    get(window, GROUPS)
    found, asked = get(window, GROUPS, q="What is 0 +"), 1
    assert not found["complete"]
    while not found["complete"]:
        found, asked = get(window, GROUPS, q="What is 0 +"), asked + 1
    assert asked > 3
    assert [row["question"] for row in found["rows"]] == ["What is 0 + 0?"]


def test_several_files_are_one_list_by_time(window: TestClient, run: Path) -> None:
    write_rows(run / "samples_1.jsonl", (sample(number, 5) for number in (20, 21)))  # a run that was resumed
    write_rows(run / "samples_tools.jsonl", [sample(30, 4)])
    assert numbers(window) == [21, 20, 30, 5, 4, 3, 2, 1, 0]
    row = get(window, GROUPS, version=4)["rows"][0]
    assert get(window, f"{GROUPS}/{row['n']}")["reference"] == "60"


def test_a_growing_run_is_followed_and_a_shorter_file_believed(window: TestClient, run: Path) -> None:
    assert len(numbers(window)) == 6
    write_rows(run / "samples.jsonl", [sample(6, 3)], "a")
    assert numbers(window)[0] == 6
    with (run / "samples.jsonl").open("a") as file:
        file.write('{"step": 4, "scores": [')
    assert numbers(window)[0] == 6
    os.truncate(run / "samples.jsonl", len((run / "samples.jsonl").read_bytes().split(b"\n")[0]) + 1)
    assert numbers(window) == [0]
    (run / "samples.jsonl").unlink()
    assert numbers(window) == []


def test_groups_of_the_same_tokens_are_told_apart_by_when_they_were_sampled(window: TestClient, run: Path) -> None:
    write_rows(run / "samples.jsonl", (sample(0, version) for version in (0, 1, 4)))
    write_rows(run / "trained.jsonl", (trained(0, step) for step in (1, 2)))
    assert [row["step"] for row in get(window, GROUPS)["rows"]] == [2, 2, 1]
    assert [row["sampled_at_step"] for row in get(window, GROUPS, step=1)["rows"]] == [0]


def test_many_groups_of_the_same_tokens_are_told_apart_at_once(window: TestClient, run: Path) -> None:
    write_rows(run / "samples.jsonl", (sample(0, step) for step in range(5000)))
    write_rows(run / "trained.jsonl", (trained(0, step + 1) for step in range(5000)))
    began = time.monotonic()
    (row,) = get(window, GROUPS, step=2500)["rows"]
    assert (row["step"], row["sampled_at_step"]) == (2500, 2499)
    assert time.monotonic() - began < 3


def test_a_run_without_trained_rows_names_the_step_that_came_next(window: TestClient, run: Path) -> None:
    (run / "trained.jsonl").unlink()
    assert numbers(window, step=3) == [5, 4]
    assert get(window, GROUPS, limit=1)["rows"][0]["step"] == 3


def test_held_out_answers_and_which_are_wrong(window: TestClient, run: Path) -> None:
    write_rows(run / "held_out.jsonl", [held_out(9, 3, score=None, messages=None), held_out(10, 3, score="?")], "a")
    versions = get(window, "/api/runs/r/held_out")["versions"]
    assert versions == [
        {"version": 0, "env": "gsm8k", "answers": 4, "wrong": 1},
        {"version": 3, "env": "gsm8k", "answers": 6, "wrong": 1},
    ]
    wrong = get(window, GROUPS, source="held_out", version="latest", wrong="yes")
    assert wrong["total"] == 1
    (row,) = wrong["rows"]
    assert (row["question"], row["answer"], row["index"], row["policy_version"]) == ("Held out 3?", "3!", 3, 3)
    assert (row["scores"], row["reference"]) == ([0.0], "3")
    assert get(window, GROUPS, source="held_out", sort="score")["rows"][-1]["scores"] == [None]


MALFORMED: list[Any] = [
    {"scores": "high", "tokens": 7, "messages": {"a": 1}, "failed": [1], "finish_reasons": {}, "rollouts": "x"},
    {"scores": [None, float("1e308"), -1e308], "completion_tokens": [10**9] * 9, "env": "e" * 10_000},
    {"scores": [1.0], "messages": [[1, None, {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]]},
    {"messages": [["only text"]], "tokens": [["a"]], "reference": {"answer": [1, 2]}},
    {"messages": "text", "failures": [{"cause": "scorer", "messages": [{"role": "user", "content": "asked"}]}]},
    {"texts": ["just a text"], "scores": [0.5]},
    {},
]


@pytest.mark.parametrize("row", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_row_is_listed_and_opens(tmp_path: Path, row: dict[str, Any]) -> None:
    run = make_run(tmp_path / "r")
    write_rows(run / "samples.jsonl", [row])
    window = client(run)
    (found,) = get(window, GROUPS)["rows"]
    assert get(window, f"{GROUPS}/{found['n']}")["n"] == found["n"]


def test_rows_that_cannot_be_read_are_a_problem_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    lines = (run / "samples.jsonl").read_text().splitlines()
    bad = ["not json", '{"step": "x"}', '{"step": 1e99}', '{"scores": [NaN]}', '{"group": "xyz"}', "[" * 100_000]
    bad += ['{"group": "-00000000000000f"}']  # a number to int(), and none of an unsigned column
    (run / "samples.jsonl").write_text("\n".join([*lines[:2], *bad, *lines[2:], "\udcff" * 0]) + "\n")
    window = client(run)
    assert get(window, GROUPS)["total"] == 6
    (listed,) = get(window, "/api/runs")["runs"]
    assert listed["problems"] == [f"samples.jsonl: {len(bad)} damaged rows left out"]
    places = [sum(len(line) + 1 for line in [*lines[:2], *bad[:number]]) for number in range(len(bad))]
    assert {window.get(f"{GROUPS}/samples.{place}").status_code for place in places} == {404}


def test_one_row_of_a_page_is_in_memory_at_a_time(window: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []

    def read(line: bytes) -> Any:
        alive[:] = [ref for ref in alive if ref() is not None]
        row = read_sample(line)
        alive.append(weakref.ref(row))
        most.append(len(alive))
        return row

    most: list[int] = []
    monkeypatch.setattr(replies, "read_sample", read)
    assert len(numbers(window)) == 6
    assert len(most) == 6
    assert max(most) <= 2  # the one that is read, and the one before it
