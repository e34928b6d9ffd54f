"""docs/run_directory.md names every field that a run writes, and no other."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from atropos_launcher.run_record import record
from atroposlib.envs.data.data_report import DataReport
from atroposlib.envs.evaluation.evaluation import Evaluation, EvaluationFailed, held_out_row
from atroposlib.envs.payloads import WIRE_FIELDS
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import CountingEnv, config, server_config
from tests.unit.envs.run.test_sample_rows import Link, rows, served
from tests.unit.trainer.fakes import model_folder
from tests.unit.trainer.output.test_trained_rows import written
from tests.unit.trainer.whole_runs import rows as metric_rows
from tests.unit.trainer.whole_runs import train

DOCS = Path(__file__).parents[3] / "docs"


def documented(section: str) -> set[str]:
    """The fields of a section's table."""
    page = (DOCS / "run_directory.md").read_text()
    (text,) = re.findall(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


async def test_samples_and_held_out_answers(tmp_path: Path) -> None:
    found: set[str] = set()
    for number, answers in enumerate((["7", "8"], ["?"], ["7", "?", "8", "8"])):
        folder = tmp_path / str(number)
        async with served(folder, answers, held_out_path=str(folder / "held_out.jsonl")) as env:
            await env.handle_env("7")
            with contextlib.suppress(
                EvaluationFailed
            ):  # where no answer has a score; its rows are written all the same
                await env.evaluate()
            env._env_run.write_held_out(1)
        found |= {name for row in rows(folder) for name in row}
    async with FakeInferenceServer() as server:  # an environment whose samples have no messages
        path = str(tmp_path / "samples.jsonl")
        env = CountingEnv(config(tmp_path, "", data_path_to_save_groups=path), server_config(server))
        async with env._env_run as run:
            run.link = Link()  # type: ignore[assignment]
            await env.handle_env(3)
    found |= {name for row in rows(tmp_path) for name in row}
    assert "texts" in found
    names = documented("`samples.jsonl`")
    assert found - {"texts"} <= names  # which is named beside `messages`
    assert names <= found | set(WIRE_FIELDS) | {"unwritable", "rewards"}  # `rewards` where it has named ones
    held_out = {name for number in "01" for row in rows(tmp_path / number, "held_out.jsonl") for name in row}
    assert documented("`held_out.jsonl`") - {"rewards"} == (held_out | held_out_row(0, {}).keys()) - {"rewards"}


def test_evaluations() -> None:
    assert documented("`evaluations.jsonl`") == Evaluation(1, 1, 0.5, {}, 1.0).record("e").keys()


def test_metrics_and_trained_groups(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    train(model_folder(tmp_path / "model", tie_word_embeddings=True), tmp_path, training_steps=1)
    assert documented("`trained.jsonl`") == written(tmp_path)[0].keys()
    assert metric_rows(tmp_path)[0].keys() <= documented("`metrics.jsonl`")


@pytest.mark.services
def test_the_record_of_a_start() -> None:
    found: Any = json.loads(json.dumps(record(1, "m", [], [])))
    looked = DataReport("a.jsonl").as_json()
    assert documented("`run.json`") == found.keys() | looked.keys()
