"""A real run whose launcher is killed, or told to end, at random moments: nothing of it is left.

The moments are drawn from a seed, between the first line of the launcher and some time into training. A process
belongs to a run if its environment variables say so: all descendants of a service do.
"""

import math
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atroposlib.processes.shared_memory import mapped_shared_memory
from tests.client import http
from tests.integration.conftest import left_in_shared_memory
from tests.integration.launched import COMMAND, VARIABLES, Run, launch, processes_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

LATEST_S = 90.0  # training continues by then, on two idle cores
END_S = 12.0  # a run has 7 s to end, and Python some to exit
STOP_S = 30.0


class Drill(Run):
    """A run of thousand steps, and the shared memory that it has mapped."""

    def __init__(self, model: Path, runs: Path) -> None:
        self.mapped: set[int] = set()
        super().__init__(model, runs, "arithmetic", "--steps", "1000", "--trainer.checkpoint_interval", "1")

    def begins(self) -> None:
        """Return when its first line is there."""
        self._look_until(lambda: bool(self.output), 60.0)

    def goes_on(self, seconds: float) -> None:
        """Let it run so long, and note what it maps."""
        end = time.monotonic() + seconds
        self._look_until(lambda: time.monotonic() > end, seconds + 1)

    def is_at(self, text: str) -> None:
        """Return when it has printed that."""
        self._look_until(lambda: text in self.output, 200.0)

    def _look_until(self, holds: Callable[[], bool], limit_s: float) -> None:
        def looked() -> bool:
            self.mapped |= mapped_shared_memory(processes_of(self.name))
            return holds()

        self.wait_until(looked, limit_s)

    def assert_nothing_is_left(self) -> None:
        assert processes_of(self.name) == [], self.output
        assert not (self.folder / "pids").exists()
        assert left_in_shared_memory(self.mapped) == []
        for port in (self.api_port, self.vllm_port):
            with pytest.raises(httpx.TransportError):
                http.get(f"http://127.0.0.1:{port}/health", timeout=5)


@pytest.fixture
def drill(llama_folder: Path, tmp_path: Path) -> Iterator[Drill]:
    found = Drill(llama_folder, tmp_path)
    yield found
    found.end()


def moment(seed: int) -> float:
    """Seconds, early ones as often as late ones are long."""
    return math.pow(LATEST_S, random.Random(seed).random()) - 1.0


@pytest.mark.parametrize("seed", range(8))
def test_what_a_killed_launcher_leaves_is_ended_by_stop_and_nothing_else_is(seed: int, drill: Drill) -> None:
    bystander = subprocess.Popen(["sleep", "300"], start_new_session=True)
    drill.begins()
    drill.goes_on(moment(seed))
    drill.launcher.kill()
    drill.launcher.wait()
    if random.Random(seed + 100).random() < 0.5:  # the services have had the kernel's TERM meanwhile
        time.sleep(3)
    stopped = launch("stop", "--runs", str(drill.runs), cwd=drill.runs, timeout_s=STOP_S)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    drill.assert_nothing_is_left()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


@pytest.mark.parametrize(("seed", "number"), [(seed, signal.SIGTERM) for seed in range(8)] + [(8, signal.SIGINT)])
def test_a_launcher_that_is_told_to_end_ends_all_within_its_limit(seed: int, number: int, drill: Drill) -> None:
    drill.begins()
    drill.goes_on(moment(seed))
    asked = time.monotonic()
    drill.launcher.send_signal(number)
    status = drill.launcher.wait(END_S)
    took_s = time.monotonic() - asked
    assert status == 128 + number, drill.output
    assert took_s < END_S
    drill.assert_nothing_is_left()


def test_a_second_start_ends_what_a_killed_launcher_left(drill: Drill) -> None:
    drill.begins()
    drill.is_at("Step 2/1000")
    drill.launcher.kill()
    drill.launcher.wait()
    resumed = subprocess.Popen(
        [*COMMAND, "train", "--resume", drill.name, "--runs", str(drill.runs)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=VARIABLES,
        start_new_session=True,
    )
    lines = []
    assert resumed.stdout is not None
    for line in resumed.stdout:
        lines.append(line)
        if "trainer Step " in line:
            break
    resumed.send_signal(signal.SIGTERM)
    rest, _ = resumed.communicate(timeout=END_S)
    assert resumed.returncode == 128 + signal.SIGTERM, "".join(lines) + rest
    assert "trainer Step " in lines[-1]
    assert "Step 1/1000" not in lines[-1]
    drill.assert_nothing_is_left()
