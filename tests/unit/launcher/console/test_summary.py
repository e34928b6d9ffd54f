"""The closing lines of a quickstart run."""

import json
import re
from pathlib import Path

import pytest

from atropos_launcher.cli import COMMANDS
from atropos_launcher.console import summary

ROOT = Path(__file__).resolve().parents[4]


def test_accuracy_before_and_after() -> None:
    rows = [{"policy_version": v, "accuracy": a} for v, a in [(0, 0.171875), (5, 0.75), (20, 0.96875), (10, None)]]
    assert summary.accuracy_line(rows) == "Held-out accuracy: 17.2 % before, 96.9 % after 20 steps"


def test_accuracy_that_was_not_measured_is_not_invented() -> None:
    assert summary.accuracy_line([{"policy_version": 0, "accuracy": None}]) == "Held-out accuracy: not measured"
    assert summary.accuracy_line([{"policy_version": 5, "accuracy": 0.5}]) == "Held-out accuracy: 50.0 % after 5 steps"


def evaluated(version: int, accuracy: float | None, right: int = 0, final: int = 0) -> dict[str, object]:
    metrics = {"total": 64, "correct": right} | ({"final_accuracy": final / 256, "final_total": 256} if final else {})
    return {"policy_version": version, "accuracy": accuracy, "metrics": metrics}


def test_further_questions_and_a_better_policy_are_told() -> None:
    rows = [evaluated(0, 0.09375), evaluated(10, 0.984375), evaluated(20, 0.90625, final=233)]
    line = "Held-out accuracy: 9.4 % before, 91.0 % (256 questions) after 20 steps"
    assert summary.accuracy_line(rows) == f"{line}; best 98.4 % after 10"
    again = evaluated(10, None, final=250)  # the best policy, served again
    assert summary.accuracy_line([*rows, again]) == f"{line}; best 97.7 % (256 questions) after 10"
    assert (
        summary.accuracy_line([*rows, evaluated(10, None, final=230)]) == line
    )  # with further questions, the last one does better
    assert summary.accuracy_line(rows[::2]) == line  # the last is the best
    found = summary.outcome([row | {"env": "sums"} for row in [*rows, again]])
    assert found["sums"]["best"]["policy_version"] == 10  # type: ignore[index]
    assert found["sums"]["best"]["final"]["questions"] == 256  # type: ignore[index]
    assert (found["sums"]["last"]["accuracy"], found["sums"]["last"]["questions"]) == (0.90625, 64)  # type: ignore[index]


def test_the_untrained_policy_is_never_the_best_one() -> None:
    rows = [evaluated(0, 0.5), evaluated(5, 0.25), evaluated(10, 0.125)]
    assert summary.accuracy_line(rows).endswith("50.0 % before, 12.5 % after 10 steps; best 25.0 % after 5")


def test_each_of_several_environments_has_its_accuracy() -> None:
    rows = [{"env": env, "policy_version": v, "accuracy": v / 8} for env in ("sums", "letters") for v in (0, 4)]
    assert summary.accuracy_lines(rows) == [
        "letters: Held-out accuracy: 0.0 % before, 50.0 % after 4 steps",
        "sums: Held-out accuracy: 0.0 % before, 50.0 % after 4 steps",
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps."""
    run = tmp_path / "runs/mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "reward_mean": s / 10}) + "\n" for s in (1, 2, 3))
    )
    return run


def test_summary_names_the_run_and_its_figures(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = summary.summary(run, 412, newcomer=True, installed=False)
    assert "Mean sampled reward: 0.10 at step 1, 0.30 at step 3" in text
    assert "Took 6 min 52 s" in text
    assert "Where to look, in runs/mine/:" in text
    assert "  checkpoints/final_model    the trained model" in text
    monkeypatch.chdir("/")
    assert f"Where to look, in {str(run).removeprefix('/')}/:" in summary.summary(run, 1, newcomer=True, installed=True)


def test_a_newcomer_is_told_what_to_type_and_that_it_can_be_typed(run: Path) -> None:
    checkout = summary.summary(run, 412, newcomer=True, installed=False)
    for command in re.findall(r"scripts/\S+", checkout):
        assert (ROOT / command).is_file()
    assert "  scripts/quickstart.sh --seed 2 " in checkout
    assert "  scripts/run_gsm8k_lora.sh --dataset arithmetic " in checkout
    assert "scripts/" not in summary.summary(run, 412, newcomer=True, installed=True)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("newcomer", [True, False])
def test_every_next_step_is_a_command(installed: bool, newcomer: bool) -> None:
    for command in summary.next_steps("runs/mine", newcomer, installed):
        if not command.startswith("scripts/r") and not command.startswith("scripts/q"):
            words = command.removeprefix(".venv/bin/").removeprefix("atropos ").split()
            assert words[0] in COMMANDS


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "final_adapter").mkdir()
    assert summary.trained_line(tmp_path).startswith("checkpoints/final_adapter  the trained adapter")
