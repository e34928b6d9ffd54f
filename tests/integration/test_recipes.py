"""Every recipe trains one step on two cores, with a tiny model; quickstart.yaml, and arithmetic.yaml below it, do so in
test_quickstart.py, gsm8k_restart.yaml in test_training_scripts.py, verifiers.yaml in test_verifiers.py.
"""

import json
import shlex
import shutil
import sys
import uuid
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from tests.integration.conftest import REPOSITORY, SHAPE, save_tiny_model
from tests.integration.launched import launch
from tests.integration.trainer_process import PARITY, parities
from tests.serving import free_port

pytestmark = pytest.mark.timeout(700)

ARITHMETIC = ["--dataset", "arithmetic"]
SHORT = ["--env.max_new_tokens", "16", "--env.steps_per_eval", "0", "--env.eval_at_start", "false"]
AGENT = """
import json, os, sys, urllib.request as http
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
reply = http.urlopen(http.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)).read()
print(json.loads(reply)["choices"][0]["message"]["content"])
"""
RECIPES = {
    "agent": ["--env.command", shlex.join([sys.executable, "-c", AGENT, "{task}"]), *SHORT],
    "two_servers": [],
    "two_environments": ["--trainer.batch_size", "4", "--environments.letters.max_new_tokens", "16"],
    "gsm8k_lora": [*ARITHMETIC],
    "countdown": [*SHORT, "--vllm.max_model_len", "512", "--env.ensure_scores_are_not_same", "false"],
    "gsm8k": [*ARITHMETIC],
    "gsm8k_broadcast": [*ARITHMETIC],
    "gsm8k_single_copy": [*ARITHMETIC],
    "gsm8k_reload": [*ARITHMETIC],
    "gsm8k_lora_restart": [*ARITHMETIC],
    "lora_24gb": [*ARITHMETIC, "--vllm.gpu_memory_utilization", "null"],
}
ALWAYS = ("agent", "two_environments")  # the others' bridges have tests of their own


