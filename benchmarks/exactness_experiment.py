"""What is exactness worth? A bfloat16 sampler, and four ways to treat its disagreement with the trainer.

    python -m benchmarks.exactness_experiment             four arms, three seeds; 2 to 4 minutes per run
    python -m benchmarks.exactness_experiment --settings high-lr,long,off-policy,fp8
    python -m benchmarks.exactness_experiment --report    tables and figure of the runs so far

Each run is `atropos train arithmetic` with real services, and vLLM serves bfloat16. The trainer keeps float32 weights.
In all arms but `exact` it multiplies in bfloat16 and keeps the rest in float32 (--kernels bfloat16), so its
log-probabilities differ from vLLM's. Runs of one seed ask the same problems in the same order.

A finished run leaves one file, ROWS/PROCESSOR/SETTING-ARM-SEED.json, and is not repeated on that processor; an
interrupted run starts again. A file records the processor, the commit and the flags. A table never mixes processors,
settings or numbers of steps.
"""

import re
import shutil
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.errors import one_line_errors
from benchmarks.shared.finished_runs import FinishedRun, commit, evaluations_of, keep, processor, read_run, steps_of
from benchmarks.shared.launched import ROOT, launched
from example_trainer.errors import TrainerError
from example_trainer.plot import Rows

LAST = 5  # steps at the end of a run whose mean reward the table has
Arm = Literal["plain", "truncated", "masked", "exact"]
Setting = Literal["base", "high-lr", "long", "off-policy", "fp8"]
Compared = tuple[str, Setting, int]  # processor, setting, number of steps
RECOMPUTED = ["--trainer.kernels", "bfloat16", "--trainer.old_logprobs", "recomputed"]
ARMS: dict[Arm, list[str]] = {
    "plain": RECOMPUTED,
    "truncated": [*RECOMPUTED, "--trainer.importance", "truncate"],
    "masked": [*RECOMPUTED, "--trainer.importance", "mask"],
    "exact": ["--batch-invariant"],
}
SETTINGS: dict[Setting, list[str]] = {
    "base": [],
    "high-lr": ["--trainer.lr", "6e-5"],
    "long": ["--env.max_new_tokens", "96"],
    "off-policy": ["--trainer.lr", "6e-5", "--trainer.updates_per_batch", "4"],
    "fp8": ["--vllm.kv_cache_dtype", "fp8_e5m2"],
}
REFUSED = {("fp8", "exact")}  # exact mode refuses an fp8 KV cache


class Experiment(Config):
    """Train every arm with every seed, then show tables and a figure."""

    settings: list[Setting] = Field(["base"], min_length=1, description="what all arms of a table have in common")
    arms: list[Arm] = Field(list(get_args(Arm)), min_length=1, description="arms to run")
    seeds: list[int] = Field([1, 2, 3], min_length=1, description="seeds to run")
    steps: int = Field(10, ge=1, description="training steps of each run")
    runs: Path = Field(
        Path("runs/exactness"), description="directory of the runs; leftovers of an interrupted run are deleted"
    )
    rows: Path = Field(
        ROOT / "docs/benchmarks/exactness_experiment", description="directory of the finished runs' rows"
    )
    figure: Path = Field(ROOT / "docs/benchmarks/exactness_experiment.png", description="where the figure goes")
    limit_s: float = Field(1800.0, gt=0, description="seconds after which a run is stopped")
    report: bool = Field(False, description="run nothing: tables and figure of the finished runs")


class ExperimentRun(FinishedRun, frozen=True, kw_only=True):
    """One file of the directory of rows."""

    setting: Setting
    arm: Arm
    seed: int

    @property
    def table(self) -> Compared:
        """Runs with equal ones are compared with each other."""
        return self.processor, self.setting, len(self.steps)

    def mean(self, column: str, last: int = 0) -> float:
        """Over the steps that measured it, or the `last` of them; 0 if none did."""
        values = [row[column] for row in self.steps[-last:] if row[column] is not None]
        return statistics.fmean(values) if values else 0.0


# --- runs -----------------------------------------------------------------------------------------------------------


