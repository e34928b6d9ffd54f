"""A real run with --deterministic: the same bytes when its environment is killed and with other cores, and the commands
that check it.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

FLAGS = ["--deterministic", "--steps", "2", "--seed", "3", "--no-view", "--trainer.checkpoint_interval", "1"]
SMALL = ["--env.eval_at_start", "false", "--env.heldout_size", "8", "--env.final_heldout_size", "0"]
DEADLINE_S = 900


def atropos(*words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "atropos_launcher", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(runs: Path, name: str, *flags: str) -> "subprocess.Popen[str]":
    return atropos("train", "arithmetic", *FLAGS, *SMALL, "--run-name", name, "--runs", str(runs), *flags)


def finished(process: "subprocess.Popen[str]", status: int = 0) -> str:
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, said[-3000:]
    return said


def kept(run: Path) -> dict[str, str]:
    """Digests: pytest's own comparison of so many bytes takes gigabytes."""
    files = ("checkpoints/final_model/model.safetensors", "trained.jsonl")
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in files}


def kill_environment(run: Path) -> None:
    """SIGKILL, while the second batch is sampled."""
    deadline = time.monotonic() + DEADLINE_S
    log = run / "trainer.log"
    while not log.is_file() or not re.search(r"Policy version 1 is served", log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # it has ended
            continue
        if str(run / "env.yaml") in words:
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError("no environment")


def test_a_killed_environment_and_another_number_of_cores_change_no_byte(tmp_path: Path) -> None:
    finished(train(tmp_path, "plain"))
    killed = train(tmp_path, "killed", "--trainer.threads", "1", "--trainer.micro_batch_tokens", "700")
    try:
        kill_environment(tmp_path / "killed")
        finished(killed)
    finally:
        killed.terminate()
    assert kept(tmp_path / "killed") == kept(tmp_path / "plain")

    runs = ["--runs", str(tmp_path)]
    assert "2 steps and" in finished(atropos("verify", "killed", *runs))
    assert "Step 2: equal" in finished(atropos("reproduce", "killed", "--step", "2", *runs))
    batches = tmp_path / "killed/batches.jsonl"
    batches.write_text(batches.read_text().replace('"scores":[0.0', '"scores":[1.0', 1))
    assert "step 1: a group in batches.jsonl was changed" in finished(atropos("verify", "killed", *runs), status=1)
