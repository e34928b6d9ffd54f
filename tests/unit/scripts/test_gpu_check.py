"""The GPU check says when there is nothing to check, and reports a check that fails as failed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[3]


def gpu_check(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/gpu_check.sh", *flags],
        env={**os.environ, "ATROPOS_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fake_driver(folder: Path, lines: str) -> dict[str, str]:
    """A PATH on which nvidia-smi prints `lines`."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_machine_without_a_gpu_is_told_so_with_status_2(tmp_path: Path) -> None:
    done = gpu_check(**fake_driver(tmp_path, ""))
    assert done.returncode == 2
    assert "no GPU on this machine" in done.stderr
    assert "nothing was checked" in done.stderr


@pytest.mark.slow
def test_a_failing_check_is_in_the_table_and_the_status(tmp_path: Path) -> None:
    before = set((ROOT / "runs").glob("*"))
    # one GPU of 1 MiB, beside a PyTorch for CPUs or a model that is larger: the doctor must fail
    done = gpu_check("--only", "doctor", **fake_driver(tmp_path, "GPU 0: Tiny\n0, GPU-1, Tiny, 1"))
    (folder,) = set((ROOT / "runs").glob("gpu-check-*")) - before
    try:
        assert done.returncode == 1, done.stdout + done.stderr
        assert "| doctor | FAILED, status 1 |" in (folder / "table.md").read_text()
        assert "GPU memory" in (folder / "doctor.log").read_text()
    finally:
        shutil.rmtree(folder)


def test_every_check_is_listed_with_its_gpus_and_command() -> None:
    done = gpu_check("--list")
    rows = [[column.strip() for column in line.split(" | ")] for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert len(rows) >= 9
    assert all(int(gpus) in (1, 2) and ("atropos " in command or "pytest" in command) for gpus, _, command in rows)
