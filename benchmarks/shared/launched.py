"""A training run by `atropos`, as a user starts it: what benchmarks of learning and of whole steps have in common."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from example_trainer.errors import TrainerError

ROOT = Path(__file__).resolve().parents[2]


def launched(runs: Path, name: str, flags: list[str], limit_s: float) -> Path:
    """Run `atropos` with `flags`, its console in RUNS/NAME.log, and return the run's directory RUNS/NAME. Raises
    TrainerError if the run fails or takes more than `limit_s` seconds. What ends this process ends the run's services.
    A directory of that name, of an earlier or interrupted run, is removed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log = runs / f"{name}.log"
    runs.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(runs / name, ignore_errors=True)
    print(f"{name}: running for at most {limit_s:g} s, log {log}", flush=True)
    place = ["--runs", str(runs.resolve()), "--run-name", name]
    with open(log, "w") as console:
        command = [sys.executable, "-m", "atropos_launcher", *flags, *place]
        process = subprocess.Popen(command, cwd=ROOT, stdout=console, stderr=subprocess.STDOUT)
        try:
            process.wait(limit_s)
        except BaseException as error:
            process.terminate()  # the launcher ends its services
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    if process.returncode != 0:
        raise TrainerError(f"{name} ended with exit code {process.returncode}: see {log}")
    return runs / name
