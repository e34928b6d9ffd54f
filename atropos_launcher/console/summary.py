"""The summary of a run: accuracy before and after, where to look, what to try next."""

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]  # of a jsonl file, one per line
SCRIPTS = {"quickstart": "scripts/quickstart.sh", "train gsm8k_lora": "scripts/run_gsm8k_lora.sh"}  # of a checkout


def read_rows(path: Path) -> Rows:
    """The objects of a jsonl file, none for a file that is not there."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def accuracy_line(evaluations: Rows) -> str:
    """`Held-out accuracy: 17.2 % before, 96.9 % after 20 steps`; evaluations hold `policy_version` and `accuracy`,
    null if not measured.
    """
    measured = {row["policy_version"]: row["accuracy"] for row in evaluations if row["accuracy"] is not None}
    if not measured:
        return "Held-out accuracy: not measured"
    last = max(measured)
    before = f"{100 * measured[0]:.1f} % before, " if 0 in measured and last > 0 else ""
    return f"Held-out accuracy: {before}{100 * measured[last]:.1f} % after {last} steps"


def accuracy_lines(evaluations: Rows) -> list[str]:
    """One for each environment, which is named where there are several."""
    names = sorted({str(row.get("env", "")) for row in evaluations})
    if len(names) < 2:
        return [accuracy_line(evaluations)]
    return [f"{name}: {accuracy_line([row for row in evaluations if row.get('env') == name])}" for name in names]


def reward_line(metrics: Rows) -> str:
    """`Mean sampled reward: 0.11 at step 1, 0.91 at step 20`."""
    first, last = metrics[0], metrics[-1]
    return (
        f"Mean sampled reward: {first['reward_mean']:.2f} at step {first['step']}, {last['reward_mean']:.2f} at step"
        f" {last['step']}"
    )


def trained_line(checkpoints: Path) -> str:
    """The directory of what was trained, and what it is: an adapter is not a whole model."""
    if (checkpoints / "final_adapter").is_dir():
        return "checkpoints/final_adapter  the trained adapter, a PEFT directory"
    return "checkpoints/final_model    the trained model, a Hugging Face directory"


def next_steps(run: str, newcomer: bool, installed: bool) -> dict[str, str]:
    """Commands with what they are for: what a newcomer tries next, or what is done with a run."""
    look = {f"view {run}": "every curve, answer and token in your browser (docs/watch.md)"}
    if newcomer:
        found = look | {
            "quickstart --seed 2": "the same with other samples",
            "quickstart --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k": "a larger model, real problems",
            "train gsm8k_lora --dataset arithmetic": "the same with another weight bridge (docs/bridges.md)",
            "train arithmetic --env.file my_server.py": "your own environment (docs/write_an_environment.md)",
        }
    else:
        found = look | {
            f"train {run}/run.yaml --seed 2": "the same with other samples",
            f"plot {run} OTHER_RUN": "compare it with another run",
            f"push {run} --hub USER/NAME": "share the trained model",
        }
    return {as_typed(command, installed): what for command, what in found.items()}


def as_typed(command: str, installed: bool) -> str:
    """`atropos COMMAND`, or the script of a checkout where `atropos` may not be on the path."""
    if installed:
        return f"atropos {command}"
    script = next((name for name in SCRIPTS if command.startswith(f"{name} ")), None)
    return f"scripts/setup.sh --run {command}" if script is None else command.replace(script, SCRIPTS[script], 1)


def summary(run_dir: Path, seconds: int, newcomer: bool, installed: bool) -> str:
    """The text shown at the end of a run. `run_dir` holds metrics.jsonl with at least one row. `installed`: whether
    people type `atropos`.
    """
    run = str(run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir)
    steps = next_steps(run, newcomer, installed)
    width = max(map(len, steps))
    return "\n".join(
        [
            "",
            *accuracy_lines(read_rows(run_dir / "evaluations.jsonl")),
            reward_line(read_rows(run_dir / "metrics.jsonl")),
            f"Took {seconds // 60} min {seconds % 60} s",
            "",
            f"Where to look, in {run}/:",
            "  reward.png                 reward and accuracy by step",
            "  metrics.jsonl              all metrics, one row per step",
            "  samples*.jsonl             what the model answered, and its rewards",
            f"  {trained_line(run_dir / 'checkpoints')}",
            "  *.log, *.yaml              each service's log and configuration",
            "What to try next:",
            *(f"  {command:<{width}}  {what}" for command, what in steps.items()),
        ]
    )
