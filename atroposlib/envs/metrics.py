"""Where an environment's metrics go: a JSONL file, Weights & Biases, both, or nowhere.

W&B is on when the configuration wants it and the trainer has named a project. If it cannot start, one line is logged
and the run continues.
"""

import asyncio
import random
import statistics
import string
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atroposlib.logs import get_logger
from atroposlib.row_files.record_file import RecordFile

log = get_logger(__name__)

WANDB_START_LIMIT_S = 60
DURATIONS_KEPT = 1000

# By name: numbers, and whatever else W&B takes.
Metrics = dict[str, Any]


class JsonlSink:
    """One line per step: `{"step", "time", ...numbers}`, also those of numpy and torch; what is none is left out."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = RecordFile(path)

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        plain = {key: value.item() if getattr(value, "ndim", None) == 0 else value for key, value in metrics.items()}
        self._file.append(
            {"step": step, "time": time.time()}
            | {key: value for key, value in plain.items() if isinstance(value, (int, float))},
        )

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """An open W&B run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, metrics: Mapping[str, object], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


async def open_wandb(
    name: str, group: str | None, project: str | None, config: Mapping[str, object]
) -> WandbSink | None:
    """A run in `project`, or None after one line that says why not."""
    if not project:
        log.info("W&B is off: the trainer named no project")
        return None
    try:
        import wandb
    except ImportError:
        log.warning("W&B is off: the package wandb is not installed (pip install wandb, or --env.use_wandb false)")
        return None
    log.info("Starting a W&B run in project %s, at most %d s", project, WANDB_START_LIMIT_S)
    try:
        run = await asyncio.to_thread(
            wandb.init,
            project=project,
            group=group,
            name=f"{name}-{time.strftime('%Y-%m-%d')}-{''.join(random.choices(string.ascii_lowercase, k=6))}",
            config=dict(config),
            settings=wandb.Settings(init_timeout=WANDB_START_LIMIT_S, silent=True),
        )
    except wandb.Error as error:
        log.warning(
            "W&B is off: %s (log in with `wandb login`, set WANDB_MODE=offline, or --env.use_wandb false)",
            " ".join(str(error).split())[:200],
        )
        return None
    return WandbSink(run)


class Durations:
    """The most recent durations (s), or counts, of named activities, handed over as mean, std, max, min and forgotten
    by `take`.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, deque[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """Note one duration."""
        self._by_name.setdefault(name, deque(maxlen=DURATIONS_KEPT)).append(seconds)

    def values(self, name: str) -> list[float]:
        """Return the durations of `name` since the last `take`."""
        return list(self._by_name.get(name, ()))

    def take(self) -> dict[str, float]:
        """`<name>_mean`, `_std`, `_max`, `_min` of every activity since the last call."""
        taken: dict[str, float] = {}
        for name, values in self._by_name.items():
            taken |= {
                f"{name}_mean": statistics.fmean(values),
                f"{name}_std": statistics.pstdev(values),
                f"{name}_max": max(values),
                f"{name}_min": min(values),
            }
        self._by_name.clear()
        return taken


def length_metrics(lengths: list[int], max_token_len: int) -> dict[str, float]:
    """Metrics of completion lengths in tokens; `_p95` is the share above 95 % of `max_token_len`, as the ancestor has
    it.
    """
    if not lengths:
        return {}
    name = "train/completion_lengths"
    figures = {
        name: statistics.fmean(lengths),
        f"{name}_std": statistics.pstdev(lengths),
        f"{name}_max": float(max(lengths)),
        f"{name}_min": float(min(lengths)),
    }
    if max_token_len > 0:
        figures[f"{name}_p95"] = statistics.fmean(length > 0.95 * max_token_len for length in lengths)
    return figures
