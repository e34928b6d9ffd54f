"""Runs a command, and reports what it and all that it started used: wall time, CPU, peak memory; and its own metrics.

    metered(command) ──▶ command ──▶ its children, daemons in sessions of their own: all have inherited MARK=...
                                     its output, a file; metrics are JSON behind an @ (`benchmarks/trainer_step.py`)

CPU is a lower bound, the larger of two: what the kernel adds up for children that were waited for, which misses those
whose parent waits for none (Ray's workers), and the last sample of each process, which misses the short-lived.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from atropos_launcher.checks.peak_memory import PeakMemory
from atroposlib.errors import AtroposError
from atroposlib.processes.groups import Marked, left_after

MARK = "ATROPOS_METERED"
SAMPLE_S = 0.5
GRACE_S = 10.0
KILL_S = 5.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class ArmFailed(AtroposError):
    """The command failed, took too long, or printed no metrics; the message names its log."""


@dataclass(frozen=True)
class Metered:
    """What one run of a command used; `metrics` are its own."""

    wall_s: float
    cpu_s: float
    peak_gb: float
    metrics: dict[str, float]


@dataclass
class _Usage:
    """Proportional memory of the marked processes now, and the CPU that each of them was last seen to have used."""

    marked: Marked
    cpu_s: dict[int, float] = field(default_factory=dict)

    def sample(self) -> int:
        return sum(map(self._of, self.marked.members()))

    def _of(self, pid: int) -> int:
        with suppress(psutil.Error, FileNotFoundError):
            process = psutil.Process(pid)
            times = process.cpu_times()
            self.cpu_s[pid] = times.user + times.system
            nbytes: int = process.memory_full_info().pss  # pages that several share count once
            return nbytes
        return 0


def metered(command: Sequence[str], log: Path, limit_s: float, variables: Mapping[str, str] | None = None) -> Metered:
    """Run the command with its output in `log`, and end what it leaves. Raises ArmFailed."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that orphans come here to be counted
    mark = uuid.uuid4().hex
    marked = Marked(MARK, mark)
    usage = _Usage(marked)
    before = _children_cpu_s()
    started = time.perf_counter()
    with PeakMemory(usage.sample, SAMPLE_S) as memory, log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(variables or {}), MARK: mark},
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ArmFailed(f"{command[0]} took over {limit_s:g} s: see {log}") from None
        finally:
            wall_s = time.perf_counter() - started
            _end(marked)
    if status:
        raise ArmFailed(f"{' '.join(command[:4])} ended with exit status {status}: see {log}")
    cpu_s = max(_children_cpu_s() - before, sum(usage.cpu_s.values()))
    return Metered(wall_s, cpu_s, memory.nbytes / 1e9, _metrics(log))


def _end(marked: Marked) -> None:
    """End what is left, and wait for it, so that the kernel counts it."""
    if left_after([marked], GRACE_S, signal.SIGTERM):
        left_after([marked], KILL_S, signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _metrics(log: Path) -> dict[str, float]:
    """Return the object of the last line that begins with an @. Raises ArmFailed where there is none."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith("@"):
            metrics: dict[str, float] = json.loads(line[1:])
            return metrics
    raise ArmFailed(f"no metrics were printed: see {log}")
