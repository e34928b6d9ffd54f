"""benchmarks/exactness_experiment.py: its flags reach the services, and tables compare only what may be compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exactness_experiment import ARMS, SETTINGS, Arm, Experiment, finished, flags_of, tables
from benchmarks.shared.finished_runs import KEPT, keep
from example_trainer.errors import TrainerError
from tests.unit.launcher.plans import no_processes, plan  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.exactness_experiment.commit", lambda: "abc")


def write_run(folder: Path, difference: float) -> None:
    row: dict[str, Any] = dict.fromkeys(KEPT) | {"reward_mean": 0.5, "step_s": 3.0}
    row |= {"logprob_diff_mean": difference / 2, "logprob_diff_max": difference, "importance_masked_frac": 0.01}
    row |= {"bit_exact/tokens": 10, "bit_exact/differing_tokens": 4}
    folder.mkdir()
    lines = [json.dumps(row | {"step": step}) + "\n" for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    evaluations = [{"policy_version": version, "accuracy": version / 4, "seconds": 1.0} for version in (2, 0)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("arm", ARMS)
def test_the_flags_reach_sampler_and_trainer(tmp_path: Path, setting: Any, arm: Any) -> None:
    planned = plan(*flags_of(Experiment(steps=4), setting, arm, 1)[1:], "--runs", str(tmp_path))
    words = {service.name: " ".join(service.command) for service in planned.services}
    assert "--dtype bfloat16" in words["vllm"]
    assert ("--batch-invariant" in words["vllm"]) is (arm == "exact")
    assert ("--kv-cache-dtype fp8_e5m2" in words["vllm"]) is (setting == "fp8")
    files = "\n".join(planned.files.values())
    assert ("old_logprobs: recomputed" in files) is (arm != "exact" or setting == "off-policy")
    for corrected, importance in (("truncated", "truncate"), ("masked", "mask")):
        assert (f"importance: {importance}" in files) is (arm == corrected)
    assert ("updates_per_batch: 4" in files) is (setting == "off-policy")


def test_a_run_is_read_and_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 0.25)
    run = finished(tmp_path / "run", "base", "masked", 2, ["--seed", "2"])
    assert [row["policy_version"] for row in run.evaluations] == [0, 2]
    assert "step_s" not in run.steps[0]
    keep(tmp_path / "rows" / "base-masked-2.json", run)
    shown = tables(Experiment(rows=tmp_path / "rows"))
    assert "| masked | 2 | 0.500 | 0.500 | 50.0 % | 0.1250 | 0.250 | 1.00 % | 8 of 20 |" in shown


@pytest.mark.parametrize(
    ("nats", "arm", "says"), [(1e-6, "exact", "1e-06 nats in arm exact"), (0.0, "plain", "in arm plain")]
)
def test_a_run_that_contradicts_its_arm_is_an_error(tmp_path: Path, nats: float, arm: Arm, says: str) -> None:
    write_run(tmp_path / "run", nats)
    with pytest.raises(TrainerError, match=says):
        finished(tmp_path / "run", "base", arm, 1, [])


def test_processors_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", 0.25)
    for seed, machine in ((1, "one"), (2, "another")):
        monkeypatch.setattr("benchmarks.exactness_experiment.processor", lambda name=machine: name)
        keep(tmp_path / f"rows/{seed}.json", finished(tmp_path / "run", "base", "plain", seed, []))
    shown = tables(Experiment(rows=tmp_path / "rows"))
    assert "| plain | 1 |" in shown
    assert "| plain | 2 |" in shown
    assert shown.count("| arm | seeds |") == 2
