"""benchmarks/gpu/stages.py --rehearse on a CPU: real servers and trainings with a tiny model, and what comes back."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import REPOSITORY
from tests.integration.namespaces import tied

Row = dict[str, Any]


def rehearse(folder: Path, *words: str) -> tuple[int, str, dict[str, Row]]:
    """Exit status, output, and the last row of each stage."""
    own = {"WORK": str(folder / "work"), "OUT": str(folder / "out"), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        tied([sys.executable, str(REPOSITORY / "benchmarks/gpu/stages.py"), "--rehearse", *words], "TERM"),
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
        check=False,
        cwd=folder,
    )
    lines = (folder / "out/results.jsonl").read_text().splitlines()
    assert (folder / "out/table.md").read_text() in done.stdout
    return done.returncode, done.stdout, {row["stage"]: row for row in map(json.loads, lines)}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_stages_of_first_light_pass_on_a_cpu(tmp_path: Path) -> None:
    words = ("environment", "kernels", "doctor", "single copy", "broadcast", "trainer 0.6B")
    status, said, rows = rehearse(tmp_path, "--budget", "1700", "--spent", "0", *words)
    assert status == 0, said
    assert [*rows] == [
        "environment",
        "kernels",
        "single copy",
        "broadcast",
        "trainer 0.6B",
        "doctor",
        "broadcast at 1.7B",
    ]
    found = {name: row["result"] for name, row in rows.items()}
    assert found["environment"]["found"][0]["packages"]["torch"]
    assert [each["experiment"] for each in found["kernels"]["found"]] == ["libraries"]
    for name, versions in (("single copy", [1, 2, 3]), ("broadcast", [1, 2, 3, 4])):
        assert [row["policy_version"] for row in found[name]["rows"]] == versions
        assert any("every word" in line for line in found[name]["digest"])
        assert found[name]["planned_gb"]
    assert found["single copy"]["rows"][-1]["sync_bytes"] == 0 < found["broadcast"]["rows"][-1]["sync_bytes"]
    speeds = found["trainer 0.6B"]["found"]
    assert [each["variant"] for each in speeds][1:] == [{}, {"share_prefixes": False}]
    assert all(each["tokens_per_s"] > 0 for each in speeds)
    table = (tmp_path / "out/table.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == ["passed"] * len(rows)
    with tarfile.open(tmp_path / "out/logs.tar.gz") as archive:
        names = archive.getnames()
    assert {"environment.log", "doctor.log", "gsm8k_broadcast-0.6B.trainer.log"} <= set(names)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_failed_stage_has_status_1_and_one_that_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    model = tmp_path / "work/models/tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    status, said, rows = rehearse(tmp_path, "--budget", "120", "environment", "trainer 0.6B", "single copy")
    assert status == 1
    assert {name: row["passed"] for name, row in rows.items()} == {"environment": True, "trainer 0.6B": False}
    assert "single copy: not begun, " in said
    assert "| trainer 0.6B | FAILED: status 1: " in (tmp_path / "out/table.md").read_text()