@pytest.mark.rotating
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=[] if recipe in ALWAYS else pytest.mark.nightly) for recipe in RECIPES],
)
def test_a_recipe_trains_one_step(recipe: str, llama_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / f"{recipe}-{uuid.uuid4().hex[:8]}"
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port())]
    where = ["--runs", str(tmp_path), "--run-name", run.name]
    words = [recipe, str(llama_folder), "--steps", "1", *ports, *where, *RECIPES[recipe]]
    done = launch("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "Step 1/1" in done.stdout
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["policy_version"] == 1
    (start,) = json.loads((run / "run.json").read_text())["starts"]
    assert start["seed"] == 1
    assert (run / "reward.png").exists()
    assert list(run.glob("checkpoints/final_*/*.safetensors"))
    assert not (run / "pids").exists()
    shutil.rmtree(run)


@pytest.mark.nightly
@pytest.mark.parametrize("bridge", ["reload", "restart", "lora", "lora_restart"])
def test_two_trainer_ranks_hand_their_weights_over_by_every_bridge(bridge: str, tmp_path: Path) -> None:
    run = tmp_path / f"ranks-{uuid.uuid4().hex[:8]}"  # broadcast has a test of its own
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port())]
    where = ["--runs", str(tmp_path), "--run-name", run.name, "--bridge", bridge, "--trainer-ranks", "2"]
    done = launch("train", "arithmetic", "--steps", "1", *SHORT, *ports, *where, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["policy_version"] == 1
    assert row["grad_norm"] > 0
    said = (run / "trainer.log").read_text()
    assert "Got 2 trainer ranks" in said
    assert said.count("Parity: vLLM's and the trainer's log-probabilities") == 2  # at the start, and of the new weights
    assert list(run.glob("checkpoints/final_*/*.safetensors"))
    shutil.rmtree(run)


def train_split(model: Path, folder: Path, steps: int, *flags: str) -> tuple[Path, str]:
    """A run whose trainer ranks split layers, with a gradient in every step: its directory and the trainer's log."""
    run = folder / f"split-{uuid.uuid4().hex[:8]}"
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port())]
    where = ["--runs", str(folder), "--run-name", run.name, "--tp-size", "2"]
    words = [str(model), "--steps", str(steps), "--trainer.lr", "1e-3", "--trainer.checkpoint-interval", "1"]
    same = ["--env.ensure_scores_are_not_same", "false", "--trainer.entropy-coef", "0.01"]
    done = launch("train", "arithmetic", *words, *SHORT, *same, *ports, *where, *flags, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy_version"] for row in rows] == list(range(1, steps + 1))
    assert all(row["grad_norm"] > 0 for row in rows)
    assert list(run.glob("checkpoints/final_*/*.safetensors"))
    said = (run / "trainer.log").read_text()
    assert len(parities(said)) == 2  # at the start, and of the new weights
    return run, said


@pytest.mark.nightly
@pytest.mark.parametrize(("bridge", "ranks"), [("broadcast", 2), ("broadcast", 4), ("reload", 2), ("lora", 2)])
def test_ranks_that_split_layers_hand_their_weights_over(
    bridge: str, ranks: int, llama_folder: Path, tmp_path: Path
) -> None:
    """Of four ranks, two share each half."""
    run, said = train_split(llama_folder, tmp_path, 2, "--bridge", bridge, "--trainer-ranks", str(ranks))
    assert f"Got {ranks} trainer ranks" in said
    if bridge == "broadcast":
        assert f"{ranks} trainer ranks send what they hold (direct)" in said
        assert max(parities(said)) <= PARITY
    shutil.rmtree(run)


@pytest.mark.nightly
def test_ranks_that_split_layers_train_the_memory_of_as_many_ranks_of_vllm(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE | {"vocab_size": 1024}, tie_word_embeddings=False)  # which vLLM does not pad
    model = save_tiny_model(tmp_path / "model", config)
    run, said = train_split(model, tmp_path, 3, "--bridge", "single_copy")
    assert "Got 2 trainer ranks" in said
    flags = yaml.safe_load((run / "vllm.yaml").read_text())
    assert flags[flags.index("--tensor-parallel-size") + 1] == "2"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["sync_bytes"] for row in rows] == [0, 0, 0]
    assert max(parities(said)) <= PARITY
    shutil.rmtree(run)


@pytest.mark.nightly
def test_an_environment_of_ones_own_is_trained_by_its_file(llama_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "my_server.py"
    mine.write_text((REPOSITORY / "environments/template_server.py").read_text())
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port()), "--run-name", "mine"]
    words = ["arithmetic", str(llama_folder), "--env.file", mine.name, "--steps", "1", "--trainer.lr", "1e-3"]
    done = launch("train", *words, *ports, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "Step 1/1" in done.stdout
    assert "lr: 0.001\n" in (tmp_path / "runs/mine/trainer.yaml").read_text()
    assert "group_size: 8\n" in (tmp_path / "runs/mine/env.yaml").read_text()


@pytest.mark.nightly
def test_a_model_is_evaluated_without_training(llama_folder: Path, tmp_path: Path) -> None:
    words = ["arithmetic", str(llama_folder), "--vllm-port", str(free_port()), "--runs", str(tmp_path)]
    done = launch("evaluate", *words, "--run-name", "measured", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert (tmp_path / "measured/evaluation_env/table.txt").read_text() in done.stdout
    assert (tmp_path / "measured/evaluation_env/metrics.json").is_file()


@pytest.mark.nightly
def test_a_run_is_resumed_from_its_checkpoint(llama_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "resumed"
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port())]
    words = ["arithmetic", str(llama_folder), "--trainer.checkpoint_interval", "1", "--runs", str(tmp_path)]
    first = launch("train", *words, *ports, "--steps", "1", "--run-name", run.name, cwd=tmp_path)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-2000:]
    second = launch("train", "--resume", str(run), "--steps", "2", cwd=tmp_path)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-2000:]
    assert "Step 2/2" in second.stdout
    assert "Step 1/2" not in second.stdout
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert len(json.loads((run / "run.json").read_text())["starts"]) == 2
