"""benchmarks/exactness_factorial.py: arms differ in one thing, and the tests are those that its page names."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exactness_factorial import (
    SEEDS,
    Cell,
    Factorial,
    best_rate,
    cells,
    difference,
    finished,
    flags_of,
    read_finished,
    report,
)
from benchmarks.shared.finished_runs import KEPT, keep
from example_trainer.errors import TrainerError
from tests.unit.launcher.plans import no_processes, plan  # noqa: F401  a fixture

# the settings in which plain and exact differ
WAY_OF_COMPUTING = {"kernels", "- --batch-invariant", "batch_invariant", "bit_exact"}


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.exactness_factorial.commit", lambda: "abc")


def test_every_cell_is_there_once_and_seeds_are_whole() -> None:
    found = list(cells(SEEDS))
    assert len(found) == len(set(found)) == 72
    assert all(cell.seed == 1 for cell in found[:12])


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_arms_differ_in_the_forward_pass_alone(tmp_path: Path, dtype: Any) -> None:
    files = {}
    for arm in ("plain", "exact"):
        planned = plan(*flags_of(Cell(dtype, arm, "4e-5", 3))[1:], "--runs", str(tmp_path))
        files[arm] = "\n".join(planned.files.values())
        words = {service.name: " ".join(service.command) for service in planned.services}
        assert f"--dtype {dtype}" in words["vllm"]
    plain, exact = (set(files[arm].splitlines()) for arm in ("plain", "exact"))
    assert {line.strip().partition(":")[0] for line in plain ^ exact} == WAY_OF_COMPUTING
    for line in ("  updates_per_batch: 4", "  lr_decay_steps: 0", "  steps_per_eval: 2"):
        assert any(line.strip() in each for each in plain & exact), line


def test_the_permutation_test_counts_all_ways_to_name_the_arms() -> None:
    apart = difference([90, 91, 92, 93, 94, 95], [80, 81, 82, 83, 84, 85])
    assert (apart.points, apart.p) == (10.0, 2 / 924)
    assert 7 < apart.low < 9 < 11 < apart.high < 13
    assert difference([1, 2, 3], [1, 2, 3]).p == 1.0
    assert difference([3, 4], [1, 2]).p == 2 / 6


def write_run(folder: Path, cell: Cell, accuracies: list[float | None], nats: float) -> Path:
    row: dict[str, Any] = dict.fromkeys(KEPT) | {"logprob_diff_mean": nats / 2, "logprob_diff_max": nats}
    run = folder / str(cell)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in (1, 2)))
    lines = [{"policy_version": 2 * nth, "accuracy": accuracy} for nth, accuracy in enumerate(accuracies)]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize(
    ("arm", "accuracies", "nats", "says"),
    [
        ("plain", [0.1, 0.2, 0.3, 0.4, 0.5], 1e-6, r"policy versions \[10\] have no held-out accuracy"),
        ("plain", [0.1, 0.2, None, 0.4, 0.5, 0.6], 1e-6, r"policy versions \[4\]"),
        ("plain", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 0.0, "is 0.0 nats in arm plain"),
        ("exact", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 1e-6, "is 1e-06 nats in arm exact"),
    ],
)
def test_a_run_without_its_figures_or_of_another_arm_is_an_error(
    tmp_path: Path, arm: Any, accuracies: list[float | None], nats: float, says: str
) -> None:
    cell = Cell("bfloat16", arm, "2e-5", 1)
    with pytest.raises(TrainerError, match=says):
        finished(write_run(tmp_path, cell, accuracies, nats), cell, [])


def test_the_report_compares_what_its_page_says(tmp_path: Path) -> None:
    """In bfloat16, exact is 10 points better; plain's best rate by the seeds that choose is another than exact's."""
    for cell in cells(SEEDS):
        points = cell.seed + 10 * (cell.arm == "exact" and cell.dtype == "bfloat16")
        points += 5 * (cell.rate == {"plain": "2e-5", "exact": "6e-5"}[cell.arm])
        folder = write_run(tmp_path / "runs", cell, [0.5, *[points / 100] * 5], 0.0 if cell.arm == "exact" else 1e-2)
        keep(tmp_path / "rows" / f"{cell}.json", finished(folder, cell, flags_of(cell)))
    runs = read_finished(tmp_path / "rows")
    assert (best_rate(runs, "bfloat16", "plain"), best_rate(runs, "bfloat16", "exact")) == ("2e-5", "6e-5")
    shown = report(runs)
    assert "72 of 72 runs" in shown
    assert "bfloat16, all rates, exact minus plain: +10.0 points" in shown
    assert "p 0.002" in shown
    assert "float32, all rates, exact minus plain: +0.0 points" in shown
    assert "exact at 6e-5, plain at 2e-5 (seeds (1, 2, 3)), on the other seeds: +10.0 points" in shown
    (tmp_path / "rows" / "float32-plain-2e-5-1.json").write_text("{")
    with pytest.raises(TrainerError, match=r"float32-plain-2e-5-1\.json is damaged"):
        read_finished(Factorial(rows=tmp_path / "rows").rows)
