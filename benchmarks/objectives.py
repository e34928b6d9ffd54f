"""Runs every --algorithm preset on the quickstart's task, one after the other, and collects their results.

    python -m benchmarks.objectives --out runs/objectives          # about 6 minutes per preset on two cores
    python -m benchmarks.objectives --out runs/objectives --report # only the table and the plot, without a run

Each run is `atropos train arithmetic` through real services, with the quickstart's model, steps and learning rate. Only
the preset differs, so this shows that each learns and how its metrics look, and not which is best: each would need its
own learning rate. A run whose metrics are complete is not repeated.

OUT gets `objectives.md` (held-out accuracy and other metrics, for docs/benchmarks/learning.md), `objectives.png` (the
curves), and the directory and log of each run. Remove the directory of a failed run before you repeat it.
"""

from pathlib import Path
from typing import Any, get_args

from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.errors import one_line_errors
from atroposlib.files import write_whole
from benchmarks.shared.launched import launched
from example_trainer.errors import TrainerError
from example_trainer.plot import read_rows
from example_trainer.settings.objectives import Algorithm

FIGURES = ("reward_mean", "grad_norm", "entropy", "ratio_clipped_frac", "ratio_max", "step_s")


class ObjectivesConfig(Config):
    """Train with every --algorithm preset on the same task, and collect the results."""

    out: Path = Field(Path("runs/objectives"), description="directory of the runs and the results")
    algorithms: list[Algorithm] = Field(list(get_args(Algorithm)), min_length=1, description="presets to run")
    steps: int = Field(20, ge=1, description="training steps of each")
    seed: int = Field(1, ge=0, description="seed of every run")
    limit_s: float = Field(3600.0, gt=0, description="seconds after which a run is stopped")
    trainer: list[str] = Field([], description="further flags of the trainer, such as --lr=1e-5")
    report: bool = Field(False, description="run nothing: write the table and the plot of the existing runs")


Row = dict[str, Any]


def run_preset(config: ObjectivesConfig, algorithm: Algorithm) -> None:
    """One run, unless it is there. Raises TrainerError if it fails."""
    folder = config.out / algorithm
    if len(rows_of(folder / "metrics.jsonl")) >= config.steps:
        print(f"{algorithm}: {folder} is complete", flush=True)
        return
    flags = ["train", "arithmetic", "--steps", str(config.steps), "--seed", str(config.seed)]
    flags += ["--trainer.algorithm", algorithm, "--trainer.checkpoint_interval", "0"]
    flags += [f"--trainer.{flag.removeprefix('--')}" for flag in config.trainer]
    launched(config.out, algorithm, flags, config.limit_s)


def rows_of(path: Path) -> list[Row]:
    """Read the rows of a file of a run; none without the file."""
    return read_rows(path) if path.is_file() else []


def accuracies(folder: Path) -> dict[int, float]:
    """Held-out accuracy by policy version, the untrained model's included."""
    rows = rows_of(folder / "evaluations.jsonl")
    return {row["policy_version"]: row["accuracy"] for row in rows if row["accuracy"] is not None}


def table(config: ObjectivesConfig) -> str:
    """Held-out accuracy by step, then means of other metrics, in Markdown."""
    runs = {name: rows for name in config.algorithms if (rows := rows_of(config.out / name / "metrics.jsonl"))}
    if not runs:
        raise TrainerError(f"{config.out} has no run: drop --report")
    measured = {name: accuracies(config.out / name) for name in runs}
    steps = sorted({step for found in measured.values() for step in found})
    lines = [
        f"| `--algorithm` | {' | '.join(f'step {step}' for step in steps)} |",
        "|---" * (1 + len(steps)) + "|",
        *(
            f"| `{name}` | " + " | ".join(f"{100 * found[s]:.1f} %" if s in found else "" for s in steps) + " |"
            for name, found in measured.items()
        ),
        "",
        f"| mean over the steps | {' | '.join(f'`{figure}`' for figure in FIGURES)} |",
        "|---" * (1 + len(FIGURES)) + "|",
        *(f"| `{name}` | " + " | ".join(mean(rows, each) for each in FIGURES) + " |" for name, rows in runs.items()),
    ]
    return "\n".join(lines) + "\n"


def page(config: ObjectivesConfig) -> str:
    """The page of the documentation, but for the machine."""
    typed = "".join(f" --trainer={flag}" for flag in config.trainer)
    return f"""# The presets of --algorithm on the quickstart's task

```bash
python -m benchmarks.objectives --steps {config.steps} --seed {config.seed}{typed}
```

Held-out accuracy (64 problems, greedy) of SmolLM2-135M-Instruct on the `arithmetic` set, by step. One run of one seed
each, all with the learning rate that suits `grpo`: this shows that every preset learns, and not which is best.

{table(config)}
![mean reward and held-out accuracy of each preset](objectives.png)
"""


def mean(rows: list[Row], figure: str) -> str:
    """Over the steps that measured it."""
    values = [row[figure] for row in rows if row.get(figure) is not None]
    return f"{sum(values) / len(values):.3g}" if values else ""


def draw(config: ObjectivesConfig, path: Path) -> None:
    """Reward by step, and held-out accuracy, a line for each preset."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in config.algorithms:
        rows, found = rows_of(config.out / name / "metrics.jsonl"), accuracies(config.out / name)
        left.plot([row["step"] for row in rows], [row["reward_mean"] for row in rows], label=name)
        right.plot(list(found), [100 * value for value in found.values()], marker="o", label=name)
    left.set(xlabel="step", ylabel="mean reward of the batch")
    right.set(xlabel="policy version", ylabel="held-out accuracy, %", ylim=(0, 100))
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Run what is missing, then report."""
    config = load_config(ObjectivesConfig, prog="objectives")
    with one_line_errors("objectives"):
        if not config.report:
            for algorithm in config.algorithms:
                run_preset(config, algorithm)
        text = page(config)
        write_whole(config.out / "objectives.md", text.encode())
        draw(config, config.out / "objectives.png")
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
