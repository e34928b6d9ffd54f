"""benchmarks/dynamic_sampling.py reads runs right, and its flags are ones that launcher and environment take."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dynamic_sampling import ARMS, Run, flags, learning_curve, mean_accuracy, minutes_to, read_run, table
from tests.unit.launcher.plans import no_processes, plan  # noqa: F401  a fixture


def evaluation(version: int, time: float, accuracy: float) -> dict[str, Any]:
    return {"policy_version": version, "time": 1000.0 + time, "seconds": 6.0, "accuracy": accuracy}


def test_minutes_are_those_without_evaluations() -> None:
    rows = [evaluation(0, 0, 0.1), evaluation(5, 66, 0.5), evaluation(10, 132, 0.9)]
    assert learning_curve(rows[::-1]) == [(0.0, 0.1), (1.0, 0.5), (2.0, 0.9)]


def test_figures_of_a_curve_are_by_straight_lines() -> None:
    curve = [(0.0, 0.0), (1.0, 0.8), (3.0, 1.0)]
    assert minutes_to(curve, 0.9) == pytest.approx(2.0)
    assert minutes_to(curve[:2], 0.9) is None
    assert mean_accuracy(curve, 1.0) == pytest.approx(0.4)
    assert mean_accuracy(curve, 2.0) == pytest.approx((0.4 + 0.85) / 2)


def test_a_runs_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "with-2"
    folder.mkdir()
    rows: dict[str, list[dict[str, Any]]] = {
        "metrics": [
            {"groups": 8, "zero_variance_groups": 3, "loss": 0.1},
            {"groups": 8, "zero_variance_groups": 8, "loss": None},
        ],
        "environment": [{"gsm8k_0_train/groups_thrown_away": 2}, {"gsm8k_0_train/groups_thrown_away": 5}],
        "evaluations": [evaluation(0, 0, 0.1), evaluation(2, 66, 0.9)],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run == Run("with", 2, [(0.0, 0.1), (1.0, 0.9)], updates=1, sampled=21, without_signal=16, thrown_away=5)
    assert "| with, seed 2 | 1.00 | 90.0% | 1.00 | 50.0% | 1 | 21 | 16 | 5 |" in table([run])
    assert "| **with, median** | 1.00 | 90.0% | 1.00 |" in table([run])


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("arm", ARMS)
def test_the_flags_reach_the_environment(tmp_path: Path, arm: str) -> None:
    planned = plan(*flags(arm, 1, 20, 24, tmp_path))
    (environment,) = [service.command for service in planned.services if service.name in planned.environments]
    words = " ".join([*environment, *planned.files.values()])
    assert ("max_items_per_batch: 24" in words or "max_items_per_batch 24" in words) is (arm == "with")
    assert str(tmp_path / f"{arm}-1" / "environment.jsonl") in words
