"""Runs of trainer ranks for tests: jobs in, what each rank wrote down out. All of them share one start of torch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
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


def run_jobs(jobs: Mapping[str, Job], folder: Path) -> dict[str, Done]:
    """Run them one after the other; the results by name."""
    paths = []
    for name, job in jobs.items():
        out = folder / name
        out.mkdir()
        settings = {"model_name": job.model, "lr": 1e-3, "micro_batch_tokens": 40, "logits_chunk_mb": 1}
        (out / "job.json").write_text(
            json.dumps(
                {
                    "out": str(out),
                    "ranks": job.ranks,
                    "steps": job.steps,
                    "config": settings | {"dist_timeout_s": 50.0} | dict(job.settings or {}),
                    **(job.more or {}),
                }
            )
        )
        paths.append(str(out / "job.json"))
    subprocess.run(
        [sys.executable, "-m", "tests.unit.trainer.rank_child", "--fork", *paths],
        check=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=800,
    )
    return {name: Done(folder / name) for name in jobs}


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Between tensors of the same names."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
