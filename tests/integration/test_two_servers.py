"""A run with two real vLLM servers: both are trained, each service runs on its cores, and a server that is killed comes
back.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_launcher.services.records import Records
from tests.integration.conftest import REPOSITORY
from tests.integration.test_launcher_drills import processes_of
from tests.serving import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

COMMAND = [sys.executable, "-m", "atropos_launcher"]
SHORT_STEPS = [
    *("--steps", "5000", "--trainer.batch_size", "2", "--trainer.gradient_accumulation_steps", "1"),
    *("--trainer.checkpoint_interval", "0", "--env.group_size", "2", "--env.max_new_tokens", "16"),
    *("--env.steps_per_eval", "0", "--env.eval_at_start", "false"),
]
CORES = sorted(os.sched_getaffinity(0))
START_S, BACK_S = 600.0, 600.0


class Run:
    """`atropos train RECIPE` with a tiny model, for thousands of steps."""

    def __init__(self, model: Path, runs: Path, recipe: str, *layout: str) -> None:
        self.folder = runs / f"{recipe}-{uuid.uuid4().hex[:8]}"
        words = [
            *("train", recipe, str(model), "--runs", str(runs), "--run-name", self.folder.name, *SHORT_STEPS),
            *("--api-port", str(free_port()), "--vllm-port", str(free_port()), *layout),
        ]
        self.output = runs / "output.txt"
        with self.output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [*COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                start_new_session=True,
                cwd=runs,
            )

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_until(self, holds: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            assert self.launcher.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.5)

    def command(self, *words: str, limit_s: float = 60.0) -> str:
        done = subprocess.run(
            [*COMMAND, *words],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=True,
        )
        return done.stdout

    def end(self) -> None:
        """Whatever became of the test."""
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        for pid in processes_of(self.folder.name):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def run(llama_folder: Path, tmp_path: Path) -> Iterator[Run]:
    first, last = CORES[0], CORES[-1]
    layout = (
        *("--layout.cores.vllm", f"[[{first}], [{last}]]" if first < last else "auto"),
        *("--layout.cores.trainer", f"[{last}]", "--layout.cores.environments", f"[{first}]"),
    )
    found = Run(llama_folder, tmp_path, "two_servers", *layout)
    yield found
    found.end()


def test_both_are_trained_and_one_that_is_killed_comes_back(run: Run) -> None:
    run.wait_until(lambda: len(run.rows()) > 0, START_S)
    assert run.rows()[0]["servers"] == 2

    pids = {name: record.pid for name, record in Records(run.folder).read().items()}
    assert {"api", "vllm-1", "vllm-2", "trainer", "env"} <= pids.keys()
    status = run.command("status", str(run.folder))
    assert all(f"  {name} " in status for name in ("vllm-1", "vllm-2"))
    assert status.count("healthy") == 4  # and the batching API and the page
    assert all((run.folder / f"{name}.log").stat().st_size for name in ("vllm-1", "vllm-2"))
    (start,) = json.loads((run.folder / "run.json").read_text())["starts"]
    urls = {start["services"][name]["url"] for name in ("vllm-1", "vllm-2")}
    assert len(urls) == 2

    first, last = CORES[0], CORES[-1]
    placed = {"vllm-1": {first}, "vllm-2": {last}} if first < last else {}
    for name, cores in (placed | {"trainer": {last}, "env": {first}, "api": {*CORES}}).items():
        assert os.sched_getaffinity(pids[name]) == cores, name
    sampled = [(run.folder / f"{name}.log").read_text().count("POST /") for name in ("vllm-1", "vllm-2")]
    assert min(sampled) > 0, sampled

    os.kill(pids["vllm-2"], signal.SIGKILL)
    run.wait_until(lambda: run.rows()[-1]["servers"] == 1, BACK_S)
    run.wait_until(lambda: run.rows()[-1]["servers"] == 2, BACK_S)
    said = run.output.read_text()
    assert f"vllm-2 (pid {pids['vllm-2']}) died: killed by signal KILL." in said
    assert "Restarted vllm-2 (pid " in said

    run.launcher.kill()
    run.launcher.wait()
    run.command("stop", str(run.folder))
    assert processes_of(run.folder.name) == []
