"""samples.jsonl and trained.jsonl stay within a limit; newer parts are readable as they are, older ones compressed."""

import gzip
import io
import json
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.files import records
from atroposlib.envs.files.records import JsonlWriter
from atroposlib.files import open_regular
from atroposlib.row_files.kept_rows import DEFAULT, Keep, Parts, compress, parse_keep, read_removed
from atroposlib.row_files.packed_rows import HEAD, MAGIC, TEXT_BYTES, Packed, pack
from atroposlib.row_files.record_file import RecordFile
from atroposlib.view.run_data import rows
from atroposlib.view.run_data.group_files import Filter, GroupFiles
from atroposlib.view.run_data.jsonl_index import Indexer, JsonlIndex, lines_at
from atroposlib.view.run_data.run_files import RunFiles
from example_trainer.output.step_file import StepFile
from tests.waiting import wait_until

ROW = {"step": 0, "text": "x" * 80}


def settled(writer: JsonlWriter) -> None:
    parts = writer._file.parts
    assert parts is not None
    if parts._thread is not None:
        parts._thread.join(10)


def steps_in(folder: Path, pattern: str) -> list[int]:
    found = []
    for path in folder.glob(pattern):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found += [json.loads(line)["step"] for line in content.splitlines()]
    return sorted(found)


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("20GB", Keep(bytes=20 * 10**9)),
        ("1.5 MB", Keep(bytes=1_500_000)),
        ("200steps", Keep(steps=200)),
        ("1 step", Keep(steps=1)),
        ("all", Keep()),
    ],
)
def test_the_limit_is_bytes_steps_or_all(text: str, keep: Keep) -> None:
    assert parse_keep(text) == keep
    assert not parse_keep(DEFAULT).is_all


@pytest.mark.parametrize(
    "text", ["", "20", "20 gb", "-1GB", "0steps", "0GB", "steps", "allx", f"1{'0' * 400}GB", f"{'9' * 5000}steps"]
)
def test_another_text_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match=r"20GB.*200steps|keeps nothing"):
        parse_keep(text)


def test_bytes_are_bounded_and_nothing_newer_is_lost(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "samples.jsonl")
    writer.keep(Keep(bytes=10_000))
    for step in range(1, 1001):
        writer.write(ROW | {"step": step}, step)
        settled(writer)
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert total <= 10_000 + 2_000  # and at most one part that is about to be removed
    writer.close()
    kept = steps_in(tmp_path, "samples*.jsonl*")
    assert kept == list(range(kept[0], 1001))  # the newest, without a gap
    plain, packed = list(tmp_path.glob("samples_s*.jsonl")), list(tmp_path.glob("samples_s*.jsonl.gz"))
    assert len(plain) == 1
    assert packed
    assert not list(tmp_path.glob(".*"))


def test_steps_are_bounded(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "samples.jsonl")
    writer.keep(Keep(steps=50))
    for step in range(1, 301):
        for _ in range(3):
            writer.write(ROW | {"step": step}, step)
        settled(writer)
    writer.close()
    kept = steps_in(tmp_path, "samples*.jsonl*")
    assert set(range(251, 301)) <= set(kept)
    assert min(kept) >= 251 - 2 * 10 - 1
    assert kept.count(300) == 3


def test_what_process_writes_and_all_are_never_moved(tmp_path: Path) -> None:
    for name, keep, step in (("a", Keep(bytes=1000), None), ("b", Keep(), 1)):
        writer = JsonlWriter(tmp_path / f"{name}.jsonl")
        writer.keep(keep)
        for _ in range(100):
            writer.write(ROW, step)
        writer.close()
        assert [path.name for path in tmp_path.glob(f"{name}*")] == [f"{name}.jsonl"]


def test_files_of_earlier_starts_count_and_those_of_other_environments_do_not(tmp_path: Path) -> None:
    for name in ("samples.jsonl", "samples_other.jsonl", "samples_other_s000001-000009.jsonl"):
        (tmp_path / name).write_text(json.dumps(ROW) * 50 + "\n")
        os.utime(tmp_path / name, (1, 1))
    writer = JsonlWriter(tmp_path / "samples.jsonl")
    assert writer.path.name == "samples_1.jsonl"
    writer.keep(Keep(bytes=4_000))
    for step in range(1, 300):
        writer.write(ROW | {"step": step}, step)
        settled(writer)
    writer.close()
    assert not (tmp_path / "samples.jsonl").exists()  # the oldest
    assert not (tmp_path / "samples.jsonl.gz").exists()
    assert (tmp_path / "samples_other.jsonl").exists()
    assert (tmp_path / "samples_other_s000001-000009.jsonl").exists()


