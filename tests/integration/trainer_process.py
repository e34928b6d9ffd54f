"""several_child.py as tests hold it: a trainer process that makes and syncs one version a call."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.conftest import API_KEY, REPOSITORY
from tests.integration.namespaces import entering, tied

CHILD = Path(__file__).with_name("several_child.py")
PARITY = 2e-5  # as in test_bridge.py
TIMEOUT_S = 12  # --bridge-timeout-s
DEADLINE_S = 3 * TIMEOUT_S + 30  # transfer, fence, what the workers say, and a slow machine


def parities(said: str) -> list[float]:
    """By how much vLLM's and the trainer's log-probabilities differed, at each probe that a trainer's log has."""
    return [float(value) for value in re.findall(r"log-probabilities differ by (\S+) nats", said)]


@dataclass
class TrainerProcess:
    """One running several_child.py."""

    process: subprocess.Popen[str]
    log: Path

    def sync(self) -> dict[str, Any]:
        """What one sync came to."""
        self.ask()
        return self.row()

    def ask(self) -> None:
        """Have it sync; `row` or `failure` waits for the result."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def row(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        row: dict[str, Any] = json.loads(line)
        return row

    def failure(self) -> str:
        """The last line of what it said when it failed, as it must within the deadline."""
        assert self.process.wait(DEADLINE_S) != 0
        return self.log.read_text().splitlines()[-1]

    def sync_with(self, servers: int) -> int:
        """Sync until that many servers take part; the version they serve."""
        give_up = time.monotonic() + DEADLINE_S
        while (row := self.sync())["servers"] != servers:
            assert time.monotonic() < give_up, self.log.read_text()[-3000:]
            time.sleep(0.5)
        assert row["parity"] <= PARITY
        return int(row["version"])


@contextlib.contextmanager
def trainer_process(
    model: str, folder: Path, *flags: str, namespace: str | None = None, **environment: str
) -> Iterator[TrainerProcess]:
    """Running and connected; at the end it is asked to leave, and killed if the test failed."""
    command = [
        sys.executable,
        str(CHILD),
        "--model",
        model,
        "--weight-bridge-mode",
        "shared_vllm",
        "--use-shared-memory",
    ]
    command += ["--bridge-timeout-s", str(TIMEOUT_S), "--bridge-lease-s", "6", "--bridge-bucket-mb", "1", *flags]
    log = folder / "trainer.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            entering(namespace, tied(command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "VLLM_API_KEY": API_KEY, "PYTHONPATH": str(REPOSITORY), **environment},
        )
    try:
        child = TrainerProcess(process, log)
        assert child.row() == {"version": 0}
        yield child
        if process.poll() is None:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
