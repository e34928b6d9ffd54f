"""Does a policy learn better if trainer and sampler compute the same bits? 72 runs that differ in one thing at a time.

    python -m benchmarks.exactness_factorial             what is missing of 72 runs; 2 to 3 minutes each on two cores
    python -m benchmarks.exactness_factorial --seeds 1   the twelve runs of one seed
    python -m benchmarks.exactness_factorial --report    the tables and tests of the runs so far

{float32, bfloat16} x {plain, exact} x three learning rates x six seeds, with four updates per batch. Both arms compute
gradients with the same float32 kernels (`exact_kernels`) and train every row of the embedding; they differ in the
forward pass: `exact` computes vLLM's bits, `plain` float32. What is compared, and how, is fixed in
docs/benchmarks/learning.md. A finished run leaves one file, ROWS/DTYPE-ARM-RATE-SEED.json, and is not
repeated.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from shutil import rmtree
from typing import Literal, NamedTuple, get_args

import numpy as np
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.errors import one_line_errors
from benchmarks.shared.finished_runs import FinishedRun, commit, evaluations_of, keep, processor, read_run, steps_of
from benchmarks.shared.launched import ROOT, launched
from example_trainer.errors import TrainerError
from example_trainer.model.cpu_kernels import exact_kernels

Dtype = Literal["float32", "bfloat16"]
Arm = Literal["plain", "exact"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ARMS: tuple[Arm, ...] = get_args(Arm)
RATES = ("2e-5", "4e-5", "6e-5")
SEEDS = (1, 2, 3, 4, 5, 6)
CHOOSING = (1, 2, 3)  # seeds by which each arm's best rate is chosen; the others test it
STEPS, EVERY = 10, 2
RESAMPLES = 10_000


class Factorial(Config):
    """Train every cell with every seed, then show tables and tests."""

    seeds: list[int] = Field(list(SEEDS), min_length=1, description="seeds to run")
    runs: Path = Field(
        Path("runs/factorial"), description="directory of the runs; leftovers of an interrupted run are deleted"
    )
    rows: Path = Field(ROOT / "docs/benchmarks/exactness_factorial", description="directory of the finished runs")
    limit_s: float = Field(1800.0, gt=0, description="seconds after which a run is stopped")
    report: bool = Field(False, description="run nothing: show what the finished runs tell")


class Cell(NamedTuple):
    """Names one of the 72 runs."""

    dtype: Dtype
    arm: Arm
    rate: str
    seed: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


class FactorialRun(FinishedRun, frozen=True, kw_only=True):
    """One file of the directory of rows."""

    cell: Cell

    @property
    def result(self) -> float:
        """The result that decides: mean held-out accuracy, in percent, of policy versions 2, 4, ..., 10."""
        return 100 * statistics.fmean(row["accuracy"] for row in self.evaluations if row["policy_version"] > 0)


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    """Every cell, seed by seed: a machine that goes away leaves whole seeds."""
    for seed, dtype, rate, arm in product(seeds, DTYPES, RATES, ARMS):
        yield Cell(dtype, arm, rate, seed)


def flags_of(cell: Cell) -> list[str]:
    """The command line of `atropos` for one run, but for its name and place."""
    arm = ["--batch-invariant"] if cell.arm == "exact" else ["--trainer.kernels", exact_kernels()]
    return [
        *("train", "arithmetic", "--steps", str(STEPS), "--seed", str(cell.seed), "--dtype", cell.dtype, "--no-view"),
        *("--env.steps_per_eval", str(EVERY), "--env.final_heldout_size", "0"),
        *("--trainer.updates_per_batch", "4", "--trainer.lr", cell.rate, "--trainer.lr_decay_steps", "0"),
        *("--trainer.lr_by_signal", "false", "--trainer.kl_coef", "0.05", "--trainer.checkpoint_interval", "0"),
        *("--trainer.keep_best", "0", *arm),
    ]


def train(config: Factorial, cell: Cell) -> None:
    """One run, unless its rows are there. Raises TrainerError if it fails."""
    rows = config.rows / f"{cell}.json"
    if rows.is_file():
        print(f"{cell}: finished before, {rows}", flush=True)
        return
    flags = flags_of(cell)
    folder = launched(config.runs, str(cell), flags, config.limit_s)
    keep(rows, finished(folder, cell, flags))
    rmtree(folder, ignore_errors=True)  # half a gigabyte


def finished(folder: Path, cell: Cell, flags: list[str]) -> FactorialRun:
    """Read what a run directory has. Raises TrainerError if an evaluation is missing, if an exact run was not exact, or
    a plain one was.
    """
    steps, evaluations = steps_of(folder), evaluations_of(folder)
    measured = {row["policy_version"] for row in evaluations if row["accuracy"] is not None}
    if missing := {*range(EVERY, STEPS + 1, EVERY)} - measured:
        raise TrainerError(f"{folder}: policy versions {sorted(missing)} have no held-out accuracy; run it again")
    largest = max(row["logprob_diff_max"] or 0.0 for row in steps)
    if (largest == 0.0) != (cell.arm == "exact"):
        raise TrainerError(f"{folder}: the largest difference of a log-probability is {largest} nats in arm {cell.arm}")
    return FactorialRun(
        cell=cell, processor=processor(), commit=commit(), flags=flags, steps=steps, evaluations=evaluations
    )


def read_finished(folder: Path) -> dict[Cell, FactorialRun]:
    """All finished runs. Raises TrainerError."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        run = read_run(path, FactorialRun)
        found[run.cell] = run
    if not found:
        raise TrainerError(f"{folder} has no run: drop --report")
    return found


