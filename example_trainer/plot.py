"""reward.png from a run's files: `python -m example_trainer.plot metrics.jsonl --evaluations evaluations.jsonl --out
reward.png`.

Mean sampled reward by step, held-out accuracy by policy version. `evaluations.jsonl` holds objects with
`policy_version` and `accuracy`; without it the accuracies of metrics.jsonl are drawn. Several metrics files are
compared: one curve of rewards each, labelled by its directory, e.g. `python -m example_trainer.plot
runs/*/metrics.jsonl --out compare.png`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from atroposlib.errors import AtroposError, reading
from atroposlib.extras import need
from atroposlib.files import expect_regular
from atroposlib.logs import print_error

Rows = list[dict[str, Any]]  # of a jsonl file, one per line
SAMPLED = "mean reward of sampled answers"


class CannotPlot(AtroposError):
    """A file cannot be read or written, or has nothing yet."""


def plot_rewards(runs: dict[str, Rows], evaluations: Rows, out: Path, title: str = "") -> None:
    """Write a PNG with a curve of rewards per run, by label, and one of held-out accuracy per environment.

    Rows of a run have `step` and `reward_mean`; evaluations have `policy_version` and `accuracy` (null is left out).
    """
    need("trainer", "a plot", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [row for row in evaluations if row.get("accuracy") is not None]
    environments = sorted({row.get("env", "") for row in measured})
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for label, metrics in runs.items():
        axes.plot([row["step"] for row in metrics], [row["reward_mean"] for row in metrics], label=label)
    for environment in environments:
        of_one = [row for row in measured if row.get("env", "") == environment]
        points = sorted((row["policy_version"], row["accuracy"]) for row in of_one)
        of = f" of {environment}" if len(environments) > 1 else ""
        axes.plot(*zip(*points, strict=True), "o-", label=f"held-out accuracy{of} (greedy)")
    axes.set(xlabel="training step", ylabel=SAMPLED if len(runs) > 1 else "reward, accuracy", title=title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(expect_regular(out))
    plt.close(figure)


def read_rows(path: Path) -> Rows:
    """The objects of a jsonl file; a last line that is still being written is left out. Raises CannotPlot."""
    with reading(f"cannot read {path}", CannotPlot, remedy="remove the lines that were cut"):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line.strip()]


def main(argv: list[str] | None = None) -> int:
    """Command line; 1 with a line on stderr if nothing can be drawn: this may end a run that has done well."""
    parser = argparse.ArgumentParser(prog="plot", description=__doc__.splitlines()[0])
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.jsonl of a run, or of several to compare")
    parser.add_argument("--evaluations", type=Path, help="evaluations.jsonl of one run")
    parser.add_argument("--out", type=Path, default=Path("reward.png"))
    parser.add_argument("--title", default="")
    arguments = parser.parse_args(argv)
    missing = [path for path in (*arguments.metrics, arguments.evaluations) if path is not None and not path.is_file()]
    if missing:
        print(f"plot: error: {missing[0]} does not exist: no step is done yet, or this is no run", file=sys.stderr)
        return 1
    names = [path.parent.name for path in arguments.metrics]
    labels = names if len({*names}) == len(names) else [str(path.parent) for path in arguments.metrics]
    try:
        draw(dict(zip(labels, arguments.metrics, strict=True)), arguments.evaluations, arguments.out, arguments.title)
    except AtroposError as error:
        print_error("plot", error)
        return error.exit_status
    return 0


def draw(files: dict[str, Path], evaluated: Path | None, out: Path, title: str) -> None:
    """Plot files of metrics, by label, and of one run its evaluations. Raises CannotPlot."""
    runs = {label: read_rows(path) for label, path in files.items()}
    evaluations = read_rows(evaluated) if evaluated else []
    if empty := [path for label, path in files.items() if not runs[label]]:
        raise CannotPlot(f"{empty[0]} has no rows yet; wait for the first step")
    runs = {label: [row for row in rows if row.get("reward_mean") is not None] for label, rows in runs.items()}
    if unrewarded := [path for label, path in files.items() if not runs[label]]:
        raise CannotPlot(f"{unrewarded[0]} has no rewards: it is of a run that samples nothing; leave it out")
    if len(runs) == 1:
        (metrics,) = runs.values()
        evaluations = evaluations if evaluated else metrics
        runs = {SAMPLED: metrics}
    with reading(f"cannot write {out}", CannotPlot, remedy="free space, or give another --out"):
        plot_rewards(runs, evaluations if len(runs) == 1 else [], out, title)


if __name__ == "__main__":
    raise SystemExit(main())
