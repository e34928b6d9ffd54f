"""The GPU check says when there is nothing to check, and reports a check that fails as failed."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from atropos_launcher.checks.gpu_rows import Check
from atropos_launcher.commands import gpu_check as command
from tests.unit.launcher.commands.test_doctor import write_model

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
def test_a_failing_check_is_in_the_table_the_status_and_the_record(tmp_path: Path) -> None:
    # one GPU of 1 MiB, beside a PyTorch for CPUs or a model that is larger: the doctor must fail
    smi = fake_driver(tmp_path, "GPU 0: Tiny\n0, GPU-1, Tiny, 1")
    (model := tmp_path / "model").mkdir()
    folder = tmp_path / "out"
    words = ["--rows", "doctor", "--runs", str(tmp_path), "--out", str(folder), "--skip-passed"]
    words += ["--model", str(write_model(model, tied=True))]
    done = gpu_check(*words, XDG_CACHE_HOME=str(tmp_path), HF_HUB_OFFLINE="1", **smi)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| doctor | FAILED, status 1 |" in (folder / "table.md").read_text()
    assert "GPU memory" in (folder / "doctor.log").read_text()
    assert not (tmp_path / "atropos").exists()  # a part of the checks proves nothing of the rest


def test_a_check_that_takes_too_long_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LIMIT_S", 2)
    endless = Check(0, "endless", ("--bind", "127.0.0.1", "0"), module="http.server")
    log, before = tmp_path / "endless.log", psutil.Process().children(recursive=True)
    log.write_text("of an earlier call")
    status, nbytes = command.run(endless, command.Place((), tmp_path, tmp_path), log)
    assert status == 124
    assert nbytes > 1_000_000
    assert "earlier" not in log.read_text()
    assert psutil.Process().children(recursive=True) == before


def test_every_check_is_listed_with_its_gpus_and_command() -> None:
    done = gpu_check("--list")
    rows = [[column.strip() for column in line.split(" | ")] for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert len(rows) >= 20
    assert all(int(gpus) in (1, 2, 3) and ("atropos " in row or "python -m " in row) for gpus, _, row in rows)
    assert any("CUDA_VISIBLE_DEVICES=0,1 atropos train gsm8k_broadcast MODEL" in row for *_, row in rows)


def test_rows_are_listed_by_name() -> None:
    done = gpu_check("--list", "--rows", "doctor,killed")
    assert [line.split(" | ")[1] for line in done.stdout.splitlines()] == [
        "doctor",
        "trainer killed in mid-transfer, Gloo",
        "trainer killed in mid-transfer, NCCL",
    ]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--rows", "doctor,nonsense"), "--rows doctor,nonsense: no check is named 'nonsense'"),
        (("--only", "nonsense"), "--only nonsense: no check's name contains it"),
        (("--skip-passed",), "--skip-passed needs --out DIR"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_runs_nothing(flags: tuple[str, ...], why: str, tmp_path: Path) -> None:
    done = gpu_check(*flags, "--runs", str(tmp_path), **fake_driver(tmp_path, "GPU 0: Tiny\n0, GPU-1, Tiny, 1"))
    assert done.returncode == 2
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not [*tmp_path.glob("gpu-check-*")]
