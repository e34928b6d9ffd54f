"""Other projects beside this one: the same work, on one machine, in one run, each in an environment of its own.

    python -m benchmarks.peers                                     all four, three runs each
    python -m benchmarks.peers --peers trl,transfer_queue --runs 1
    python -m benchmarks.peers --report                            the tables of the results so far

Environments are made on first use (`environment.py`). Each run of an arm is metered (`metering.py`) and appended to the
results file as it ends; the same command goes on behind a stop. Arms take turns. docs/benchmarks/speed.md has results.
"""

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.errors import one_line_errors
from atroposlib.flags import ConfigError
from benchmarks.peers.comparison import Arm, Work
from benchmarks.peers.comparisons import COMPARISONS, ROOT
from benchmarks.peers.metering import metered
from benchmarks.peers.table import Result, table
from benchmarks.shared.finished_runs import commit, processor
from example_trainer.quickstart_model import cached_model

PROG = "peers"


class Settings(Config):
    """Measure other projects beside this one."""

    peers: tuple[str, ...] = Field(tuple(COMPARISONS), description=f"Comparisons, of {', '.join(COMPARISONS)}.")
    runs: int = Field(3, ge=1, description="Runs of each arm.")
    out: Path = Field(
        Path("runs/peers.jsonl"),
        description="File to which results are appended; runs that stand in it are not repeated.",
    )
    model: Path | None = Field(None, description="Directory of the model; by default the quickstart's.")
    report: bool = Field(False, description="Run nothing; print the tables of the file.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for, and print the tables."""
    settings = load_config(Settings, argv, prog=PROG)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the arm, too, as Ctrl-C does
    with one_line_errors(PROG):
        unknown = [name for name in settings.peers if name not in COMPARISONS]
        if unknown:
            raise ConfigError(f"--peers {unknown[0]} is unknown; choose of {', '.join(COMPARISONS)}")
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        if not settings.report:
            for name in settings.peers:
                compare(name, settings)
        for name in settings.peers:
            own = [result for result in read(settings.out) if result.comparison == name]
            print(f"\n{name}: {', '.join(COMPARISONS[name].packages)}\n\n{table(own, COMPARISONS[name].goals)}")


def compare(name: str, settings: Settings) -> None:
    """Run every arm of a comparison, in turns, and append each result; leave out runs that the file has."""
    ended = {(result.arm, result.run) for result in read(settings.out) if result.comparison == name}
    model = settings.model or cached_model()
    with tempfile.TemporaryDirectory(prefix=f"peers-{name}-") as folder:
        for run in range(1, settings.runs + 1):
            with COMPARISONS[name].arms(Work(Path(folder), model, run)) as arms:
                for arm in [arm for arm in arms if (arm.name, run) not in ended]:
                    append(settings.out, result_of(name, arm, run, settings.out.parent))


def result_of(name: str, arm: Arm, run: int, logs: Path) -> Result:
    """Run an arm once. Raises ArmFailed."""
    log = logs / f"peers-{name}-{arm.name.replace(' ', '-').replace(',', '')}-{run}.log"
    load = os.getloadavg()[0]
    print(f"{name}, run {run}: running {arm.name} for at most {arm.limit_s:g} s, log {log}", flush=True)
    done = metered(arm.command, log, arm.limit_s, {"PYTHONPATH": str(ROOT), **arm.variables})
    used = {"wall_s": done.wall_s, "cpu_s": done.cpu_s, "peak_gb": done.peak_gb}
    print("  " + ", ".join(f"{metric} {value:.4g}" for metric, value in (done.metrics | used).items()), flush=True)
    return Result(
        comparison=name,
        arm=arm.name,
        run=run,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit(),
        processor=processor(),
        load=load,
        packages=list(COMPARISONS[name].packages),
        metrics=done.metrics | used,
    )


def append(path: Path, result: Result) -> None:
    """Write one line, whole and on the disk."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Iterator[Result]:
    """The results in a file, none where it is missing."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return (msgspec.json.decode(line, type=Result) for line in lines if line)


if __name__ == "__main__":
    main()
