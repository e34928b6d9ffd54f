"""`atropos plot RUN...`: reward.png of a run while it continues, or a comparison of several."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from atropos_launcher.arguments import Parser, add_runs
from atropos_launcher.runs import find_run, latest_run


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser("plot", "Plot rewards by step: one run with its held-out accuracy, or several to compare.")
    command.add_argument("run", nargs="*", metavar="RUN", help="names or directories of runs (default: the newest)")
    command.add_argument(
        "--out", type=Path, help="PNG to write (default: RUN/reward.png; for several runs compare.png)"
    )
    add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    """Write the PNG. Returns the exit status."""
    options = parser().parse_args(argv)
    runs = [find_run(options.runs, name) for name in options.run] or [latest_run(options.runs)]
    out = options.out or (runs[0] / "reward.png" if len(runs) == 1 else Path("compare.png"))
    status = draw(runs, out)
    if status == 0:
        print(out)
    return status


def draw(runs: Sequence[Path], out: Path) -> int:
    """The plot of these runs. Returns the exit status, 1 with a line on stderr if there is nothing to draw."""
    from example_trainer.plot import main as plot

    first = runs[0] / "evaluations.jsonl"
    evaluations = ["--evaluations", str(first)] if len(runs) == 1 and first.is_file() else []
    title = runs[0].name if len(runs) == 1 else ""
    return plot([*(str(run / "metrics.jsonl") for run in runs), *evaluations, "--out", str(out), "--title", title])
