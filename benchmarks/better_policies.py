"""Better policies by the end: the quickstart, its former versions, and an older recipe alone, with prompts chosen by
success, a teacher or a warm start.

    python -m benchmarks.better_policies                          what is missing of every arm; 3 to 6 minutes a run
    python -m benchmarks.better_policies --arms quickstart --seeds 1
    python -m benchmarks.better_policies --report                 table and figure of the runs so far

Each run has real services: `atropos quickstart`, or `atropos train arithmetic` in float32 with the settings of 28
November 2026 (`WITH_KL`). What is compared, with how many seeds, and which value decides is fixed in
docs/benchmarks/learning.md. A finished run leaves one file, ROWS/ARM-SEED.json, and is not repeated.
"""

import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.envs.data.problems import Problem, arithmetic_problems
from atroposlib.errors import one_line_errors
from atroposlib.wire.held_out import HeldOut
from benchmarks.shared.finished_runs import FinishedRun, commit, evaluations_of, keep, processor, read_run, steps_of
from benchmarks.shared.launched import ROOT, launched
from example_trainer.errors import TrainerError
from example_trainer.quickstart_model import cached_model

Arm = Literal[
    "quickstart",
    "groups_of_8",
    "fifty_steps",
    "thirty_steps",
    "former",
    "with_kl",
    "repeat",
    "taught",
    "taught_top_k",
    "warm",
]
SEEDS: Mapping[Arm, Sequence[int]] = {
    "quickstart": (1, 2, 3, 4, 5),
    "groups_of_8": (1, 2, 3, 4, 5),
    "fifty_steps": (1, 2, 3, 4, 5),
    "thirty_steps": (1, 2, 3, 4, 5),
    "former": (1, 2, 3, 4, 5),
    "with_kl": (1, 2, 3, 4, 5),
    "repeat": (1, 2, 3),
    "taught": (1, 2, 3),
    "taught_top_k": (1, 2, 3),
    "warm": (1, 2, 3),
}
OF_8 = ["--env.group_size", "8", "--env.max_num_workers_per_node", "8", "--trainer.kl_coef", "0"]
EVERY_GROUP = [*OF_8, "--env.ensure_scores_are_not_same", "false", "--env.max_items_per_batch", "0"]
BY_STEPS: Mapping[Arm, Sequence[str]] = {
    "quickstart": (),
    "groups_of_8": (*OF_8, "--env.max_items_per_batch", "24"),
    "fifty_steps": ("--steps", "50", *EVERY_GROUP),
    "thirty_steps": ("--steps", "30", "--trainer.lr_decay_steps", "0", *EVERY_GROUP),
}
FORMER = ["--trainer.lr", "2e-5", "--trainer.lr_by_signal", "false", "--trainer.lr_decay_steps", "1/3"]
WITH_KL = ["--trainer.kl_coef", "0.05"]
DISTILLED = ["--trainer.distill-coef", "1", "--trainer.reward-coef", "0"]
TAUGHT: Mapping[Arm, Sequence[str]] = {"taught": (), "taught_top_k": ("--trainer.distill", "forward_kl")}
STEPS, WARM_STEPS = 20, 10  # of reinforcement learning
TEACHER_SEED = 1
ANSWERS, UPDATES = 200, 12  # of the warm start
PANELS = 5  # of a row of the figure


class BetterPolicies(Config):
    """Train every arm with its seeds, then show a table and a figure."""

    arms: list[Arm] = Field(list(get_args(Arm)), min_length=1, description="arms to run")
    seeds: list[int] = Field([], description="seeds to run; by default those of each arm")
    runs: Path = Field(
        Path("runs/better_policies"), description="directory of the runs; one that was interrupted starts again"
    )
    rows: Path = Field(ROOT / "docs/benchmarks/better_policies", description="directory of the finished runs")
    figure: Path = Field(ROOT / "docs/benchmarks/better_policies.png", description="where the figure goes")
    limit_s: float = Field(1800.0, gt=0, description="seconds after which a run is stopped")
    report: bool = Field(False, description="run nothing: table and figure of the finished runs")


