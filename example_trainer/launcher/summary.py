"""What a run came to: accuracy before and after, where to look, what to try next."""

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]  # of a jsonl file, one per line
NEXT = {
    "scripts/quickstart.sh --seed 2": "the same with other samples",
    "scripts/quickstart.sh --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k": "a larger model, real problems",
    "scripts/run_gsm8k_lora.sh --dataset arithmetic": "the same by another weight bridge (docs/bridges.md)",
    "README.md, 'Next steps'": "your own model, your own environment",
}


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
    """The directory of what was trained, and what it is: an adapter is no whole model."""
    if (checkpoints / "final_adapter").is_dir():
        return "checkpoints/final_adapter  the trained adapter, a PEFT directory"
    return "checkpoints/final_model    the trained model, a Hugging Face directory"


def summary(run_dir: Path, seconds: int) -> str:
    """The text shown at the end of a run. `run_dir` holds metrics.jsonl with at least one row."""
    name = run_dir.name
    return "\n".join(
        [
            "",
            *accuracy_lines(read_rows(run_dir / "evaluations.jsonl")),
            reward_line(read_rows(run_dir / "metrics.jsonl")),
            f"Took {seconds // 60} min {seconds % 60} s",
            "",
            "Where to look:",
            f"  runs/{name}/reward.png                 reward and accuracy by step",
            f"  runs/{name}/metrics.jsonl              all metrics, one row per step",
            f"  runs/{name}/samples.jsonl              what the model answered, and its rewards",
            f"  runs/{name}/{trained_line(run_dir / 'checkpoints')}",
            f"  runs/{name}/*.log, *.yaml              each service's log and configuration",
            "What to try next:",
            *(f"  {command:<74} {what}" for command, what in NEXT.items()),
        ]
    )
