"""The index of a growing file: newest first, whatever happens to the file."""

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from atroposlib.view.run_data import jsonl_index
from atroposlib.view.run_data.jsonl_index import Indexer, JsonlIndex, line_from, lines_at
from tests.waiting import until

KIND = np.dtype([("offset", "u8"), ("length", "u4"), ("value", "i8")])


def numbers(line: memoryview) -> tuple[Any, ...]:
    return (msgspec.json.decode(line, type=int),)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_index, "BLOCK_BYTES", 64)
    monkeypatch.setattr(jsonl_index, "MAX_ROW_BYTES", 512)


def index(path: Path, **options: int) -> JsonlIndex:
    return JsonlIndex(path, KIND, numbers, **options)


def whole(found: JsonlIndex) -> list[int]:
    """Every value, in the file's order, once all is indexed."""
    while found.advance(64):
        pass
    return values(found)


def values(found: JsonlIndex) -> list[int]:
    return [value for segment in reversed(found.segments) for value in segment.rows["value"].tolist()]


def written(path: Path, *lines: object, mode: str = "w") -> Path:
    with path.open(mode) as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def test_the_newest_rows_are_indexed_first(tmp_path: Path) -> None:
    found = index(written(tmp_path / "f", *range(1000)))
    assert found.advance(64)
    assert values(found)[-1] == 999
    assert 0 < found.rows < 100
    assert found.is_behind
    assert whole(found) == list(range(1000))
    assert not found.is_behind
    assert found.extent == (1, 1)


def test_a_row_is_found_again_by_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "f", *range(1000))
    found = index(path)
    whole(found)
    for segment in found.segments:
        places = [(int(row["offset"]), int(row["length"])) for row in segment.rows]
        assert [int(line or b"-1") for line in lines_at(path, places)] == segment.rows["value"].tolist()
        assert line_from(path, places[0][0]) == b"%d" % segment.rows["value"][0]
    assert line_from(path, 1) is None  # in the middle of a row
    assert line_from(path, 10**9) is None


def test_new_rows_are_added_and_small_segments_grow_together(tmp_path: Path) -> None:
    path = written(tmp_path / "f", *range(5))
    found = index(path)
    assert whole(found) == list(range(5))
    for value in range(5, 100):
        written(path, value, mode="a")
        found.advance()
        assert found.rows == value + 1
    assert values(found) == list(range(100))
    assert len(found.segments) < 15


def test_half_a_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("1\n2\n34")
    found = index(path)
    assert whole(found) == [1, 2]
    assert not found.is_behind
    written(path, 56, mode="a")
    assert whole(found) == [1, 2, 3456]


def test_a_file_that_shrinks_or_is_replaced_or_rewritten_is_indexed_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "f", *range(100))
    found = index(path)
    assert len(whole(found)) == 100
    os.truncate(path, 20)  # as a resumed run drops rows
    assert whole(found) == list(range(10))
    written(path, *range(50, 150), mode="a")
    assert whole(found) == [*range(10), *range(50, 150)]
    os.replace(written(tmp_path / "new", 7, *range(500)), path)
    assert whole(found) == [7, *range(500)]
    os.replace(written(tmp_path / "new", 8, *range(510)), path)  # the bytes before the old end are as they were
    assert whole(found) == [8, *range(510)]
    written(path, *range(1000, 1600))  # the same file, other bytes, longer
    assert whole(found) == list(range(1000, 1600))
    path.unlink()
    assert whole(found) == []
    assert found.problems == []
    assert whole(index(tmp_path / "nowhere" / "f")) == []


def test_damaged_rows_are_counted_and_left_out(tmp_path: Path) -> None:
    found = index(written(tmp_path / "f", 1, "{", "", "null", '"' + 400 * "x" + '"', "[" * 400, 2))
    assert whole(found) == [1, 2]
    assert found.problems == ["f: 4 damaged rows left out"]


def test_a_row_that_is_too_long_is_damaged_wherever_it_stands(tmp_path: Path) -> None:
    long = "9" * 3000
    path = written(tmp_path / "f", 1, long, 2, long)
    found = index(path)
    assert whole(found) == [1, 2]
    assert found.problems == ["f: 2 damaged rows left out"]
    written(path, long, 3, mode="a")
    assert whole(found) == [1, 2, 3]


def test_only_so_many_rows_are_kept(tmp_path: Path) -> None:
    found = index(written(tmp_path / "f", *range(1000)), max_rows=100)
    kept = whole(found)
    assert kept == list(range(1000 - len(kept), 1000))
    assert 100 <= len(kept) < 150
    assert not found.is_behind
    assert found.problems == [f"f: only the newest {len(kept)} rows are shown"]


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_regular_file_is_a_problem_and_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "f"
    match kind:
        case "link":
            path.symlink_to(written(tmp_path / "secret", 1))
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    found = index(path)
    assert whole(found) == []
    assert len(found.problems) == 1
    assert "regular file" in found.problems[0]


async def test_one_thread_indexes_what_is_asked_for_last_and_then_sleeps(tmp_path: Path) -> None:
    indexer = Indexer()
    found = [index(written(tmp_path / str(number), *range(5000))) for number in range(3)]
    for each in found:
        each.advance(64)
        indexer.add(each)
    await until(lambda: not indexer._work)
    assert all(values(each) == list(range(5000)) for each in found)
