"""Does a run with --deterministic end with the same bytes, whatever is killed, and what does that cost?

    python -m benchmarks.repeated_runs                       eight runs of the quickstart's task; 3 to 5 minutes each
    python -m benchmarks.repeated_runs --arms plain,api      some of them

Each run is `atropos train arithmetic --steps 10 --seed 1`, of which a finished one is kept. `plain`, `env`, `vllm`,
`api`, `trainer` and `servers` are deterministic. The process that names an arm gets SIGKILL behind step 5, and a run
that ends by that is resumed; `servers` has two vLLM servers. `exact` has --batch-invariant alone and `default` neither.
The table has the SHA-256 of the final weights and of trained.jsonl, and the median seconds of a step.
"""

import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Literal, NamedTuple, get_args

from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.errors import one_line_errors
from benchmarks.shared.launched import ROOT, launched
from example_trainer.errors import TrainerError
from example_trainer.plot import read_rows

Arm = Literal["plain", "env", "vllm", "api", "trainer", "servers", "exact", "default"]
KILLED: tuple[Arm, ...] = ("env", "vllm", "api", "trainer")
FLAGS: Mapping[Arm, list[str]] = {"servers": ["--vllm.count", "2"], "exact": ["--batch-invariant"], "default": []}
BEHIND = 5  # the step


class RepeatedRuns(Config):
    """Train each arm once, then show a table."""

    arms: list[Arm] = Field(list(get_args(Arm)), min_length=1, description="arms to run")
    runs: Path = Field(Path("runs/repeated"), description="directory of the runs")
    seed: int = Field(1, ge=1, description="seed of all runs")
    limit_s: float = Field(1200.0, gt=0, description="seconds after which a run is stopped")


class Kept(NamedTuple):
    """What a finished run left: two digests, and the median seconds of its steps."""

    weights: str
    trained: str
    step_s: float


def flags_of(config: RepeatedRuns, arm: Arm) -> list[str]:
    """The command line of `atropos` for one run, but for its name and place."""
    common = ["train", "arithmetic", "--steps", "10", "--seed", str(config.seed), "--no-view"]
    common += ["--trainer.checkpoint_interval", "2", "--env.final_heldout_size", "0"]
    return [*common, *(["--deterministic"] if arm not in ("exact", "default") else []), *FLAGS.get(arm, [])]


def train(config: RepeatedRuns, arm: Arm) -> None:
    """Make the run of an arm. Raises TrainerError."""
    if arm not in KILLED:
        launched(config.runs, arm, flags_of(config, arm), config.limit_s)
        return
    killed = Event()
    Thread(target=kill_behind, args=(config.runs / arm, arm, killed), daemon=True).start()
    try:
        launched(config.runs, arm, flags_of(config, arm), config.limit_s)
    except TrainerError:
        if not killed.is_set():
            raise
        resume(config, arm)
    if not killed.is_set():
        raise TrainerError(f"{arm}: nothing was killed behind step {BEHIND}")


def resume(config: RepeatedRuns, arm: Arm) -> None:
    """Continue a run that ended because a process of it was killed. Raises TrainerError."""
    print(f"{arm}: resuming", flush=True)
    command = [sys.executable, "-m", "atropos_launcher", "train", "--resume", arm, "--runs", str(config.runs.resolve())]
    with open(config.runs / f"{arm}.log", "a") as console:
        done = subprocess.run(
            [*command, "--no-view"],
            cwd=ROOT,
            stdout=console,
            stderr=subprocess.STDOUT,
            timeout=config.limit_s,
            check=False,
        )
    if done.returncode != 0:
        raise TrainerError(f"{arm} was resumed and ended with exit code {done.returncode}")


def kill_behind(run: Path, service: str, killed: Event) -> None:
    """Wait for the step, then kill the service's process."""
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_bytes().splitlines()) < BEHIND:
        time.sleep(0.2)
    pid = int(json.loads((run / "pids" / service).read_text())["pid"])
    print(f"Killing {service} (pid {pid}) behind step {BEHIND}", flush=True)
    killed.set()
    os.kill(pid, signal.SIGKILL)


def drop_checkpoints(run: Path) -> None:
    """Remove all of a finished run's models but the final one: eight runs of five gigabytes would fill a disk."""
    for folder in (run / "checkpoints").iterdir():
        if folder.is_dir() and not folder.is_symlink() and folder.name != "final_model":
            shutil.rmtree(folder)


def kept(run: Path) -> Kept:
    """Read what a run left. Raises OSError."""
    files = ("checkpoints/final_model/model.safetensors", "trained.jsonl")
    weights, trained = (hashlib.sha256((run / name).read_bytes()).hexdigest() for name in files)
    seconds = [float(row["step_s"]) for row in read_rows(run / "metrics.jsonl")]
    return Kept(weights, trained, statistics.median(seconds))


def table(found: Mapping[Arm, Kept]) -> str:
    """Show the arms, in Markdown."""
    lines = ["| run | SHA-256 of the final weights | of trained.jsonl | median seconds a step |", "|---|---|---|---|"]
    lines += [
        f"| {arm} | {each.weights[:12]} | {each.trained[:12]} | {each.step_s:.2f} |" for arm, each in found.items()
    ]
    return "\n".join(lines)


def main() -> int:
    """Run what is missing, then show the table."""
    config = load_config(RepeatedRuns, prog="repeated_runs")
    with one_line_errors("repeated_runs"):
        for arm in config.arms:
            if not (config.runs / arm / "checkpoints/final_model/model.safetensors").is_file():
                train(config, arm)
            drop_checkpoints(config.runs / arm)
        print(table({arm: kept(config.runs / arm) for arm in config.arms}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
