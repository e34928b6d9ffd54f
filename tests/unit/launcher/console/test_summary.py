"""The closing lines of a quickstart run."""

import json
import re
from pathlib import Path

import pytest

from atropos_launcher.cli import COMMANDS
from atropos_launcher.console import summary
from atroposlib.wire.folders import LATEST

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
    text = summary.summary(run, 412, newcomer=True, typed=".venv/bin/atropos")
    assert "Mean sampled reward: 0.10 at step 1, 0.30 at step 3" in text
    assert "Took 6 min 52 s" in text
    assert "Where to look, in runs/mine/:" in text
    assert "  checkpoints/final_model    the trained model" in text
    monkeypatch.chdir("/")
    assert f"Where to look, in {str(run).removeprefix('/')}/:" in summary.summary(
        run, 1, newcomer=True, typed="atropos"
    )


def test_a_newcomer_is_told_what_to_type_and_that_it_can_be_typed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    checkout = summary.summary(run, 412, newcomer=True, typed=".venv/bin/atropos")
    for command in re.findall(r"scripts/\S+", checkout):
        assert (ROOT / command).is_file()
    assert "  scripts/quickstart.sh --seed 2 " in checkout
    assert "  scripts/run_gsm8k_lora.sh --dataset arithmetic " in checkout
    assert "scripts/" not in summary.summary(run, 412, newcomer=True, typed="atropos")
    monkeypatch.chdir(run)
    assert "scripts/" not in summary.summary(run, 412, newcomer=True, typed="/opt/atropos/.venv/bin/atropos")


def test_atropos_is_typed_by_its_name_where_that_starts_it_else_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = tmp_path / "my env/bin/atropos", tmp_path / "other/atropos"
    for file in (own, other):
        file.parent.mkdir(parents=True)
        file.touch(0o755)
    monkeypatch.setattr("sys.executable", str(own.with_name("python")))
    for path, folder, typed in (
        (own.parent, tmp_path, "atropos"),
        (other.parent, tmp_path, "'my env/bin/atropos'"),
        (tmp_path, other.parent, f"'{own}'"),
    ):
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.chdir(folder)
        assert summary.typed_atropos() == typed


@pytest.mark.parametrize("newcomer", [True, False])
def test_a_run_that_has_a_checkpoint_can_be_continued(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newcomer: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--resume" not in summary.summary(run, 1, newcomer, "atropos")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / LATEST).write_text("step_3\n")
    text = summary.summary(run, 1, newcomer, "atropos")
    assert re.search(r"^  atropos view mine  ", text, re.MULTILINE)  # one spelling: the name is enough here
    assert re.search(r"^  atropos train --resume mine --steps 6  +3 steps more", text, re.MULTILINE)
    monkeypatch.chdir("/")
    assert f"atropos view {str(run).removeprefix('/')} " in summary.summary(run, 1, newcomer, "atropos")


def test_a_run_with_a_blank_in_its_name_is_quoted() -> None:
    assert "atropos view 'my runs/a'" in summary.next_steps("my runs/a", False, "atropos")


@pytest.mark.parametrize("typed", ["atropos", ".venv/bin/atropos"])
@pytest.mark.parametrize("newcomer", [True, False])
def test_every_next_step_is_a_command(typed: str, newcomer: bool) -> None:
    for command in summary.next_steps("runs/mine", newcomer, typed):
        if not command.startswith("scripts/r") and not command.startswith("scripts/q"):
            words = command.removeprefix(".venv/bin/").removeprefix("atropos ").split()
            assert words[0] in COMMANDS


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "final_adapter").mkdir()
    assert summary.trained_line(tmp_path).startswith("checkpoints/final_adapter  the trained adapter")
