"""samples.jsonl and trained.jsonl stay within a limit; newer parts are readable as they are, older ones compressed."""

import gzip
import json
import os
from pathlib import Path

import pytest

from atroposlib.envs.records import JsonlWriter
from atroposlib.kept_rows import DEFAULT, Keep, Parts, parse_keep
from atroposlib.view.group_files import GroupFiles
from atroposlib.view.jsonl_index import Indexer
from atroposlib.view.run_files import RunFiles
from example_trainer.step_file import StepFile

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


@pytest.mark.parametrize("text", ["", "20", "20 gb", "-1GB", "0steps", "0GB", "steps", "allx"])
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


def test_the_window_shows_newer_parts_and_names_those_that_are_compressed(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "samples.jsonl")
    writer.keep(Keep(bytes=10_000))
    for step in range(1, 200):
        writer.write(ROW | {"step": step}, step)
        settled(writer)
    writer.close()
    run = RunFiles(tmp_path, "r")
    assert [path.name.split("_")[0] for path in run.files("samples")] == ["samples.jsonl", "samples"]
    (problem,) = GroupFiles(run, Indexer()).problems
    assert "compressed and not shown (samples_s0" in problem


def test_a_full_disk_leaves_a_part_uncompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "samples_s000001-000002.jsonl"
    part.write_text("{}\n")

    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("atroposlib.kept_rows.shutil.copyfileobj", no_space)
    Parts(tmp_path / "samples.jsonl", Keep(steps=5)).settle_all(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == [part.name]
