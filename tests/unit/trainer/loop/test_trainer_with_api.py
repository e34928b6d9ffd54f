"""The trainer against the real batching API, with an environment that answers and evaluates at random."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from atroposlib.api.server import create_app
from atroposlib.api.settings import RunApiConfig
from example_trainer import grpo
from example_trainer.loop.run import Run
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights import shards
from tests.client import http
from tests.unit.trainer.fakes import RecordingBridge, item, model_folder

STEPS = 4


@contextlib.contextmanager
def real_api(settings: RunApiConfig | None = None) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(create_app(settings), host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


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


def test_steps_policies_and_evaluations_stay_in_line(tmp_path: Path) -> None:
    with real_api() as url:
        environment = Environment(url)
        environment.start()
        config = TrainerConfig.model_validate(
            dict(
                model_name=model_folder(tmp_path / "model"),
                atropos_url=url,
                training_steps=STEPS,
                batch_size=4,
                gradient_accumulation_steps=1,
                save_path=tmp_path / "checkpoints",
                log_dir=tmp_path / "logs",
                checkpoint_interval=0,
                fetch_timeout=30,
                eval_deadline=30,
            )
        )
        grpo.run(config, RecordingBridge())
        environment.join(10)
        assert not environment.is_alive()

    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert environment.policies == [0, 1, 2, 3, 4]
    assert [(row["policy_version"], row["accuracy"]) for row in rows] == [(1, None), (2, 0.2), (3, None), (4, 0.4)]
    assert all(row["staleness_mean"] == 0 and row["loss"] is not None for row in rows)


@pytest.mark.parametrize(
    ("ack_after", "steps", "again"), [("checkpoint", 8, [2, 3, 4, 5, 6, 7]), ("step", 7, [3, 4, 5, 6, 7])]
)
def test_a_killed_run_resumes_with_the_batches_since_its_checkpoint(
    tmp_path: Path, ack_after: str, steps: int, again: list[int]
) -> None:
    model = model_folder(tmp_path / "model")

    def config(steps: int, resume: str | None, folder: str) -> TrainerConfig:
        return TrainerConfig.model_validate(
            dict(
                model_name=model,
                atropos_url=url,
                training_steps=steps,
                batch_size=4,
                gradient_accumulation_steps=1,
                save_path=tmp_path / "checkpoints",
                log_dir=tmp_path / folder,
                checkpoint_interval=2,
                ack_after=ack_after,
                resume=resume,
                fetch_timeout=30,
                eval_deadline=0,
            )
        )

    def rewards(folder: str) -> list[float]:
        rows = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [round(json.loads(row)["reward_mean"] * 4 - 1) for row in rows]

    class Killed(Exception):
        """Stands for SIGKILL."""

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
    assert rewards("first") == [0, 1, 2]
    assert rewards("second") == again


def post_numbered(url: str, count: int) -> None:
    """Groups whose scores sum to their number + 1."""
    for number in range(count):
        group = item([float(number), 1.0, 0.0, 0.0], seed=number)
        http.post(
            url + "/scored_data", json={key: value for key, value in group.items() if value is not None}, timeout=10
        )


@pytest.mark.parametrize(("opened_at", "again"), [(None, [1, 2, 3, 4]), (3, [2, 3, 4])])
def test_a_batch_is_acknowledged_when_the_checkpoint_that_contains_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened_at: int | None, again: list[int]
) -> None:
    """Checkpoints are written while training continues. The run dies in step 4, before or after step 2's is done."""
    model, gate, cut = model_folder(tmp_path / "model"), threading.Event(), shards._cut
    saves: list[int] = []

    def late(blocks: list[memoryview]) -> Iterator[memoryview]:
        saves.append(len(blocks))
        if len(saves) == 2:
            gate.wait(20)
        yield from cut(blocks)

    class Killed(Exception):
        """Stands for SIGKILL."""

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
            model_name=model,
            atropos_url=url,
            training_steps=5,
            batch_size=4,
            gradient_accumulation_steps=1,
            save_path=tmp_path / "checkpoints",
            log_dir=tmp_path / folder,
            checkpoint_interval=100,
            checkpoint_format="sharded",
            fetch_timeout=30,
            eval_deadline=0,
        )
        with contextlib.suppress(Killed):
            grpo.run(TrainerConfig.model_validate(settings | changes), bridge)
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [round(json.loads(line)["reward_mean"] * 4 - 1) for line in lines]

    monkeypatch.setattr(shards, "_cut", late)
    monkeypatch.setattr(shards, "STOP_S", 0.1)
    monkeypatch.setattr(Run, "is_due", lambda run, step: step in (1, 2))
    with real_api() as url:
        post_numbered(url, 8)
        assert run("first", Bridge()) == [0, 1, 2]
        gate.set()
        assert run("second", RecordingBridge(), resume="latest") == again
