"""Single copy by ranks on a real vLLM of two: each trainer rank trains the memory of its own vLLM rank."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from example_trainer.bridges.parity import parity
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.check_served_weights import finding
from example_trainer.weights.written import TrainedModel
from tests.integration.conftest import API_KEY, REPOSITORY, SHAPE, Server, save_tiny_model, start_server, stop_server
from tests.integration.namespaces import tied
from tests.integration.test_bridge import PROMPT
from tests.integration.trainer_process import PARITY
from tests.unit.trainer.fakes import FakeApi, item, serve

pytestmark = pytest.mark.nightly

STEPS = 20


@pytest.fixture(scope="module", params=[2, 1])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of two ranks, for so many key-value heads: both hold the only one."""
    shape = SHAPE | {"vocab_size": 1024, "num_key_value_heads": request.param, "head_dim": 32}
    config = Qwen3Config(**shape, tie_word_embeddings=True)
    model = save_tiny_model(tmp_path_factory.mktemp("qwen3"), config)
    started = start_server(model, tmp_path_factory.mktemp("vllm"), "--tensor-parallel-size", "2")
    yield started
    stop_server(started)


def train(server: Server, folder: Path, tp: int = 2, steps: int = STEPS, drill: str = "") -> tuple[int, str]:
    """Exit status and output of trainer ranks that split layers."""
    program = ["-m", "tests.unit.trainer.drilled_trainer"] if drill else ["example_trainer/grpo.py"]
    with serve(FakeApi(lambda number: [item([1.0, 0.0, 0.0, 1.0], seed=number)])) as url:
        done = subprocess.run(
            tied(
                [
                    *(sys.executable, "-u", *program, "--tp-size", str(tp), "--model-name", server.model),
                    *("--weight-bridge-mode", "shared_vllm", "--single-copy", "--vllm-port", str(server.port)),
                    *("--atropos-url", url, "--training-steps", str(steps), "--checkpoint-interval", "0"),
                    *("--batch-size", "4", "--gradient-accumulation-steps", "1", "--eval-deadline", "0"),
                    *("--save-path", str(folder / "save"), "--log-dir", str(folder / "logs"), "--device", "cpu"),
                    *("--dist-timeout-s", "60", "--lr", "1e-4", "--threads", "1"),
                ]
            ),
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "VLLM_API_KEY": API_KEY, "DRILL": drill},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_twenty_steps_move_no_bytes_and_vllm_agrees(server: Server, tmp_path: Path) -> None:
    """What no bytes rest on: after each sync all parameters lie in vLLM's memory, and what is in there is what the
    trainer has written at its end.
    """
    status, said = train(server, tmp_path, drill="0 settle TELL")
    assert status == 0, said[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    assert [row["sync_bytes"] for row in rows] == [0] * STEPS
    assert sum(row["grad_norm"] is not None and row["grad_norm"] > 0 for row in rows) >= STEPS // 2
    found = [float(value) for value in re.findall(r"log-probabilities differ by (\S+) nats", said)]
    assert len(found) == 2 + STEPS // 10  # of the first two policies, and every --probe-every steps
    assert max(found) <= PARITY, found
    assert server.status()["policy_version"] == STEPS
    parameters = len(load_file(f"{server.model}/model.safetensors"))
    # of each rank, in each sync; the start weights are one, which is checked twice
    assert re.findall(r"TOLD (.*)", said) == [f"[{parameters}, {parameters}]"] * (STEPS + 2)
    final = str(tmp_path / "save/final_model")
    vllm = VllmClient("127.0.0.1", server.port, API_KEY, 60.0)
    compared = finding(vllm, final)
    assert compared["level"] == "ok", compared
    assert f"policy version {STEPS}, 0 of {parameters} tensors differ" in compared["found"]
    assert finding(vllm, server.model)["level"] == "fail"  # the start weights, which it no longer holds
    model = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    assert parity(TrainedModel(model), vllm) <= PARITY


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("drill", "error"),
    [
        ("1 update KILL", "trainer rank 1 of 2 was ended by SIGKILL"),
        ("0 update MemoryError", "out of memory"),  # before it writes, while the other rank may have written
    ],
)
def test_a_rank_that_fails_in_an_update_leaves_a_server_that_the_next_trainer_repairs(
    server: Server, tmp_path: Path, drill: str, error: str
) -> None:
    status, said = train(server, tmp_path, drill=drill)
    assert status == 1, said[-3000:]
    assert f"grpo: error: {error}" in said
    assert server.status()["poisoned"] is not None
    status, said = train(server, tmp_path, steps=1)
    assert status == 0, said[-3000:]
    assert server.status()["poisoned"] is None
    assert server.generate(PROMPT, max_tokens=4)["token_ids"]


def test_another_number_of_ranks_is_refused_with_the_remedy(server: Server, tmp_path: Path) -> None:
    status, said = train(server, tmp_path, tp=1, steps=1)
    assert status == 0, said[-3000:]  # one process takes the parts of all ranks
    status, said = train(server, tmp_path, tp=4)
    assert status == 1
    assert "--tp-size 4, but the vLLM server at" in said
    assert "has 2 rank(s): give --tp-size 2, or --tp-size 1" in said