def test_the_oldest_steps_go_first_whatever_the_times_of_files_are_after_a_copy(tmp_path: Path) -> None:
    for first in range(1, 80, 10):
        part = tmp_path / f"trained_s{first:06d}-{first + 9:06d}.jsonl"
        part.write_text("".join(json.dumps(ROW | {"step": step}) + "\n" for step in range(first, first + 10)))
        os.utime(part, (1000 - first, 1000 - first))
    Parts(tmp_path / "trained.jsonl", Keep(bytes=4_000)).settle()
    assert steps_in(tmp_path, "trained_s*.jsonl") == list(range(51, 81))


def test_the_trainers_rows_are_bounded_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    for first, last in ((1, 100), (90, 200)):  # from the checkpoint of step 89
        file = StepFile(path, first, "trained groups", "--trained-path", Keep(steps=40))
        for step in range(first, last + 1):
            file.append(step, ROW | {"step": step}, ROW | {"step": step})
            parts = file._file.parts
            if parts is not None and parts._thread is not None:
                parts._thread.join(10)
        file.close()
    kept = steps_in(tmp_path, "trained*.jsonl*")
    assert set(range(161, 201)) <= set(kept)
    assert min(kept) > 120
    assert all(kept.count(step) == 2 for step in range(161, 201))


def test_the_window_shows_all_parts_and_says_what_was_removed(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "samples.jsonl")
    writer.keep(Keep(bytes=10_000))
    for step in range(1, 1001):
        writer.write(ROW | {"step": step, "scores": [1.0], "group": f"{step:016x}"}, step)
        settled(writer)
    writer.close()
    kept = steps_in(tmp_path, "samples*.jsonl*")
    assert list(tmp_path.glob("*.gz"))
    run, indexer = RunFiles(tmp_path, "r"), Indexer()
    groups = GroupFiles(run, indexer)
    assert not groups.page("samples", Filter(), "newest", 0, 10).complete  # indexed beside
    wait_until(lambda: groups.page("samples", Filter(), "newest", 0, 10).complete)
    page = groups.page("samples", Filter(), "oldest", 0, 10_000)
    assert sorted(int(place.entry["step"]) for place in page.places) == kept
    for place in page.places:
        (line,) = lines_at(place.path, [(int(place.entry["offset"]), int(place.entry["length"]))])
        assert line is not None
        assert json.loads(line)["step"] == int(place.entry["step"])
        assert groups.path("samples", place.name) == place.path
    wanted = Filter(step=None, q="xxxx")
    assert groups.page("samples", wanted, "newest", 0, 10).total == 0  # `text` is not searched
    (problem,) = groups.problems
    gone = 1000 - len(kept)
    assert problem.startswith(f"samples.jsonl: the oldest {gone} rows (")
    assert f"up to step {kept[0] - 1})" in problem
    assert read_removed(tmp_path / "samples_removed.json").rows == gone


def test_a_part_that_was_noted_and_not_removed_is_counted_once(tmp_path: Path) -> None:
    part = tmp_path / "samples_s000001-000002.jsonl"
    part.write_text('{"step": 1}\n{"step": 2}\n')
    parts = Parts(tmp_path / "samples.jsonl", Keep(bytes=1))
    parts._note_removed(part)  # and killed
    Parts(tmp_path / "samples.jsonl", Keep(bytes=1)).settle()
    assert not part.exists()
    assert read_removed(tmp_path / "samples_removed.json")[:4] == (2, 24, 1, 2)


