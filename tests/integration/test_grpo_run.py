"""`atropos-grpo-run` with a real vLLM server: it trains a step in vLLM's own memory and leaves no process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import REPOSITORY, session_members
from tests.serving import free_port
from tests.unit.trainer.fakes import FakeApi, item, serve

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(700)]


def test_one_command_starts_vllm_trains_and_ends_it(llama_folder: Path, tmp_path: Path) -> None:
    api = FakeApi(lambda number: [item([1.0, 0.0, 0.0, 1.0], seed=number)])
    with serve(api) as url:
        flags = f"--model {llama_folder} --training-steps 1 --max-model-len 256 --seq-len 64 --device cpu"
        flags += f" --atropos-url {url} --vllm-port {free_port()} --batch-size 4 --gradient-accumulation-steps 1"
        done = subprocess.run(
            [sys.executable, "-m", "example_trainer.grpo_run", *flags.split()],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "Step 1/1" in said
    assert "Policy version 1 is served: stall" in said
    assert [step["policy_version"] for step in api.steps][-1] == 1
    assert (tmp_path / "trained_model_checkpoints/final_model/model.safetensors").is_file()
    pid = int(said.split("Started vLLM (pid ")[1].split(",")[0])
    assert session_members(pid) == []
