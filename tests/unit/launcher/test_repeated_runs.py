"""benchmarks/repeated_runs.py: what its arms differ in, whom it kills and when, and what it does then."""

import json
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from benchmarks import repeated_runs
from benchmarks.repeated_runs import Arm, Kept, RepeatedRuns, flags_of, kept, kill_behind, table
from example_trainer.errors import TrainerError


def finish(run: Path, weights: bytes) -> None:
    """Write what a finished run leaves."""
    (run / "checkpoints/final_model").mkdir(parents=True)
    (run / "checkpoints/final_model/model.safetensors").write_bytes(weights)
    (run / "trained.jsonl").write_bytes(b"{}\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "step_s": step}) + "\n" for step in (1, 2, 9)))


def test_arms_differ_from_plain_in_one_thing() -> None:
    config = RepeatedRuns()
    plain = flags_of(config, "plain")
    assert [flags_of(config, arm) for arm in repeated_runs.KILLED] == [plain] * 4
    assert flags_of(config, "servers") == [*plain, "--vllm.count", "2"]
    assert {*plain} - {*flags_of(config, "exact")} == {"--deterministic"}
    assert {*flags_of(config, "exact")} - {*flags_of(config, "default")} == {"--batch-invariant"}


@pytest.mark.services
def test_a_service_is_killed_once_the_step_is_written(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n" * repeated_runs.BEHIND)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        (tmp_path / "pids/api").write_text(json.dumps({"pid": process.pid}))
        killed = Event()
        kill_behind(tmp_path, "api", killed)
        assert process.wait(30) == -9
    assert killed.is_set()


def test_a_run_that_ended_by_the_kill_is_resumed_and_another_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resumed: list[str] = []

    def fails(runs: Path, name: str, flags: list[str], limit_s: float) -> Path:
        raise TrainerError("ended")

    def resume(config: RepeatedRuns, arm: Arm) -> None:
        resumed.append(arm)

    def kill(run: Path, service: str, killed: Event) -> None:
        if service == "trainer":
            killed.set()

    class Now:
        def __init__(self, target: object, args: tuple[Path, str, Event], daemon: bool) -> None:
            self.start = lambda: kill(*args)

    monkeypatch.setattr(repeated_runs, "launched", fails)
    monkeypatch.setattr(repeated_runs, "resume", resume)
    monkeypatch.setattr(repeated_runs, "Thread", Now)
    repeated_runs.train(RepeatedRuns(runs=tmp_path), "trainer")
    for arm in ("api", "plain"):
        with pytest.raises(TrainerError, match="ended"):
            repeated_runs.train(RepeatedRuns(runs=tmp_path), arm)
    assert resumed == ["trainer"]


def test_the_table_shows_what_a_run_left(tmp_path: Path) -> None:
    finish(tmp_path / "plain", b"a")
    finish(tmp_path / "api", b"b")
    found: dict[Arm, Kept] = {"plain": kept(tmp_path / "plain"), "api": kept(tmp_path / "api")}
    plain, api = table(found).splitlines()[2:]
    assert plain.endswith("| 2.00 |")
    assert plain.split("|")[2] != api.split("|")[2]
    assert plain.split("|")[3] == api.split("|")[3]