@pytest.mark.parametrize("packed", [True, False])
def test_a_resumed_trainer_repeats_no_step_in_parts(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "trained.jsonl"
    file = StepFile(path, 1, "trained groups", "--trained-path", Keep(steps=50))
    for step in range(1, 101):
        file.append(step, ROW | {"step": step}, ROW | {"step": step})
    file.close()
    parts = file._file.parts
    assert parts is not None
    assert parts._thread is not None
    parts._thread.join(10)
    if packed:
        for part in tmp_path.glob("trained_s*.jsonl"):
            compress(part)
    resumed = StepFile(path, 66, "trained groups", "--trained-path", Keep(steps=50))
    for step in range(66, 69):
        resumed.append(step, ROW | {"step": step})
    resumed.close()
    kept = steps_in(tmp_path, "trained*.jsonl*")
    assert kept == [*(step for step in range(kept[0], 66) for _ in range(2)), 66, 67, 68]
    assert not list(tmp_path.glob(".*"))


def test_parts_of_one_step_are_cut_without_a_loss(tmp_path: Path) -> None:
    for name, step in (("s000005-000005", 5), ("s000005-000006", 5), ("s000006-000007", 6)):
        (tmp_path / f"trained_{name}.jsonl").write_text(json.dumps({"step": step}) + "\n")
    StepFile(tmp_path / "trained.jsonl", 6, "trained groups", "--trained-path").close()
    assert steps_in(tmp_path, "trained*.jsonl") == [5, 5]


def test_a_fresh_run_moves_the_parts_of_an_earlier_one_aside(tmp_path: Path) -> None:
    (tmp_path / "trained.jsonl").write_text('{"step": 3}\n')
    (tmp_path / "trained_s000001-000002.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    StepFile(tmp_path / "trained.jsonl", 1, "trained groups", "--trained-path").close()
    assert [path.name for path in RunFiles(tmp_path, "r").files("trained")] == ["trained.jsonl"]
    assert steps_in(tmp_path, "trained.*jsonl") == [1, 2, 3]


TEXT = b"".join(json.dumps(ROW | {"step": step}).encode() + b"\n" for step in range(100_000))  # three members


def test_any_part_of_a_compressed_file_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with path.open("wb") as file:
        pack(io.BytesIO(TEXT), file)
    assert gzip.decompress(path.read_bytes()) == TEXT
    with path.open("rb") as file:
        packed = Packed(file.fileno())
        assert (packed.size, packed.lines) == (len(TEXT), 100_000)
        for start, count in (
            (0, 10),
            (TEXT_BYTES - 5, 10),
            (TEXT_BYTES, 5),
            (len(TEXT) - 3, 10),
            (len(TEXT), 1),
            (7, 0),
        ):
            assert packed.read(start, count) == TEXT[start : start + count]
        assert packed.read(0, len(TEXT)) == b"".join(packed.blocks()) == TEXT


def bomb() -> bytes:
    """A member that says it holds 10 bytes, and unpacks to 100 MB."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(bytes(100_000_000)) + deflate.flush()
    size = HEAD.size + len(body) + 8
    return HEAD.pack(MAGIC, 0, 0, 255, 16, b"AT", 12, size, 10, 0) + body + bytes(8)


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(TEXT[:1000], mtime=0),
        b"\x1f\x8b",
        b"not gzip at all, but long enough for a header of a member",
        HEAD.pack(MAGIC, 0, 0, 255, 16, b"AT", 12, 0, 10, 0),
        HEAD.pack(MAGIC, 0, 0, 255, 16, b"AT", 12, 2**32 - 1, 10, 0),
        HEAD.pack(MAGIC, 0, 0, 255, 16, b"AT", 12, 40, 2**32 - 1, 0) + bytes(12),
        HEAD.pack(MAGIC, 0, 0, 255, 16, b"AT", 12, 40, 10, 0) + bytes(12),
        bomb(),
    ],
)
def test_a_compressed_file_of_somebody_else_is_a_sentence_in_the_window(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "samples_s000001-000002.jsonl.gz"
    path.write_bytes(content)
    tracemalloc.start()
    index = JsonlIndex(path, rows.GROUP, lambda line: ())
    assert not index.advance()
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    (problem,) = index.problems
    assert "cannot be read: it is compressed in another way, or damaged" in problem


def test_a_full_disk_leaves_a_part_uncompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "samples_s000001-000002.jsonl"
    part.write_text("{}\n")

    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("atroposlib.row_files.kept_rows.pack", no_space)
    Parts(tmp_path / "samples.jsonl", Keep(steps=5)).settle_all(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == [part.name]


def test_a_file_that_was_compressed_keeps_its_name(tmp_path: Path) -> None:
    """Each start fills parts, so that the next one compresses its file; the window shows the rows of all."""
    for start in range(5):
        writer = JsonlWriter(tmp_path / "samples.jsonl")
        writer.keep(Keep(steps=10_000))
        for step in (1, 5000):
            writer.write({"step": 10_000 * start + step}, step)
            settled(writer)
        writer.close()
        for path in tmp_path.glob("samples*"):
            os.utime(path, (start, start))
    assert steps_in(tmp_path, "samples*.jsonl*") == [10_000 * start + step for start in range(5) for step in (1, 5000)]
    shown = [path.name for path in RunFiles(tmp_path, "r").files("samples")]
    assert sorted(shown) == sorted(path.name for path in tmp_path.iterdir())


def test_two_environments_that_start_together_write_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(path: Path, mode: str) -> Any:
        path.touch()
        monkeypatch.undo()
        return open_regular(path, mode)

    monkeypatch.setattr(records, "open_regular", second)
    assert JsonlWriter(tmp_path / "samples.jsonl").path.name == "samples_1.jsonl"


def test_earlier_runs_whose_last_rows_have_one_time_are_all_kept(tmp_path: Path) -> None:
    for run in range(3):
        file = StepFile(tmp_path / "trained.jsonl", 1, "trained groups", "--trained-path")
        file.append(1, {"step": run})
        file.close()
        os.utime(tmp_path / "trained.jsonl", (1e9, 1e9))
    assert steps_in(tmp_path, "trained*.jsonl") == [0, 1, 2]


@pytest.mark.parametrize("left", ["", '{"step": 1}\n', '{"step": 1}\n{"st'])
def test_a_row_is_a_line_of_its_own_after_what_a_kill_has_left(tmp_path: Path, left: str) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text(left)
    file = RecordFile(path)
    file.append({"step": 2}, {"step": 3})
    file.append({"step": 4})
    assert path.read_text().splitlines()[-3:] == ['{"step":2}', '{"step":3}', '{"step":4}']
    assert path.read_text().startswith(left)
