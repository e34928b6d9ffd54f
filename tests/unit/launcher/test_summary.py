"""The closing lines of a quickstart run."""

import json
from pathlib import Path

from example_trainer.launcher import summary


def test_accuracy_before_and_after() -> None:
    rows = [{"policy_version": v, "accuracy": a} for v, a in [(0, 0.171875), (5, 0.75), (20, 0.96875), (10, None)]]
    assert summary.accuracy_line(rows) == "Held-out accuracy: 17.2 % before, 96.9 % after 20 steps"


def test_accuracy_that_was_not_measured_is_not_invented() -> None:
    assert summary.accuracy_line([{"policy_version": 0, "accuracy": None}]) == "Held-out accuracy: not measured"
    assert summary.accuracy_line([{"policy_version": 5, "accuracy": 0.5}]) == "Held-out accuracy: 50.0 % after 5 steps"


def test_each_of_several_environments_has_its_accuracy() -> None:
    rows = [{"env": env, "policy_version": v, "accuracy": v / 8} for env in ("sums", "letters") for v in (0, 4)]
    assert summary.accuracy_lines(rows) == [
        "letters: Held-out accuracy: 0.0 % before, 50.0 % after 4 steps",
        "sums: Held-out accuracy: 0.0 % before, 50.0 % after 4 steps",
    ]


def test_summary_names_the_run_and_its_figures(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "reward_mean": s / 10}) + "\n" for s in (1, 2, 3))
    )
    text = summary.summary(run, 412)
    assert "Mean sampled reward: 0.10 at step 1, 0.30 at step 3" in text
    assert "Took 6 min 52 s" in text
    assert "runs/mine/reward.png" in text
    assert "checkpoints/final_model    the trained model" in text


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "final_adapter").mkdir()
    assert summary.trained_line(tmp_path).startswith("checkpoints/final_adapter  the trained adapter")
