"""Whole runs of the trainer in this process: settings, a fake or the real batching API, and what a run has written."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from atroposlib.api.server import create_app
from atroposlib.api.settings import RunApiConfig
from example_trainer import grpo
from example_trainer.settings.config import TrainerConfig
from tests.serving import threaded_app
from tests.unit.trainer.fakes import FakeApi, RecordingBridge, item, serve


def feed(step: int) -> list[dict[str, Any]]:
    """The batch of a step, from 0: two groups, one without a signal; policy versions as if sampled from the previous
    one.
    """
    return [
        item([1.0, 0.0, 0.0, 1.0], seed=10 + step, policy_versions=[[max(step - 1, 0), step]] * 4),
        item([0.0, 0.0, 0.0, 0.0], seed=50 + step),
    ]


def config(model: str, folder: Path, url: str, **changes: Any) -> TrainerConfig:
    """Settings of a short run that writes to `folder`."""
    settings: dict[str, Any] = dict(
        model_name=model,
        atropos_url=url,
        training_steps=4,
        batch_size=8,
        gradient_accumulation_steps=1,
        lr=1e-2,
        warmup_steps=3,
        save_path=folder / "checkpoints",
        log_dir=folder / "logs",
        checkpoint_interval=0,
        api_timeout=5,
        fetch_timeout=5,
        micro_batch_tokens=24,
    )
    return TrainerConfig.model_validate(settings | changes)


def train(
    model: str,
    folder: Path,
    first_step: int = 0,
    api: FakeApi | None = None,
    bridge: RecordingBridge | None = None,
    **changes: Any,
) -> FakeApi:
    """Run the trainer on the batches of `feed`, or of an API of its own."""
    api = api or FakeApi(lambda delivered: feed(first_step + delivered))
    with serve(api) as url:
        grpo.run(config(model, folder, url, **changes), bridge or RecordingBridge())
    return api


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, one row per step."""
    return [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model's directory."""
    return load_file(folder / "model.safetensors")


@contextlib.contextmanager
def real_api(settings: RunApiConfig | None = None, journal: Path | None = None) -> Iterator[str]:
    """Serve the real batching API in a thread; its URL."""
    with threaded_app(create_app(settings, journal=journal)) as port:
        yield f"http://127.0.0.1:{port}"