class PolicyRun(FinishedRun, frozen=True, kw_only=True):
    """One file of the directory of rows. `last` and `best` are the policies' held-out accuracies, with the further
    questions of a run's end; `seconds` are those of the command, with a warm start.
    """

    arm: Arm
    seed: int
    seconds: float
    last: HeldOut
    best: HeldOut

    @property
    def result(self) -> float:
        """The result that decides: the last policy's accuracy on 256 questions, in percent."""
        return percent(self.last)


def percent(found: HeldOut) -> float:
    """With the further questions of a run's end."""
    return 100 * (found.final or found).accuracy


def flags_of(config: BetterPolicies, arm: Arm, seed: int) -> list[str]:
    """The command line of `atropos` for one run, but for its name and place."""
    if arm in BY_STEPS:
        return ["quickstart", "--seed", str(seed), "--no-view", *BY_STEPS[arm]]
    steps = WARM_STEPS if arm == "warm" else STEPS
    common = ["train", "arithmetic", "--steps", str(steps), "--seed", str(seed), "--no-view"]
    if arm == "former":
        return [*common, *FORMER]
    if arm in TAUGHT:
        return [*common, "--teacher.model", str(teacher(config)), *DISTILLED, *TAUGHT[arm]]
    if arm == "repeat":
        return [*common, *WITH_KL, "--env.repeat_share", "0.5"]
    if arm == "warm":
        return [*common, *WITH_KL, "--model", str(warm_start(config, seed) / "final_model")]
    return [*common, *WITH_KL]


def teacher(config: BetterPolicies) -> Path:
    """The best policy of the first seed of `with_kl`."""
    return (config.runs / f"with_kl-{TEACHER_SEED}" / "checkpoints/best_model").resolve()


def warm_start(config: BetterPolicies, seed: int) -> Path:
    """The directory of a seed's fine-tuned model."""
    return (config.runs / f"warm_start-{seed}").resolve()


