"""What overlapping sampler and trainer saves: the quickstart's task, vLLM on one CPU core and the trainer on another.

    python -m benchmarks.overlap --steps 8            three runs, about four minutes each on two idle cores
    python -m benchmarks.overlap --groups-at-once 4   half the groups of a batch are sampled before the others
    python -m benchmarks.overlap --read DIR           the table of earlier runs

The arms: alternating (--no-overlap), overlapped (--overlap), and one step off-policy
(--env.max_batches_offpolicy 1). The first step of a run is left out, because vLLM and the trainer warm up in it. A
step is the time between two rows of metrics.jsonl; evaluations are off. The slower half is the one that was busy for
longer.
"""

import argparse
import statistics
from pathlib import Path

from atroposlib.errors import one_line_errors
from benchmarks.shared.launched import launched
from example_trainer.plot import Rows, read_rows

ARMS = {
    "alternating": ["--trainer.no-overlap"],
    "overlapped": ["--trainer.overlap"],
    "one step off-policy": ["--trainer.no-overlap", "--env.max_batches_offpolicy", "1"],
}


def command(arm: str, steps: int, groups_at_once: int) -> list[str]:
    """One run of an arm."""
    apart = ["--layout.cores.vllm", "[0]", "--layout.cores.trainer", "[1]", "--layout.cores.environments", "[0]"]
    quiet = [
        "--env.steps_per_eval",
        "0",
        "--env.eval_at_start",
        "false",
        "--env.group_size",
        "8",
        "--env.ensure_scores_are_not_same",
        "false",
        "--trainer.kl_coef",
        "0",
        "--trainer.checkpoint_interval",
        "0",
        "--no-view",
    ]
    return [
        "quickstart",
        "--steps",
        str(steps),
        *apart,
        *quiet,
        "--env.max_num_workers",
        str(groups_at_once),
        *ARMS[arm],
    ]


def folder(arm: str) -> str:
    """The directory of its run."""
    return arm.replace(" ", "-")


def table(runs: Path) -> str:
    """The arms side by side, as Markdown."""
    rows: dict[str, Rows] = {
        arm: read_rows(runs / folder(arm) / "metrics.jsonl")[1:] for arm in ARMS if (runs / folder(arm)).is_dir()
    }
    base = median(rows["alternating"], "trainer_busy_s") + median(rows["alternating"], "trainer_idle_s")
    lines = [
        "| arm | step, s | of alternating | trainer busy, s | sampler busy, s | slower half idle |",
        "|---|" + "---|" * 5,
    ]
    for arm, of_arm in rows.items():
        trainer, idle = median(of_arm, "trainer_busy_s"), median(of_arm, "trainer_idle_s")
        sampler, step = median(of_arm, "sampler_busy_s"), trainer + idle
        slower_idle = 1 - max(trainer, sampler) / step
        lines.append(f"| {arm} | {step:.1f} | {step / base:.2f} | {trainer:.1f} | {sampler:.1f} | {slower_idle:.0%} |")
    return "\n".join(lines)


def median(rows: Rows, name: str) -> float:
    """Compute the median of a column."""
    return statistics.median(float(row[name]) for row in rows)


def main() -> None:
    """Run the arms, unless they are to be read, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups-at-once", type=int, default=8, help="groups in flight (default: all 8 of a batch)")
    parser.add_argument("--runs", type=Path, default=Path("runs/overlap"))
    parser.add_argument("--read", type=Path, help="directory of earlier runs")
    options = parser.parse_args()
    with one_line_errors("overlap"):
        if options.read is None:
            for arm in ARMS:
                launched(options.runs, folder(arm), command(arm, options.steps, options.groups_at_once), limit_s=3600)
        print(table(options.read or options.runs))


if __name__ == "__main__":
    main()
