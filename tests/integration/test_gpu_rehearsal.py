"""`atropos gpu-check --rehearse` on a real vLLM: the rows pass on a CPU, and a fault that is planted in vLLM's workers
fails them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import REPOSITORY
from tests.integration.namespaces import tied

FAULT = """
import torch
from vllm_patching.memory.arena import Arena

def plant():
    commit = Arena.commit

    def commit_with_one_bit_flipped(arena, staging):
        took = commit(arena, staging)
        parameter = list(arena._parameters.values())[-1].data.view(-1)
        parameter[:1].view(torch.int32).bitwise_xor_(1)
        return took

    Arena.commit = commit_with_one_bit_flipped
"""


def rehearse(only: str, model: Path, runs: Path, plugins: Path | None = None) -> tuple[int, dict[str, list[str]]]:
    """Exit status, and the cells of the table by row."""
    path = os.pathsep.join([str(REPOSITORY), *([str(plugins)] if plugins else [])])
    words = ["gpu-check", "--rehearse", "--only", only, "--model", str(model), "--runs", str(runs)]
    words += ["--out", str(runs / "out")]
    done = subprocess.run(
        tied([sys.executable, "-m", "atropos_launcher", *words], "TERM"),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=3500,
        check=False,
        cwd=runs,
    )
    table = runs / "out/table.md"
    rows = [line[2:-2].split(" | ") for line in table.read_text().splitlines() if line.startswith("|")]
    assert table.read_text() in done.stdout, done.stderr[-2000:]
    return done.returncode, {name: cells for name, *cells in rows[2:]}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_killed_trainer_is_rehearsed_with_time_memory_and_digest(llama_folder: Path, tmp_path: Path) -> None:
    status, rows = rehearse("killed", llama_folder, tmp_path)
    logs = "\n".join(log.read_text()[-3000:] for log in tmp_path.glob("out/*.log"))
    assert status == 0, logs
    ((came, took, peak, digest, last),) = rows.values()
    assert (came, digest) == ("passed", "equal")
    assert int(took.removesuffix(" s")) > 0
    assert 0.3 < float(peak.removesuffix(" GB")) < 10
    assert last.startswith("Drill: answered ")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_one_flipped_bit_fails_the_row(llama_folder: Path, tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    info = plugins / "fault-1.0.dist-info"
    info.mkdir(parents=True)
    (plugins / "fault.py").write_text(FAULT)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = fault:plant\n")
    status, rows = rehearse("killed", llama_folder, tmp_path, plugins)
    ((came, *_, digest, _last),) = rows.values()
    assert (status, came, digest) == (1, "FAILED, status 1", "differs")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_row_passes_on_a_cpu(llama_folder: Path, tmp_path: Path) -> None:
    status, rows = rehearse("", llama_folder, tmp_path)
    assert {name: cells[0] for name, cells in rows.items()} == dict.fromkeys(rows, "passed")
    assert status == 0
    assert len(rows) == 16
    assert [name for name, cells in rows.items() if cells[3] == ""] == [
        "doctor",
        "LoRA adapters",
        "LoRA adapters, restart",
        "restart",
        "bit-exact, trainer against sampler",
        "LoRA adapters, tensor parallel 2",
    ]
