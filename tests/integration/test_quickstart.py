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
from dataclasses import dataclass
from pathlib import Path

import pytest

from atropos_launcher.services.records import Records
from tests.integration.conftest import REPOSITORY, left_in_shared_memory, session_members, shared_memory
from tests.integration.namespaces import tied
from tests.serving import free_port

pytestmark = pytest.mark.timeout(1000)  # setup and four services, on two cores

STEPS = 2
ROW_KEYS = set(
    "step policy_version reward_mean reward_std accuracy loss pg_loss kl entropy ratio_mean ratio_clipped_frac"
    " grad_norm lr completion_tokens staleness_mean step_s generate_s train_s sync_stall_s sync_transfer_s"
    " sync_apply_s".split()
)


@dataclass
class Finished:
    """A quickstart that ended by itself: its directory, its console, and the services that were seen alive."""

    folder: Path
    console: str
    pids: dict[str, int]


def start_quickstart(run_name: str, steps: int, console: Path) -> subprocess.Popen[bytes]:
    command = [str(REPOSITORY / "scripts" / "quickstart.sh"), "--steps", str(steps), "--run-name", run_name]
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port())]
    few_questions = ["--env.heldout_size", "16", "--env.final_heldout_size", "32"]
    command = tied([*command, "--dtype", "float32", *few_questions, *ports], "TERM")
    with console.open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def service_pids(run: Path) -> dict[str, int]:
    """Each service's pid, which is also its process group and session."""
    return {record.name: record.pid for record in Records(run).services()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    run_name = f"test-{uuid.uuid4().hex[:8]}"
    folder = REPOSITORY / "runs" / run_name
    console = tmp_path_factory.mktemp("quickstart") / "console.txt"
    process = start_quickstart(run_name, STEPS, console)
    pids: dict[str, int] = {}
    mapped: set[int] = set()
    deadline = time.monotonic() + 900
    while process.poll() is None:
        pids |= service_pids(folder)
        mapped |= shared_memory(pids["vllm"]) if "vllm" in pids else set()
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        time.sleep(1)
    assert process.returncode == 0, console.read_text()[-4000:]
    assert len(mapped) >= 2
    assert left_in_shared_memory(mapped) == []
    yield Finished(folder, console.read_text(), pids)
    shutil.rmtree(folder)


def test_one_row_a_step_with_every_promised_key(finished: Finished) -> None:
    rows = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(ROW_KEYS <= set(row) for row in rows)
    assert [row["policy_version"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["accuracy"] is not None
    assert 0 <= rows[-1]["accuracy"] <= 1
    assert all(row["sync_stall_s"] > 0 and row["completion_tokens"] > 0 for row in rows)
    assert rows[0]["staleness_mean"] == 0


def test_the_trainer_scores_tokens_as_the_sampler_did(finished: Finished) -> None:
    first = json.loads((finished.folder / "metrics.jsonl").read_text().splitlines()[0])
    # same weights on both sides, fp32: what remains is the order of sums
    assert first["logprob_diff_max"] < 1e-3
    assert abs(first["ratio_mean"] - 1) < 1e-4


def test_everything_promised_lies_in_the_run_folder(finished: Finished) -> None:
    run, output = finished.folder, finished.console
    for name in (
        "api.log",
        "env.log",
        "vllm.log",
        "trainer.log",
        "metrics.jsonl",
        "samples.jsonl",
        "evaluations.jsonl",
        "held_out.jsonl",
        "trainer.yaml",
        "env.yaml",
    ):
        assert (run / name).stat().st_size > 0, name
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list(run.glob("checkpoints/final_model/*.safetensors"))
    assert f"Step {STEPS}/{STEPS}" in output
    assert "Held-out accuracy" in output


def test_the_window_is_served_beside_the_run_and_named_for_later(finished: Finished) -> None:
    address = f"http://127\\.0\\.0\\.1:[0-9]+/#/run/{finished.folder.name}"
    assert re.search(rf"Watch it in a browser: {address}\n", finished.console)
    assert "http://127.0.0.1:" in (finished.folder / "view.log").read_text()
    assert "view died" not in finished.console
    assert f" view {finished.folder.name} " in finished.console


def test_samples_carry_what_was_sampled(finished: Finished) -> None:
    groups = [json.loads(line) for line in (finished.folder / "samples.jsonl").read_text().splitlines()]
    assert len(groups) >= STEPS * 16
    whole = [group for group in groups if group["dropped"] is None]
    assert all(len(group["scores"]) == 4 and group["policy_versions"] for group in whole)


def test_no_service_outlives_the_run(finished: Finished) -> None:
    assert set(finished.pids) == {"api", "vllm", "env", "trainer", "view"}
    assert all(session_members(pid) == [] for pid in finished.pids.values())


def test_troubleshooting_commands_work_in_the_run_folder(finished: Finished) -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    commands = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(commands) >= 8
    for command in commands:
        where = REPOSITORY if command.startswith("scripts/") else finished.folder
        done = subprocess.run(["bash", "-c", command], cwd=where, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout.strip(), (command, done.stderr)


@pytest.mark.rotating
@pytest.mark.parametrize("victim", ["trainer", "vllm"])
def test_a_dying_service_ends_the_others_within_ten_seconds_and_is_named(victim: str, tmp_path: Path) -> None:
    run_name = f"test-{uuid.uuid4().hex[:8]}"
    run = REPOSITORY / "runs" / run_name
    process = start_quickstart(run_name, 1, tmp_path / "console.txt")
    deadline = time.monotonic() + 120
    log = run / f"{victim}.log"
    while not (log.exists() and log.stat().st_size > 0):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    pids = service_pids(run)
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    process.wait(30)
    assert time.monotonic() - killed < 12  # 10 s and the time to notice
    output = (tmp_path / "console.txt").read_text()
    assert process.returncode != 0, output[-2000:]
    assert re.search(rf"{victim} \(pid \d+\) died", output), output[-2000:]
    assert all(session_members(pid) == [] for pid in pids.values())
    shutil.rmtree(run)
