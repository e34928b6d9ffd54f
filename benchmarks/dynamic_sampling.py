"""What dynamic sampling does to learning per minute: the quickstart with and without it, three seeds each.

    python -m benchmarks.dynamic_sampling                      six runs, about five minutes each on two idle cores
    python -m benchmarks.dynamic_sampling --read DIR           the table of earlier runs

Without it a batch is the first eight groups that were sampled, with a signal or not. With it groups of equal scores are
held back until a batch is full of others, or `--max-items` groups have been sampled for it (docs/environments.md). A
step then has more to train on and takes longer to sample, so steps are not a fair measure: the table is over minutes,
from the evaluation of the untrained policy on and without the time that evaluations take. "Mean accuracy" is that over
the minutes which every run has, by straight lines between evaluations. Runs alternate, so that changes of the machine's
speed affect both.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from example_trainer.plot import Rows, read_rows

GROUPS_PER_BATCH = 8
OF_8 = ["--env.group_size", "8", "--trainer.kl_coef", "0"]  # answers, as when it was measured
RIGHT = 0.9
Curve = list[tuple[float, float]]  # minutes, held-out accuracy

ARMS: dict[str, list[str]] = {
    "without": [
        *("--env.ensure_scores_are_not_same", "false", "--env.max_items_per_batch", "0"),
        *("--env.max_num_workers", str(GROUPS_PER_BATCH)),
    ],
    "with": [
        *("--env.ensure_scores_are_not_same", "true", "--env.max_items_per_batch", "{max_items}"),
        *("--env.max_num_workers", "{max_items}"),  # without it a batch has all its groups in flight, too
    ],
}


@dataclass(frozen=True)
class Run:
    """Holds what one run has come to."""

    arm: str
    seed: int
    curve: Curve
    updates: int
    sampled: int  # groups
    without_signal: int
    thrown_away: int


def flags(arm: str, seed: int, steps: int, max_items: int, runs: Path) -> list[str]:
    """The command line of `atropos` for one run."""
    name = f"{arm}-{seed}"
    switched = [word.format(max_items=max_items) for word in ARMS[arm]]
    metrics = runs.resolve() / name / "environment.jsonl"
    common = ["--seed", str(seed), "--steps", str(steps), "--run-name", name, "--runs", str(runs)]
    return ["quickstart", *OF_8, *common, "--env.metrics_path", str(metrics), *switched]


def read_run(folder: Path) -> Run:
    """The run of a directory that `flags` names."""
    arm, _, seed = folder.name.rpartition("-")
    steps = read_rows(folder / "metrics.jsonl")
    environment = read_rows(folder / "environment.jsonl")
    posted = sum(row["groups"] for row in steps)
    thrown_away = count(environment, "groups_thrown_away")
    return Run(
        arm=arm,
        seed=int(seed),
        curve=learning_curve(read_rows(folder / "evaluations.jsonl")),
        updates=sum(row.get("loss") is not None for row in steps),
        sampled=posted + thrown_away,
        without_signal=sum(row["zero_variance_groups"] for row in steps) + thrown_away,
        thrown_away=thrown_away,
    )


def count(environment: Rows, name: str) -> int:
    """The last figure of a count in an environment's metrics; 0 where it never counted."""
    counted = [value for row in environment for key, value in row.items() if key.endswith(f"train/{name}")]
    return int(counted[-1]) if counted else 0


def learning_curve(evaluations: Rows) -> Curve:
    """Accuracy over minutes of sampling and training, from the evaluation of policy 0 on."""
    rows = sorted(evaluations, key=lambda row: int(row["policy_version"]))
    began, evaluated, curve = rows[0]["time"], 0.0, [(0.0, float(rows[0]["accuracy"]))]
    for row in rows[1:]:
        evaluated += row["seconds"]
        curve.append(((row["time"] - began - evaluated) / 60, float(row["accuracy"])))
    return curve


def minutes_to(curve: Curve, accuracy: float) -> float | None:
    """When the curve first reaches `accuracy`, by a straight line between the evaluations around that."""
    for (start, low), (end, high) in itertools.pairwise(curve):
        if low < accuracy <= high:
            return start + (end - start) * (accuracy - low) / (high - low)
    return None


def mean_accuracy(curve: Curve, minutes: float) -> float:
    """The mean height of the curve over its first `minutes`, which it must have."""
    area = 0.0
    for (start, low), (end, high) in itertools.pairwise(curve):
        stop = min(end, minutes)
        if stop > start:
            at_stop = low + (high - low) * (stop - start) / (end - start)
            area += (stop - start) * (low + at_stop) / 2
    return area / minutes


def table(runs: list[Run]) -> str:
    """All runs, and the medians of each arm, as Markdown."""
    common = min(run.curve[-1][0] for run in runs)
    heads = ["run", "minutes", "final accuracy", f"minutes to {RIGHT:.0%}", f"mean accuracy, {common:.1f} min"]
    heads += ["updates", "groups sampled", "without a signal", "thrown away"]
    lines = [heads, ["---"] * len(heads)]
    for run in runs:
        lines.append([f"{run.arm}, seed {run.seed}", *_cells(_figures(run, common))])
    for arm in ARMS:
        of_arm = [_figures(run, common) for run in runs if run.arm == arm]
        if of_arm:
            medians = [_median(list(column)) for column in zip(*of_arm, strict=True)]
            lines.append([f"**{arm}, median**", *_cells(medians)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _figures(run: Run, common: float) -> list[float | None]:
    minutes, accuracy = run.curve[-1]
    by_time = [minutes, accuracy, minutes_to(run.curve, RIGHT), mean_accuracy(run.curve, common)]
    return [*by_time, run.updates, run.sampled, run.without_signal, run.thrown_away]


def _median(values: list[float | None]) -> float | None:
    """A run that never got there counts as later than all others."""
    found = statistics.median_high(float("inf") if value is None else value for value in values)
    return None if found == float("inf") else found


def _cells(figures: list[float | None]) -> list[str]:
    formats = ["{:.2f}", "{:.1%}", "{:.2f}", "{:.1%}", *["{:.0f}"] * 4]
    return ["never" if value is None else form.format(value) for form, value in zip(formats, figures, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--steps", type=int, default=20, help="training steps per run (default: %(default)s)")
    parser.add_argument(
        "--max-items",
        type=int,
        default=3 * GROUPS_PER_BATCH,
        help="limit of groups sampled for one batch (default: %(default)s)",
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/dynamic_sampling"), help="parent directory of the runs")
    parser.add_argument("--read", type=Path, metavar="DIR", help="run nothing; report on the runs in this directory")
    options: Any = parser.parse_args()
    folders = sorted(options.read.iterdir()) if options.read else []
    for seed in [] if options.read else options.seeds:
        for arm in ARMS:
            words = flags(arm, seed, options.steps, options.max_items, options.runs)
            subprocess.run([sys.executable, "-m", "atropos_launcher", *words], check=True)
            folders.append(options.runs / f"{arm}-{seed}")
    runs = [read_run(folder) for folder in folders if (folder / "evaluations.jsonl").is_file()]
    print(table(runs))
    print(json.dumps({f"{run.arm}-{run.seed}": run.curve for run in runs}))


if __name__ == "__main__":
    main()
