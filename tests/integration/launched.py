"""`atropos` as a process of its own: one command, or a training run of a tiny model that goes on beside its test."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atroposlib.logs import RUN
from tests.integration.conftest import REPOSITORY
from tests.serving import free_port

END_S = 15.0
COMMAND = [sys.executable, "-m", "atropos_launcher"]
VARIABLES = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
SHORT_STEPS = [
    *("--trainer.batch_size", "2", "--trainer.gradient_accumulation_steps", "1"),
    *("--env.group_size", "2", "--env.max_new_tokens", "16"),
]


def launch(*words: str, cwd: Path, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """`atropos WORDS`, which has ended."""
    return subprocess.run(
        [*COMMAND, *words],
        env=VARIABLES,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=cwd,
    )


def processes_of(run: str) -> list[int]:
    """Living processes whose environment names the run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # gone, or not ours
            continue
        if f"{RUN}={run}".encode() in variables and state not in "ZX":
            found.append(int(folder.name))
    return found


class Run:
    """`atropos train RECIPE MODEL WORDS` with short steps, below `runs`."""

    def __init__(self, model: Path, runs: Path, recipe: str, *words: str) -> None:
        self.runs = runs
        self.name = f"{recipe}-{uuid.uuid4().hex[:8]}"
        self.folder = runs / self.name
        self.api_port, self.vllm_port = free_port(), free_port()
        named = ["train", recipe, str(model), "--runs", str(runs), "--run-name", self.name, *SHORT_STEPS, *words]
        ports = ["--api-port", str(self.api_port), "--vllm-port", str(self.vllm_port)]
        self._console = runs / "output.txt"
        with self._console.open("wb") as console:
            self.launcher = subprocess.Popen(
                [*COMMAND, *named, *ports],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=VARIABLES,
                start_new_session=True,
                cwd=runs,
            )

    @property
    def output(self) -> str:
        return self._console.read_text(errors="replace")

    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, so far."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_until(self, holds: Callable[[], bool], limit_s: float) -> None:
        """While the launcher lives."""
        deadline = time.monotonic() + limit_s
        while not holds():
            assert self.launcher.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def end(self) -> None:
        """Whatever became of the test."""
        if self.launcher.poll() is None:
            self.launcher.terminate()  # its services end in turn, and leave no shared memory
            try:
                self.launcher.wait(END_S)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()
        for pid in processes_of(self.name):
            os.kill(pid, signal.SIGKILL)
