"""`atropos train` continues when its only vLLM server is killed: it is started again and gets the current policy."""

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atropos_launcher.services.records import Records
from tests.client import http
from tests.integration.test_launcher_drills import COMMAND, SHORT_STEPS, VARIABLES, processes_of
from tests.serving import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
STEPS = 12


class Run:
    """A short run with a tiny model, whose vLLM the test kills."""

    def __init__(self, model: Path, runs: Path, kind: str) -> None:
        self.name = f"returns-{uuid.uuid4().hex[:8]}"
        self.folder = runs / self.name
        self.port = free_port()
        self._console = runs / "output.txt"
        words = ["train", "arithmetic", str(model), "--run-name", self.name, "--runs", str(runs), *SHORT_STEPS]
        words += [
            "--steps",
            str(STEPS),
            "--bridge",
            kind,
            "--vllm-port",
            str(self.port),
            "--api-port",
            str(free_port()),
        ]
        words += ["--bridge.lease_s", "9"]
        with self._console.open("wb") as output:
            self.launcher = subprocess.Popen(
                [*COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=VARIABLES,
                start_new_session=True,
                cwd=runs,
            )

    @property
    def output(self) -> str:
        return self._console.read_text(errors="replace")

    @property
    def rows(self) -> list[dict[str, float]]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def until(self, holds: Callable[[], bool], limit_s: float = 600.0) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            assert self.launcher.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def kill_vllm(self) -> int:
        pid = next(record.pid for record in Records(self.folder).services() if record.name == "vllm")
        os.kill(pid, signal.SIGKILL)
        return pid

    def end(self) -> None:
        if self.launcher.poll() is None:
            self.launcher.terminate()
            self.launcher.wait(60)
        for pid in processes_of(self.name):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(llama_folder: Path, tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    made: list[Run] = []

    def started(kind: str) -> Run:
        made.append(Run(llama_folder, tmp_path, kind))
        return made[-1]

    yield started
    for run in made:
        run.end()


@pytest.mark.parametrize("kind", ["broadcast", "reload", "lora"])
def test_a_killed_server_comes_back_with_the_current_policy_and_the_run_ends_well(
    start: Callable[[str], Run], kind: str
) -> None:
    run = start(kind)
    run.until(lambda: len(run.rows) >= 3)
    run.kill_vllm()
    at = len(run.rows)
    run.until(lambda: "Restarting vllm" in run.output, 60)

    def serves_current() -> bool:
        try:
            status = http.get(f"http://127.0.0.1:{run.port}/v1/bridge/status", timeout=5).json()
        except httpx.HTTPError:
            return False
        return bool(status["session"]) and status["policy_version"] >= at

    run.until(serves_current)
    assert run.launcher.wait(600) == 0, run.output
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    assert max(row["staleness_max"] for row in run.rows) <= 1, "sampled from the weights of the server's start"


def test_a_server_that_is_always_killed_ends_the_run_with_its_name(start: Callable[[str], Run]) -> None:
    run = start("broadcast")
    run.until(lambda: len(run.rows) >= 1)
    killed: set[int] = set()
    deadline = time.monotonic() + 400
    while run.launcher.poll() is None and time.monotonic() < deadline:
        pids = [record.pid for record in Records(run.folder).services() if record.name == "vllm"]
        for pid in set(pids) - killed:
            time.sleep(1)
            try:
                healthy = http.get(f"http://127.0.0.1:{run.port}/health", timeout=5).is_success
            except httpx.HTTPError:
                continue
            if healthy:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.5)
    assert run.launcher.wait(60) == 1, run.output
    assert len(killed) == 4
    assert re.search(r"vllm \(pid \d+\) died: killed by signal KILL\. Last lines of", run.output)


def test_a_single_copy_ends_with_its_server(start: Callable[[str], Run]) -> None:
    run = start("single_copy")
    run.until(lambda: len(run.rows) >= 2)
    run.kill_vllm()
    assert run.launcher.wait(300) == 1, run.output
    assert re.search(r"vllm \(pid \d+\) died: killed by signal KILL\. Last lines of", run.output)
