"""The trainer against the real batching API, with an environment that answers and evaluates at random."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from example_trainer import grpo
from example_trainer.loop.run import Run
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights import shards
from tests.client import http
from tests.unit.trainer import whole_runs
from tests.unit.trainer.fakes import RecordingBridge, item
from tests.unit.trainer.whole_runs import real_api, rows

STEPS = 4


class Killed(Exception):
    """Stands for SIGKILL."""


def config_of(model: str, folder: Path, url: str, **changes: Any) -> TrainerConfig:
    settings: dict[str, Any] = dict(batch_size=4, warmup_steps=0, lr=1e-5, fetch_timeout=30, eval_deadline=0)
    return whole_runs.config(model, folder, url, **settings | changes)


def rewards(folder: Path) -> list[int]:
    """Of each step, the number of its group."""
    return [round(row["reward_mean"] * 4 - 1) for row in rows(folder)]


class Environment(threading.Thread):
    """Joins, evaluates at the start and every second policy, posts one group a policy version, leaves at the end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.policies: list[int] = []

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        reply = http.post(self.url + path, json=body, timeout=10)
        reply.raise_for_status()
        content: dict[str, Any] = reply.json()
        return content

    def run(self) -> None:
        joined = {"status": "wait"}
        announced = dict(
            desired_name="dice", weight=1.0, max_token_length=64, group_size=4, steps_per_eval=2, eval_at_start=True
        )
        while joined["status"] != "success":
            time.sleep(0.02)
            joined = self.post("/register-env", **announced)
        me: dict[str, Any] = {"env_id": joined["env_id"]}
        while not self.policies or self.policies[-1] < STEPS:
            version = self.post("/status-env", **me)["policy_version"]
            if self.policies[-1:] == [version]:
                time.sleep(0.02)
                continue
            self.policies.append(version)
            if version % 2 == 0:
                time.sleep(0.2)  # an evaluation takes a while
                self.post("/evaluation", **me, policy_version=version, accuracy=version / 10, metrics={})
            if version < STEPS:
                group = item([1.0, 0.0, 0.5, 0.0], seed=version, policy_versions=[[version, version]] * 4)
                self.post("/scored_data", **{key: value for key, value in group.items() if value is not None} | me)
        self.post("/disconnect-env", **me)


def test_steps_policies_and_evaluations_stay_in_line(model: str, tmp_path: Path) -> None:
    with real_api() as url:
        environment = Environment(url)
        environment.start()
        grpo.run(config_of(model, tmp_path, url, training_steps=STEPS, eval_deadline=30), RecordingBridge())
        environment.join(10)
        assert not environment.is_alive()

    found = rows(tmp_path)
    assert environment.policies == [0, 1, 2, 3, 4]
    assert [(row["policy_version"], row["accuracy"]) for row in found] == [(1, None), (2, 0.2), (3, None), (4, 0.4)]
    assert all(row["staleness_mean"] == 0 and row["loss"] is not None for row in found)


@pytest.mark.parametrize(
    ("ack_after", "steps", "again"), [("checkpoint", 8, [2, 3, 4, 5, 6, 7]), ("step", 7, [3, 4, 5, 6, 7])]
)
def test_a_killed_run_resumes_with_the_batches_since_its_checkpoint(
    model: str, tmp_path: Path, ack_after: str, steps: int, again: list[int]
) -> None:

    def config(steps: int, resume: str | None, folder: str) -> TrainerConfig:
        settings: dict[str, Any] = dict(checkpoint_interval=2, ack_after=ack_after, resume=resume)
        return config_of(model, tmp_path, url, training_steps=steps, log_dir=tmp_path / folder / "logs", **settings)

    class DyingBridge(RecordingBridge):
        def sync(self, policy_version: int, update: Any) -> Any:
            report = super().sync(policy_version, update)
            if policy_version == 4:
                raise Killed
            return report

    with real_api() as url:
        post_numbered(url, 8)
        with contextlib.suppress(Killed):
            grpo.run(config(8, None, "first"), DyingBridge())
        grpo.run(config(steps, "latest", "second"), RecordingBridge())
    assert rewards(tmp_path / "first") == [0, 1, 2]
    assert rewards(tmp_path / "second") == again


def post_numbered(url: str, count: int) -> None:
    """Groups whose scores sum to their number + 1."""
    for number in range(count):
        group = item([float(number), 1.0, 0.0, 0.0], seed=number)
        http.post(
            url + "/scored_data", json={key: value for key, value in group.items() if value is not None}, timeout=10
        )


@pytest.mark.parametrize(("opened_at", "again"), [(None, [1, 2, 3, 4]), (3, [2, 3, 4])])
def test_a_batch_is_acknowledged_when_the_checkpoint_that_contains_it_is_on_the_disk(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened_at: int | None, again: list[int]
) -> None:
    """Checkpoints are written while training continues. The run dies in step 4, before or after step 2's is done."""
    gate, cut = threading.Event(), shards._cut
    saves: list[int] = []

    def late(blocks: list[memoryview]) -> Iterator[memoryview]:
        saves.append(len(blocks))
        if len(saves) == 2:
            gate.wait(20)
        yield from cut(blocks)

    class Bridge(RecordingBridge):
        def sync(self, policy_version: int, update: Any) -> Any:
            if policy_version == opened_at:
                gate.set()
                time.sleep(0.5)
            if policy_version == 4:
                raise Killed
            return super().sync(policy_version, update)

    def run(folder: str, bridge: RecordingBridge, **changes: Any) -> list[int]:
        settings: dict[str, Any] = dict(
            training_steps=5, log_dir=tmp_path / folder / "logs", checkpoint_interval=100, checkpoint_format="sharded"
        )
        with contextlib.suppress(Killed):
            grpo.run(config_of(model, tmp_path, url, **settings | changes), bridge)
        return rewards(tmp_path / folder)

    monkeypatch.setattr(shards, "_cut", late)
    monkeypatch.setattr(shards, "STOP_S", 0.1)
    monkeypatch.setattr(Run, "is_due", lambda run, step: step in (1, 2))
    with real_api() as url:
        post_numbered(url, 8)
        assert run("first", Bridge()) == [0, 1, 2]
        gate.set()
        assert run("second", RecordingBridge(), resume="latest") == again
