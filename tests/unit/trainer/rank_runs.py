"""Runs of trainer ranks for tests: jobs in, what each rank wrote down out. All of them share one start of torch, and a
job runs when a test asks for its result.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Job:
    """One training run. `settings` are the trainer's; see rank_child.py for the others."""

    model: str
    ranks: int = 2
    steps: int = 3
    settings: Mapping[str, Any] | None = None
    more: Mapping[str, Any] | None = None
    after: str | None = None  # the name of a job whose result this one needs


@dataclass(frozen=True)
class Done:
    """What a job's ranks wrote."""

    folder: Path

    @property
    def error(self) -> str:
        """The exceptions of its ranks, one a line."""
        path = self.folder / "error"
        return path.read_text() if path.exists() else ""

    @property
    def results(self) -> dict[str, Any]:
        """Rank 0's metrics."""
        assert not self.error, self.error
        found: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return found

    def column(self, name: str) -> list[float]:
        """A figure of each step."""
        return [step[name] for step in self.results["steps"]]

    def rank(self, rank: int) -> dict[str, Any]:
        """What a rank held at the end."""
        assert not self.error, self.error
        found: dict[str, Any] = json.loads((self.folder / f"rank_{rank}.json").read_text())
        return found

    def tensors(self, path: str = "model/model.safetensors") -> dict[str, torch.Tensor]:
        """What rank 0 wrote of the weights."""
        assert not self.error, self.error
        return load_file(self.folder / path)


class Runs(dict[str, Done]):
    """The results of jobs by name. Each job runs once, when it is asked for."""

    def __init__(self, jobs: Mapping[str, Job], folder: Path, server: "subprocess.Popen[str]") -> None:
        super().__init__()
        self._jobs, self._folder, self._server = jobs, folder, server

    def __missing__(self, name: str) -> Done:
        job, out = self._jobs[name], self._folder / name
        if job.after is not None:
            self[job.after]
        out.mkdir()
        settings = {"model_name": job.model, "lr": 1e-3, "micro_batch_tokens": 40, "logits_chunk_mb": 1}
        config = settings | {"dist_timeout_s": 50.0} | dict(job.settings or {})
        content = {"out": str(out), "ranks": job.ranks, "steps": job.steps, "config": config, **(job.more or {})}
        (out / "job.json").write_text(json.dumps(content))
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{out / 'job.json'}\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline(), "the process that forks ranks has ended"
        self[name] = Done(out)
        return self[name]


@contextmanager
def running_jobs(jobs: Mapping[str, Job], folder: Path) -> Iterator[Runs]:
    """Jobs that can be asked for."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.trainer.rank_child", "--fork"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:  # whose stdin is closed at the end, which ends it
        yield Runs(jobs, folder, server)


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Between tensors of the same names."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
