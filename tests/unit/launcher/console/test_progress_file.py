"""starting.json: what the window shows of a run that has made no step yet."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from atropos_launcher.commands import train
from atropos_launcher.console.console import PlainConsole
from atropos_launcher.console.progress import RunProgress
from atropos_launcher.console.progress_file import ProgressFile
from atropos_launcher.service import Service
from atropos_launcher.services.events import LogLine, Started, Up, Waiting
from atroposlib.view.run_data.run_files import RunFiles
from tests.unit.launcher.plans import no_processes, plan

__all__ = ["no_processes"]

# Writes what vLLM writes, and two seconds later ends as a trainer does.
LOADS = "import time; print('INFO Loading safetensors checkpoint shards:  50% Completed', flush=True); time.sleep(2.5)"


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


@pytest.mark.services
@pytest.mark.usefixtures("no_processes")
def test_a_run_that_starts_writes_it_and_leaves_none(tmp_path: Path) -> None:
    made = plan("arithmetic")
    waits = Service("trainer", (sys.executable, "-c", LOADS), may_end=True, health="http://127.0.0.1:9/health")
    made = replace(made, site=replace(made.site, run_dir=tmp_path), services=[waits])
    seen: list[tuple[object, object]] = []

    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            seen.extend(bars(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    train.start(made, PlainConsole(tmp_path, {}), [])
    over.set()
    watcher.join()
    assert any(name == "trainer" and "starting 50 %" in str(note) for name, note in seen), seen
    assert not (tmp_path / "starting.json").exists()