def flags_of(config: Experiment, setting: Setting, arm: Arm, seed: int) -> list[str]:
    """The command line of `atropos` for one run, but for its name and place."""
    common = ["--steps", str(config.steps), "--seed", str(seed), "--dtype", "bfloat16", "--no-view"]
    evaluated = ["--env.steps_per_eval", str(max(1, config.steps // 2)), "--trainer.checkpoint_interval", "0"]
    return ["train", "arithmetic", *common, *evaluated, *SETTINGS[setting], *ARMS[arm]]


def train(config: Experiment, setting: Setting, arm: Arm, seed: int) -> None:
    """One run, unless its rows are there. Raises TrainerError if it fails or an exact run was not exact."""
    name = f"{setting}-{arm}-{seed}"
    rows = config.rows / folder_of(processor()) / f"{name}.json"
    if rows.is_file():
        if (steps := len(read_run(rows, ExperimentRun).steps)) != config.steps:
            raise TrainerError(f"{rows} has {steps} steps, not {config.steps}: give --steps {steps} or other --rows")
        print(f"{name}: finished before, {rows}", flush=True)
        return
    flags = flags_of(config, setting, arm, seed)
    folder = launched(config.runs, name, flags, config.limit_s)
    keep(rows, finished(folder, setting, arm, seed, flags))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # half a gigabyte per run


def finished(folder: Path, setting: Setting, arm: Arm, seed: int, flags: list[str]) -> ExperimentRun:
    """Read what a run directory has. Raises TrainerError if an exact run was not exact, or another one was."""
    steps = steps_of(folder)
    run = ExperimentRun(
        setting=setting,
        arm=arm,
        seed=seed,
        processor=processor(),
        commit=commit(),
        flags=flags,
        steps=steps,
        evaluations=evaluations_of(folder),
    )
    largest = max(row["logprob_diff_max"] or 0.0 for row in steps)
    if (largest == 0.0) != (arm == "exact"):
        raise TrainerError(f"{folder}: the largest difference of a log-probability is {largest} nats in arm {arm}")
    return run


def folder_of(processor: str) -> str:
    """Such as amd-epyc-25-1-1."""
    return re.sub(r"[^a-z0-9]+", "-", processor.lower()).strip("-")


# --- tables and figure ----------------------------------------------------------------------------------------------


def read_finished(config: Experiment) -> dict[Compared, dict[Arm, list[ExperimentRun]]]:
    """All finished runs, by what makes them comparable, then by arm, seeds in order."""
    found: dict[Compared, dict[Arm, list[ExperimentRun]]] = defaultdict(lambda: defaultdict(list))
    paths = sorted(config.rows.rglob("*.json"))
    if not paths:
        raise TrainerError(f"{config.rows} has no run: drop --report, and choose arms that the settings have")
    for path in paths:
        run = read_run(path, ExperimentRun)
        found[run.table][run.arm].append(run)
    order = {setting: nth for nth, setting in enumerate(SETTINGS)}
    return {key: found[key] for key in sorted(found, key=lambda key: (key[0], order[key[1]], key[2]))}


def spread(values: list[float], form: str) -> str:
    """Mean and, of several values, standard deviation."""
    text = format(statistics.fmean(values), form)
    return f"{text} ± {format(statistics.stdev(values), form)}" if len(values) > 1 else text


def tables(config: Experiment) -> str:
    """For each processor, setting and number of steps: learning and mismatch of each arm, in Markdown."""
    heads = ["arm", "seeds", "reward, all steps", f"reward, last {LAST}", "held-out accuracy at the end"]
    heads += ["mean difference, nats", "largest", "tokens dropped or bounded", "tokens that differ"]
    lines = []
    for (machine, setting, steps), arms in read_finished(config).items():
        lines += [f"`{setting}`, {steps} steps, {machine}:", "", _row(heads), _row(["---"] * len(heads))]
        lines += [_row(_cells(arm, arms[arm])) for arm in ARMS if arm in arms]
        lines.append("")
    return "\n".join(lines)


def _cells(arm: Arm, runs: list[ExperimentRun]) -> list[str]:
    bounded = [run.mean("importance_masked_frac") + run.mean("importance_truncated_frac") for run in runs]
    compared = sum(row["bit_exact/tokens"] or 0 for run in runs for row in run.steps)
    differing = sum(row["bit_exact/differing_tokens"] or 0 for run in runs for row in run.steps)
    return [
        arm,
        ", ".join(str(run.seed) for run in runs),
        spread([run.mean("reward_mean") for run in runs], ".3f"),
        spread([run.mean("reward_mean", LAST) for run in runs], ".3f"),
        spread([100 * run.evaluations[-1]["accuracy"] for run in runs], ".1f") + " %",
        spread([run.mean("logprob_diff_mean") for run in runs], ".4f"),
        format(max(row["logprob_diff_max"] or 0.0 for run in runs for row in run.steps), ".3f"),
        f"{100 * statistics.fmean(bounded):.2f} %",
        f"{differing} of {compared}",
    ]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(config: Experiment) -> None:
    """A row of panels per table: reward, held-out accuracy and mismatch; the mean of the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = read_finished(config)
    figure, axes = pyplot.subplots(
        len(found), 3, figsize=(13, 3.6 * len(found)), layout="constrained", squeeze=False, dpi=110
    )
    for (reward, accuracy, mismatch), ((machine, setting, steps), arms) in zip(axes, found.items(), strict=True):
        for nth, arm in enumerate(ARMS):
            if arm in arms:
                runs = arms[arm]
                style: dict[str, Any] = {"color": f"C{nth}", "label": f"{arm} ({len(runs)})"}
                _band(reward, [_curve(run.steps, "step", "reward_mean") for run in runs], style)
                _band(accuracy, [_curve(run.evaluations, "policy_version", "accuracy") for run in runs], style)
                _band(mismatch, [_curve(run.steps, "step", "logprob_diff_mean") for run in runs], style)
        reward.set(title=f"{setting}, {steps} steps", xlabel="step", ylabel="mean reward", ylim=(0, 1))
        accuracy.set(title=machine, xlabel="policy version", ylabel="held-out accuracy", ylim=(0, 1))
        mismatch.set(title="mismatch", xlabel="step", ylabel="mean |log-probability difference|, nats", ylim=(0, None))
        reward.legend(title="arm (seeds)")
    figure.savefig(config.figure)
    pyplot.close(figure)


def _curve(rows: Rows, across: str, up: str) -> dict[int, float]:
    return {row[across]: row[up] for row in rows if row[up] is not None}


def _band(axes: Any, curves: list[dict[int, float]], style: dict[str, Any]) -> None:
    """The mean, and from the lowest to the highest, wherever all curves have a point."""
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    points = [[curve[x] for curve in curves] for x in common]
    axes.plot(common, [statistics.fmean(values) for values in points], **style)
    axes.fill_between(common, [min(v) for v in points], [max(v) for v in points], color=style["color"], alpha=0.15)


def main() -> int:
    """Run what is missing, then report."""
    config = load_config(Experiment, prog="exactness_experiment")
    with one_line_errors("exactness_experiment"):
        if not config.report:
            for setting in config.settings:
                for seed in config.seeds:
                    for arm in config.arms:
                        if (setting, arm) not in REFUSED:
                            train(config, setting, arm, seed)
        print(tables(config))
        draw(config)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
