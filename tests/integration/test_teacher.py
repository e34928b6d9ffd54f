"""A run with a teacher beside it, on two real vLLM servers: what the teacher says reaches the loss as what it is."""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.integration.conftest import save_tiny_model
from tests.integration.launched import launch
from tests.integration.test_recipes import SHORT
from tests.serving import free_port

pytestmark = pytest.mark.timeout(700)
ROUNDING = 1e-3  # nats, between vLLM's and the trainer's log-probabilities in float32
STEPS = 2


def taught(student: Path, teacher: Path, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    run = folder / f"taught-{uuid.uuid4().hex[:8]}"
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port()), "--teacher.port", str(free_port())]
    where = ["--runs", str(folder), "--run-name", run.name, "--teacher.model", str(teacher)]
    distil = ["--trainer.distill-coef", "1", "--trainer.reward-coef", "0", "--trainer.lr", "1e-3"]
    done = launch(
        "train", "arithmetic", str(student), "--steps", str(STEPS), *SHORT, *ports, *where, *distil, *flags, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "| teacher KL " in done.stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy_version"] for row in rows] == [1, 2]
    assert not any(row["rejected_groups"] for row in rows)
    shutil.rmtree(run)
    return rows


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["reverse_kl", "forward_kl"])
def test_a_model_that_teaches_itself_finds_nothing_to_teach(form: str, llama_folder: Path, tmp_path: Path) -> None:
    """Temperature, positions and tokens agree: any shift of one of them would be a KL of nats."""
    rows = taught(llama_folder, llama_folder, tmp_path, "--trainer.distill", form)
    assert abs(rows[0]["teacher_kl"]) < ROUNDING


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["reverse_kl", "forward_kl"])
def test_another_model_teaches(form: str, llama_folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(llama_folder)
    config.initializer_range = 0.2  # the student's is smaller: it is nearly uniform
    other = save_tiny_model(tmp_path / "other", config)
    rows = taught(llama_folder, other, tmp_path, "--trainer.distill", form)
    assert rows[0]["teacher_kl"] > 10 * ROUNDING
    assert all(row["grad_norm"] > 0 for row in rows)
