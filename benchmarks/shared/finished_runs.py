"""What benchmarks of learning keep of a finished run: one file, which another call does not repeat."""

import json
import platform
import subprocess
from pathlib import Path
from typing import TypeVar

import msgspec

from atroposlib.errors import reading
from atroposlib.files import write_whole
from benchmarks.shared.launched import ROOT
from example_trainer.errors import TrainerError
from example_trainer.plot import Rows, read_rows

KEPT = (  # columns of metrics.jsonl
    *("step", "reward_mean", "loss", "lr", "grad_norm", "entropy", "updates", "trained_tokens", "staleness_max"),
    *("completion_tokens_per_rollout", "logprob_diff_mean", "logprob_diff_max", "sampler_kl"),
    *("ratio_max", "ratio_clipped_frac", "importance_masked_frac", "importance_truncated_frac"),
    *("bit_exact/differing_tokens", "bit_exact/tokens"),
)


class FinishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a benchmark's directory of rows; each benchmark adds what names the run."""

    processor: str
    commit: str
    flags: list[str]
    steps: Rows
    evaluations: Rows  # by policy version


R = TypeVar("R", bound=FinishedRun)


def steps_of(folder: Path) -> Rows:
    """The columns that are kept, of each step in a run directory."""
    return [{column: row.get(column) for column in KEPT} for row in read_rows(folder / "metrics.jsonl")]


def evaluations_of(folder: Path) -> Rows:
    """Held-out accuracies in a run directory, by policy version."""
    rows = [
        {key: row[key] for key in ("policy_version", "accuracy")} for row in read_rows(folder / "evaluations.jsonl")
    ]
    return sorted(rows, key=lambda row: int(row["policy_version"]))


def keep(path: Path, run: FinishedRun) -> None:
    """Write the rows, one step a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(msgspec.to_builtins(run))
    for start in ('"steps": [', '"evaluations": [', '{"step"'):
        text = text.replace(start, "\n" + start)
    write_whole(path, (text + "\n").encode())


def read_run(path: Path, kind: type[R]) -> R:
    """The rows of a file. Raises TrainerError that names it."""
    with reading(f"{path} is damaged", TrainerError, remedy="remove it, and its run starts again"):
        return msgspec.json.decode(path.read_bytes(), type=kind)


def processor() -> str:
    """Name, family, model and stepping: virtual machines give several processors one name."""
    cpuinfo = Path("/proc/cpuinfo")
    first = cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.exists() else ""
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in told:
        return platform.machine()
    return f"{told['model name']}, {told['cpu family']}/{told['model']}/{told['stepping']}"


def commit() -> str:
    """The checkout's, shortened."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()
