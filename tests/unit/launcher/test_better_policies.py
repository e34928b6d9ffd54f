"""benchmarks/better_policies.py: arms differ in what its page names, and a run is read with its further questions."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from atroposlib.envs.data.problems import arithmetic_problems
from benchmarks import better_policies
from benchmarks.better_policies import (
    BY_STEPS,
    Arm,
    BetterPolicies,
    fine_tune,
    finished,
    flags_of,
    read_finished,
    report,
)
from benchmarks.shared.finished_runs import KEPT, keep
from example_trainer.errors import TrainerError
from tests.unit.launcher.plans import no_processes, plan  # noqa: F401  a fixture

ARMS: list[Arm] = [arm for arm in get_args(Arm) if arm not in BY_STEPS]
DIFFERS: dict[Arm, set[str]] = {
    "former": {"lr", "lr_by_signal", "lr_decay_steps", "kl_coef"},
    "repeat": {"repeat_share"},
    "warm": {"steps", "training_steps"},
}
HELD_OUT = {"policy_version": 20, "accuracy": 0.95, "stderr": 0.02, "questions": 64}
FINAL = {"final": {"accuracy": 0.98, "stderr": 0.01, "questions": 256}}


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(better_policies, "commit", lambda: "abc")


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_differs_from_the_one_with_kl_in_what_the_page_names(tmp_path: Path, arm: Arm) -> None:
    config = BetterPolicies(runs=tmp_path)
    files = []
    for each in ("with_kl", arm):
        words = flags_of(config, each, 3)[1:]
        if each == "warm":
            at = words.index("--model")
            assert words[at + 1] == str(tmp_path / "warm_start-3/final_model")
            del words[at : at + 2]  # not there yet
        planned = plan(*words, "--runs", str(tmp_path))
        files.append({line.strip() for text in planned.files.values() for line in text.splitlines()})
    if arm in ("taught", "taught_top_k"):
        assert ("distill: forward_kl" in files[1]) == (arm == "taught_top_k")
        assert "distill_coef: 1.0" in files[1]
        assert "reward_coef: 0.0" in files[1]
        assert "teacher" in [service.name for service in planned.services]
    else:
        assert {line.partition(":")[0] for line in files[0] ^ files[1]} == DIFFERS.get(arm, set())


def test_no_answer_of_a_warm_start_is_to_a_held_out_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **given: Any) -> Any:
        asked.append(command)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(better_policies, "cached_model", lambda: Path("model"))
    questions = []
    for seed in (1, 2):
        fine_tune(BetterPolicies(runs=tmp_path), seed)
        lines = (tmp_path / f"warm_start-{seed}/answers.jsonl").read_text().splitlines()
        questions.append([json.loads(line)["messages"][0]["content"] for line in lines])
        assert len(set(questions[-1])) == 200
        assert not {problem.question for problem in arithmetic_problems(256).held_out} & set(questions[-1])
    assert questions[0] != questions[1]
    assert asked[0][asked[0].index("--seed") + 1] == "1"


def write_run(folder: Path, outcome: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    rows = [dict.fromkeys(KEPT) | {"step": step, "reward_mean": 0.5} for step in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [{"policy_version": version, "accuracy": version / 25} for version in (0, 5, 10, 15, 20, 21)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"starts": [], "held_out": {"gsm8k": outcome}}))
    return folder


def test_a_run_is_read_kept_and_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"last": HELD_OUT | FINAL, "best": HELD_OUT | FINAL})
    run = finished(folder, "warm", 2, ["--seed", "2"], 180.04)
    assert run.result == 98.0
    keep(tmp_path / "rows/warm-2.json", run)
    found = read_finished(tmp_path / "rows")
    assert report(found).splitlines() == ["| arm | seed 2 | mean |", "|---|---|---|", "| warm | 98.0 | 98.0 |"]
    better_policies.draw(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize("outcome", [{}, {"last": HELD_OUT, "best": HELD_OUT}, {"last": HELD_OUT | FINAL}])
def test_a_run_that_was_not_asked_all_questions_is_an_error(tmp_path: Path, outcome: dict[str, Any]) -> None:
    with pytest.raises(TrainerError, match="has no accuracy on the further questions"):
        finished(write_run(tmp_path / "run", outcome), "quickstart", 1, [], 1.0)


def test_a_teacher_that_is_gone_is_trained_again_before_its_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def launch(runs: Path, name: str, flags: list[str], limit_s: float) -> Path:
        trained.append((name, "--teacher.model" in flags))
        return write_run(runs / name, {"last": HELD_OUT | FINAL, "best": HELD_OUT | FINAL})

    monkeypatch.setattr(better_policies, "launched", launch)
    better_policies.train(BetterPolicies(runs=tmp_path / "runs", rows=tmp_path), "taught", 2)
    assert trained == [("with_kl-1", False), ("taught-2", True)]
    assert [path.name for path in tmp_path.glob("*.json")] == ["taught-2.json"]
