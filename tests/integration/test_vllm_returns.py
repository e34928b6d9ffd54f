"""`atropos train` continues when its only vLLM server is killed: it is started again and gets the current policy."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atropos_launcher.services.records import Records
from tests.client import http
from tests.integration.launched import Run

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
STEPS = 12
START_S = 600.0
SHORT = ["--steps", str(STEPS), "--trainer.checkpoint_interval", "1", "--bridge.lease_s", "9"]


class Returning(Run):
    """A short run whose vLLM the test kills."""

    def kill_vllm(self) -> int:
        pid = next(record.pid for record in Records(self.folder).services() if record.name == "vllm")
        os.kill(pid, signal.SIGKILL)
        return pid


@pytest.fixture
def start(llama_folder: Path, tmp_path: Path) -> Iterator[Callable[[str], Returning]]:
    made: list[Returning] = []

    def started(kind: str) -> Returning:
        made.append(Returning(llama_folder, tmp_path, "arithmetic", *SHORT, "--bridge", kind))
        return made[-1]

    yield started
    for run in made:
        run.end()


@pytest.mark.parametrize("kind", ["broadcast", "reload", "lora"])
def test_a_killed_server_comes_back_with_the_current_policy_and_the_run_ends_well(
    start: Callable[[str], Returning], kind: str
) -> None:
    run = start(kind)
    run.wait_until(lambda: len(run.rows()) >= 3, START_S)
    run.kill_vllm()
    at = len(run.rows())
    run.wait_until(lambda: "Restarting vllm" in run.output, 60)

    def serves_current() -> bool:
        try:
            status = http.get(f"http://127.0.0.1:{run.vllm_port}/v1/bridge/status", timeout=5).json()
        except httpx.HTTPError:
            return False
        return bool(status["session"]) and status["policy_version"] >= at

    run.wait_until(serves_current, START_S)
    assert run.launcher.wait(600) == 0, run.output
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    assert max(row["staleness_max"] for row in run.rows()) <= 1, "sampled from the weights of the server's start"


def test_a_server_that_is_always_killed_ends_the_run_with_its_name(start: Callable[[str], Returning]) -> None:
    run = start("broadcast")
    run.wait_until(lambda: len(run.rows()) >= 1, START_S)
    killed: set[int] = set()
    deadline = time.monotonic() + 400
    while run.launcher.poll() is None and time.monotonic() < deadline:
        pids = [record.pid for record in Records(run.folder).services() if record.name == "vllm"]
        for pid in set(pids) - killed:
            time.sleep(1)
            try:
                healthy = http.get(f"http://127.0.0.1:{run.vllm_port}/health", timeout=5).is_success
            except httpx.HTTPError:
                continue
            if healthy:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.5)
    assert run.launcher.wait(60) == 1, run.output
    assert len(killed) == 4
    assert re.search(r"vllm \(pid \d+\) died: killed by signal KILL\. Last lines of", run.output)


def test_a_single_copy_ends_with_its_server(start: Callable[[str], Returning]) -> None:
    run = start("single_copy")
    run.wait_until(lambda: len(run.rows()) >= 2, START_S)
    run.kill_vllm()
    assert run.launcher.wait(300) == 1, run.output
    assert re.search(r"vllm \(pid \d+\) died: killed by signal KILL\. Last lines of", run.output)