def fine_tune(config: BetterPolicies, seed: int) -> None:
    """Teach the start model 200 worked answers, none of them to a held-out question. Raises TrainerError."""
    folder = warm_start(config, seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = folder / "answers.jsonl"
    chosen = random.Random(seed).sample(arithmetic_problems(held_out=256).train, ANSWERS)
    data.write_text("".join(json.dumps({"messages": chat(problem)}) + "\n" for problem in chosen))
    model = cached_model()
    words = ["fine-tune", str(data), "--model", str(model), "--out", str(folder), "--seed", str(seed)]
    words += ["--training-steps", str(UPDATES), "--batch-size", "8", "--gradient-accumulation-steps", "4"]
    words += ["--lr", "2e-5", "--seq-len", "256", "--checkpoint-interval", "0"]
    with open(folder / "console.log", "w") as console:
        command = [sys.executable, "-m", "atropos_launcher", *words]
        done = subprocess.run(command, cwd=ROOT, stdout=console, stderr=subprocess.STDOUT, timeout=config.limit_s)
    if done.returncode:
        raise TrainerError(f"the warm start ended with exit code {done.returncode}: see {folder / 'console.log'}")


def chat(problem: Problem) -> list[dict[str, str]]:
    """The messages of a question and its worked answer, as the environment asks."""
    return [{"role": "user", "content": problem.question}, {"role": "assistant", "content": problem.answer}]


def train(config: BetterPolicies, arm: Arm, seed: int) -> None:
    """One run, unless its rows are there. Raises TrainerError if it fails."""
    name = f"{arm}-{seed}"
    rows = config.rows / f"{name}.json"
    if rows.is_file():
        print(f"{name}: finished before, {rows}", flush=True)
        return
    if arm in TAUGHT and not teacher(config).is_dir():
        train_teacher(config)
    start = time.monotonic()
    if arm == "warm":
        fine_tune(config, seed)
    flags = flags_of(config, arm, seed)
    folder = launched(config.runs, name, flags, config.limit_s)
    keep(rows, finished(folder, arm, seed, flags, time.monotonic() - start))
    if (arm, seed) != ("with_kl", TEACHER_SEED):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # half a gigabyte and more
        shutil.rmtree(warm_start(config, seed), ignore_errors=True)


def train_teacher(config: BetterPolicies) -> None:
    """Make the run of the teacher's seed, for its best policy alone: a row that there is stays."""
    launched(config.runs, f"with_kl-{TEACHER_SEED}", flags_of(config, "with_kl", TEACHER_SEED), config.limit_s)


def finished(folder: Path, arm: Arm, seed: int, flags: list[str], seconds: float) -> PolicyRun:
    """Read what a run directory has. Raises TrainerError if the last policy was not asked all questions."""
    record = json.loads((folder / "run.json").read_bytes())
    (outcome,) = (record.get("held_out") or {"": {}}).values()
    found = {name: msgspec.convert(each, HeldOut) for name, each in outcome.items()}
    if not all(name in found and found[name].final for name in ("last", "best")):
        raise TrainerError(f"{folder / 'run.json'} has no accuracy on the further questions; run it again")
    return PolicyRun(
        arm=arm,
        seed=seed,
        seconds=round(seconds, 1),
        last=found["last"],
        best=found["best"],
        processor=processor(),
        commit=commit(),
        flags=[flag.replace(str(ROOT), ".") for flag in flags],
        steps=steps_of(folder),
        evaluations=evaluations_of(folder),
    )


def read_finished(folder: Path) -> dict[Arm, list[PolicyRun]]:
    """All finished runs by arm, seeds in order. Raises TrainerError."""
    runs = [read_run(path, PolicyRun) for path in folder.glob("*.json")]
    if not runs:
        raise TrainerError(f"{folder} has no run: drop --report")
    runs.sort(key=lambda run: run.seed)
    return {arm: mine for arm in get_args(Arm) if (mine := [run for run in runs if run.arm == arm])}


def report(found: Mapping[Arm, Sequence[PolicyRun]]) -> str:
    """A row for each arm, in Markdown: the last policies' percent, in brackets the best ones' where it differs."""
    seeds = sorted({run.seed for runs in found.values() for run in runs})
    heads = ["arm", *(f"seed {seed}" for seed in seeds), "mean"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for arm, runs in found.items():
        shown = {run.seed: ended(run) for run in runs}
        mean = sum(run.result for run in runs) / len(runs)
        lines.append(f"| {' | '.join([arm, *(shown.get(seed, '') for seed in seeds), f'{mean:.1f}'])} |")
    return "\n".join(lines)


def ended(run: PolicyRun) -> str:
    """One cell of the table."""
    last, best = (f"{percent(found):.1f}" for found in (run.last, run.best))
    return last if last == best else f"{last} ({best})"


def asked(run: PolicyRun) -> list[dict[str, Any]]:
    """The evaluations that have an accuracy: the best policy's further questions leave a row without."""
    return [row for row in run.evaluations if row["accuracy"] is not None]


def draw(found: Mapping[Arm, Sequence[PolicyRun]], path: Path) -> None:
    """A panel per arm: held-out accuracy by policy version, a line for each seed, and the last policy's on 256."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across, down = min(PANELS, len(found)), math.ceil(len(found) / PANELS)
    size = (3.4 * across, 3.4 * down)
    figure, axes = pyplot.subplots(down, across, figsize=size, sharey=True, squeeze=False, dpi=110)
    for axis in axes.flat[len(found) :]:
        axis.remove()
    for axis, (arm, runs) in zip(axes.flat, found.items(), strict=False):
        for nth, run in enumerate(runs):
            style: dict[str, Any] = {"color": f"C{nth}"}
            rows = [row for row in asked(run) if row["policy_version"] <= len(run.steps)]
            versions, accuracies = zip(*((row["policy_version"], row["accuracy"]) for row in rows), strict=True)
            axis.plot(versions, accuracies, marker=".", label=f"seed {run.seed}", **style)
            axis.plot(len(run.steps) + 0.7, run.result / 100, marker="D", markersize=4, **style)
        axis.axhline(0.97, color="grey", linewidth=0.6, linestyle=":")
        longest = max(len(run.steps) for run in runs)
        axis.set(title=arm, xlabel="policy version", ylim=(0, 1), xlim=(0, longest + 2))
        axis.legend(fontsize=7)
    for row in axes:
        row[0].set_ylabel("held-out accuracy, 64 questions (◆ 256)", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Run what is missing, then report."""
    config = load_config(BetterPolicies, prog="better_policies")
    with one_line_errors("better_policies"):
        if not config.report:
            for arm in sorted(config.arms, key=list(SEEDS).index):
                for seed in config.seeds or SEEDS[arm]:
                    train(config, arm, seed)
        found = read_finished(config.rows)
        print(report(found))
        draw(found, config.figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
