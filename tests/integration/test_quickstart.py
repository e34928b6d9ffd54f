"""The README's first command, as a user types it: two steps, every service a process of its own, on real vLLM."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import REPOSITORY, free_port
from tests.integration.test_server_death import session_members

STEPS = 2
ROW_KEYS = set(
    "step policy_version reward_mean reward_std accuracy loss pg_loss kl entropy ratio_mean ratio_clipped_frac grad_norm lr "
    "completion_tokens staleness_mean step_s generate_s train_s sync_stall_s sync_transfer_s sync_apply_s".split()
)


def start_quickstart(run_name: str, steps: int) -> subprocess.Popen[str]:
    command = [str(REPOSITORY / "scripts" / "quickstart.sh"), "--steps", str(steps), "--run-name", run_name]
    command += ["--api-port", str(free_port()), "--vllm-port", str(free_port())]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def service_pids(run: Path) -> dict[str, int]:
    """Each service's pid, which is also its process group and session."""
    records = {file.name: re.search(r"^pid=(\d+)$", file.read_text(), re.MULTILINE) for file in (run / "pids").glob("*")}
    return {name: int(match[1]) for name, match in records.items() if match and name != "launcher"}


@pytest.fixture(scope="module")
def finished_run() -> Iterator[tuple[Path, str]]:
    run_name = f"test-{uuid.uuid4().hex[:8]}"
    run = REPOSITORY / "runs" / run_name
    shared_memory = set(os.listdir("/dev/shm"))
    process = start_quickstart(run_name, STEPS)
    try:
        output, _ = process.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output[-4000:]
    assert set(os.listdir("/dev/shm")) - shared_memory == set()
    yield run, output
    shutil.rmtree(run)


def test_one_row_a_step_with_every_promised_key(finished_run: tuple[Path, str]) -> None:
    rows = [json.loads(line) for line in (finished_run[0] / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(ROW_KEYS <= set(row) for row in rows)
    assert [row["policy_version"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["accuracy"] is not None and 0 <= rows[-1]["accuracy"] <= 1
    assert all(row["sync_stall_s"] > 0 and row["completion_tokens"] > 0 for row in rows)
    assert rows[0]["staleness_mean"] == 0


def test_the_trainer_scores_tokens_as_the_sampler_did(finished_run: tuple[Path, str]) -> None:
    first = json.loads((finished_run[0] / "metrics.jsonl").read_text().splitlines()[0])
    # same weights on both sides, fp32: what remains is the order of sums
    assert first["logprob_diff_max"] < 1e-3 and abs(first["ratio_mean"] - 1) < 1e-4


def test_everything_promised_lies_in_the_run_folder(finished_run: tuple[Path, str]) -> None:
    run, output = finished_run
    for name in (
        "api.log",
        "env.log",
        "vllm.log",
        "trainer.log",
        "metrics.jsonl",
        "samples.jsonl",
        "evaluations.jsonl",
        "trainer.yaml",
        "env.yaml",
    ):
        assert (run / name).stat().st_size > 0, name
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list(run.glob("checkpoints/final_model/*.safetensors"))
    assert f"Step {STEPS}/{STEPS}" in output and "Held-out accuracy" in output


def test_samples_carry_what_was_sampled(finished_run: tuple[Path, str]) -> None:
    groups = [json.loads(line) for line in (finished_run[0] / "samples.jsonl").read_text().splitlines()]
    assert len(groups) >= STEPS * 8
    assert all(len(group["scores"]) == 8 and group["policy_versions"] for group in groups)


def test_no_service_outlives_the_run(finished_run: tuple[Path, str]) -> None:
    for pid in service_pids(finished_run[0]).values():
        assert session_members(pid) == []


def test_troubleshooting_commands_work_in_the_run_folder(finished_run: tuple[Path, str]) -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    commands = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(commands) >= 8
    for command in commands:
        where = REPOSITORY if command.startswith("scripts/") else finished_run[0]
        done = subprocess.run(["bash", "-c", command], cwd=where, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.strip(), (command, done.stderr)


@pytest.mark.parametrize("victim", ["trainer", "vllm"])
def test_a_dying_service_ends_the_others_within_ten_seconds_and_is_named(victim: str) -> None:
    run_name = f"test-{uuid.uuid4().hex[:8]}"
    run = REPOSITORY / "runs" / run_name
    process = start_quickstart(run_name, 1)
    deadline = time.monotonic() + 120
    log = run / f"{victim}.log"
    while not (log.exists() and log.stat().st_size > 0):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    pids = service_pids(run)
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - killed < 12  # 10 s and the time to notice
    assert process.returncode != 0 and re.search(rf"{victim} \(pid \d+\) died", output), output[-2000:]
    assert all(session_members(pid) == [] for pid in pids.values())
    shutil.rmtree(run)
