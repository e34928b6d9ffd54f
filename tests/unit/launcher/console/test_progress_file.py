"""starting.json: what the window shows of a run that has made no step yet."""

import json
from pathlib import Path

from atropos_launcher.console.progress import RunProgress
from atropos_launcher.console.progress_file import ProgressFile
from atropos_launcher.services.events import LogLine, Started, Up, Waiting
from atroposlib.view.run_data.run_files import RunFiles


class Clock:
    at = 100.0

    def __call__(self) -> float:
        return self.at


def bars(run: Path) -> list[tuple[object, object]]:
    """What the window reads."""
    return [(bar["name"], bar["note"]) for bar in RunFiles(run, "r").starting()]


def test_the_window_reads_what_vllm_loads_and_how_far_it_is(tmp_path: Path) -> None:
    clock = Clock()
    kept = ProgressFile(tmp_path, RunProgress(20, None), clock)
    kept(Waiting("vllm", "http://127.0.0.1:9001/health", 1800, tmp_path / "vllm.log"))
    kept(Started("trainer", 5, tmp_path / "trainer.log"))
    kept(LogLine("vllm", "INFO Loading safetensors checkpoint shards:  50% Completed"))
    clock.at += 12
    kept.write()
    assert bars(tmp_path) == [
        ("vllm", "loading weights 50 %, 12 s of at most 30 min 0 s"),
        ("trainer", "step 0 of 20, starting 12 s"),
    ]
    (vllm, _) = RunFiles(tmp_path, "r").starting()
    assert (vllm["done"], vllm["total"]) == (3.5, 8)
    kept(Up("vllm", 13))
    clock.at += 0.5
    kept.write()  # too early
    assert len(bars(tmp_path)) == 2
    clock.at += 0.5
    kept.write()
    assert [name for name, _ in bars(tmp_path)] == ["trainer"]


def test_the_first_step_removes_the_file_and_nothing_writes_it_again(tmp_path: Path) -> None:
    clock = Clock()
    kept = ProgressFile(tmp_path, RunProgress(20, None), clock)
    kept.write()
    assert (tmp_path / "starting.json").exists()
    kept(LogLine("trainer", "Step 1/20 | reward 0.1 | step 2.0 s"))
    clock.at += 1
    kept.write()
    clock.at += 1
    kept.write()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_no_file_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / ".starting.json.partial").symlink_to("/dev/null")
    kept = ProgressFile(tmp_path, RunProgress(20, None), Clock())
    kept.write()
    kept.close()
    assert bars(tmp_path) == []


def test_a_damaged_file_shows_no_bars(tmp_path: Path) -> None:
    for content in ("[" * 9999, '{"bars": 3}', json.dumps({"bars": [{"name": 1}]})):
        (tmp_path / "starting.json").write_text(content)
        assert bars(tmp_path) == []