class Difference(NamedTuple):
    """Compares exact with plain in points of held-out accuracy: the mean difference over seeds, its 95 % bootstrap
    interval, and the two-sided p of the permutation test over all ways to name the seeds' arms.
    """

    points: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        return f"{self.points:+.1f} points (95 %: {self.low:+.1f} to {self.high:+.1f}), p {self.p:.3f}"


def difference(exact: Sequence[float], plain: Sequence[float]) -> Difference:
    """Compare the results of the seeds of two arms."""
    together, seen = np.array([*exact, *plain]), statistics.fmean(exact) - statistics.fmean(plain)
    relabelled = []
    for places in combinations(range(len(together)), len(exact)):
        chosen = np.isin(np.arange(len(together)), places)
        relabelled.append(together[chosen].mean() - together[~chosen].mean())
    p = float(np.mean(np.abs(relabelled) >= abs(seen) - 1e-9))
    generator = np.random.default_rng(0)
    resampled = [generator.choice(arm, (RESAMPLES, len(arm))).mean(axis=1) for arm in (exact, plain)]
    low, high = np.percentile(resampled[0] - resampled[1], [2.5, 97.5])
    return Difference(seen, float(low), float(high), p)


def by_seed(
    runs: Mapping[Cell, FactorialRun], dtype: Dtype, arm: Arm, rates: Sequence[str], seeds: Sequence[int]
) -> list[float]:
    """For each seed that has runs at all these rates, the mean of their results."""
    whole = [seed for seed in seeds if all(Cell(dtype, arm, rate, seed) in runs for rate in rates)]
    return [statistics.fmean(runs[Cell(dtype, arm, rate, seed)].result for rate in rates) for seed in whole]


def best_rate(runs: Mapping[Cell, FactorialRun], dtype: Dtype, arm: Arm) -> str:
    """Return the rate with the highest mean result over the seeds that choose."""
    return max(RATES, key=lambda rate: statistics.fmean(by_seed(runs, dtype, arm, [rate], CHOOSING) or [0.0]))


def report(runs: Mapping[Cell, FactorialRun]) -> str:
    """Tables and tests, in Markdown."""
    lines = [f"{len(runs)} of {len(list(cells(SEEDS)))} runs", ""]
    lines += [
        "| sampler | arm | rate | seeds | held-out accuracy, versions 2 to 10 | mean difference, nats |",
        "|---|---|---|---|---|---|",
    ]
    for dtype, arm, rate in product(DTYPES, ARMS, RATES):
        mine = [run for cell, run in sorted(runs.items()) if cell[:3] == (dtype, arm, rate)]
        if mine:
            results = ", ".join(f"{run.result:.1f}" for run in mine)
            nats = statistics.fmean(row["logprob_diff_mean"] or 0.0 for run in mine for row in run.steps)
            mean = statistics.fmean(run.result for run in mine)
            lines.append(f"| {dtype} | {arm} | {rate} | {len(mine)} | {mean:.1f} % ({results}) | {nats:.6f} |")
    for dtype in DTYPES:
        exact, plain = (by_seed(runs, dtype, arm, RATES, SEEDS) for arm in ("exact", "plain"))
        if min(len(exact), len(plain)) >= 2:
            lines += ["", f"{dtype}, all rates, exact minus plain: {difference(exact, plain)}"]
        rates = {arm: best_rate(runs, dtype, arm) for arm in ARMS}
        tested = [seed for seed in SEEDS if seed not in CHOOSING]
        exact, plain = (by_seed(runs, dtype, arm, [rates[arm]], tested) for arm in ("exact", "plain"))
        if min(len(exact), len(plain)) >= 2:
            chosen = f"exact at {rates['exact']}, plain at {rates['plain']}"
            lines.append(f"{dtype}, {chosen} (seeds {CHOOSING}), on the other seeds: {difference(exact, plain)}")
    return "\n".join(lines)


def main() -> int:
    """Run what is missing, then report."""
    config = load_config(Factorial, prog="exactness_factorial")
    with one_line_errors("exactness_factorial"):
        if not config.report:
            for cell in cells(config.seeds):
                train(config, cell)
        print(report(read_finished(config.rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
