"""The launchers of whole training runs: their flags, and which settings they give the services; no service is
started.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from atroposlib.config import resolve_config
from example_trainer.config import TrainerConfig

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[3]
LAUNCHERS = sorted(path.name for path in (ROOT / "scripts").glob("run_gsm8k_*.sh"))
MODES = {
    "run_gsm8k_broadcast.sh": "--weight-bridge-mode shared_vllm --use-shared-memory",
    "run_gsm8k_lora.sh": "--weight-bridge-mode lora_only",
    "run_gsm8k_lora_restart.sh": "--weight-bridge-mode lora_restart",
    "run_gsm8k_reload.sh": "--weight-bridge-mode reload",
    "run_gsm8k_restart.sh": "--weight-bridge-mode none",
    "run_gsm8k_single_copy.sh": "--weight-bridge-mode shared_vllm --single-copy",
}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


def settings(script: str, *flags: str, gpus: int = 0) -> dict[str, str]:
    """What the script would give each service, by service, on a machine with that many GPUs."""
    path = ROOT / "scripts" / script
    launcher = path.read_text().replace('train "$@"', "", 1).replace("${BASH_SOURCE[0]}", str(path))
    plan = """
    parse_flags "$@"; check_flags
    gpus=$GPUS api_port=8000 vllm_port=9001 run_dir=/run
    if [[ -z $model ]]; then
      if ((gpus)) && [[ $dataset != arithmetic ]]; then model=$default_gpu_model; else model=/quickstart; fi
    fi
    choose_model; vllm_flags=(); task_settings; device_settings; service_settings
    echo "vllm $vllm_gpus: ${vllm_flags[*]}"
    echo "trainer $trainer_gpus: ${trainer_flags[*]}"
    echo "env ${env_flags[*]}"
    """
    done = subprocess.run(
        ["bash", "-c", launcher + plan, script, *flags],
        env={**os.environ, "GPUS": str(gpus)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return {line.split(" ", 1)[0]: line for line in done.stdout.splitlines()}


def test_every_mode_has_its_script() -> None:
    assert sorted(MODES) == LAUNCHERS


@pytest.mark.parametrize("script", LAUNCHERS)
def test_help_says_what_the_mode_does_and_every_flag(script: str) -> None:
    shown = run([str(ROOT / "scripts" / script), "--help"]).stdout
    assert shown.startswith(f"Usage: scripts/{script} [MODEL]")
    assert "--weight-bridge-mode" in shown
    assert "GPU" in shown
    for flag in ("--steps", "--dataset", "--dataset-path", "--run-name", "--seed", "--api-port", "--vllm-port"):
        assert f"\n  {flag}" in shown or f", {flag}" in shown, flag


@pytest.mark.parametrize("script", ["quickstart.sh", *LAUNCHERS])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stepz", "3"], "unknown flag --stepz; did you mean --steps?"),
        (["--steps", "0"], "--steps expects a whole number of at least 1, got '0'"),
        (["--steps"], "--steps expects a value"),
        (["--seed=x"], "--seed expects a whole number of at least 1, got 'x'"),
        (["--dataset", "mmlu"], "--dataset expects arithmetic or gsm8k, got 'mmlu'"),
        (["--dataset", "gsm8k", "--dataset-path", "x"], "exclude each other"),
        (["--dataset-path", "/nowhere.jsonl"], "--dataset-path /nowhere.jsonl does not exist"),
        (["--model", "/nowhere"], "--model /nowhere has no config.json"),
        (["one", "two"], "one MODEL only, got 'one' and 'two'"),
        (["--run-name", "../x"], "--run-name takes letters"),
        (["--dtype", "int8"], "--dtype expects float32 or bfloat16, got 'int8'"),
        (["--vllm-port=99999"], "--vllm-port expects a port from 1 to 65535, got '99999'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(script: str, flags: list[str], message: str) -> None:
    done = run([str(ROOT / "scripts" / script), *flags])
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("script", LAUNCHERS)
def test_each_script_gives_the_trainer_its_mode(script: str) -> None:
    assert MODES[script] in settings(script)["trainer"]


@pytest.mark.parametrize("script", LAUNCHERS)
def test_the_trainer_knows_every_flag_that_it_is_given(script: str) -> None:
    words = settings(script)["trainer"].split(" ", 2)[2]
    words = re.sub(r"(--vllm-flags=)(.*?) (?=--model-name)", r"'\1\2' ", words)  # one word, of several flags
    config, _ = resolve_config(TrainerConfig, shlex.split(words), prog="grpo")
    assert f"--weight-bridge-mode {type(config.bridge).typed}" == MODES[script]
    shared = {
        "model_name": "/quickstart",
        "training_steps": 100,
        "batch_size": 8,
        "gradient_accumulation_steps": 8,
        "adam_betas": (0.9, 0.95),
        "seq_len": 1024,
        "lr": 1e-4 if "lora" in script else 1e-6,
        "seed": 1,
        "atropos_url": "http://127.0.0.1:8000",
        "vllm_host": "127.0.0.1",
        "vllm_port": 9001,
        "vllm_start_timeout": 1800,
        "checkpoint_interval": 20,
        "save_path": Path("/run/checkpoints"),
        "log_dir": Path("/run"),
        "metrics_path": Path("/run/metrics.jsonl"),
    }
    assert {name: getattr(config, name) for name in shared} == shared
    own: dict[str, object] = {"r": 16, "alpha": 32} if "lora" in script else {}
    if "restart" in script:
        flags = "--max-model-len 1024 --dtype float32 --block-size 32 --max-num-seqs 64 --seed 1"
        own |= {"restart_interval": 10, "vllm_flags": flags}
    assert {name: getattr(config.bridge, name) for name in own} == own


@pytest.mark.parametrize("script", ["quickstart.sh", "run_gsm8k_broadcast.sh"])
def test_batch_invariant_reaches_both_sides(script: str) -> None:
    given = settings(script, "--batch-invariant", "--steps", "2")
    assert given["vllm"].endswith(" --batch-invariant") or " --batch-invariant " in given["vllm"]
    assert "--batch-invariant --bit-exact strict" in given["trainer"]
    assert "--training-steps 2" in given["trainer"]


@pytest.mark.parametrize("gpus", [0, 1])
def test_vllm_computes_in_the_dtype_that_is_asked_for(gpus: int) -> None:
    usual = settings("quickstart.sh", gpus=gpus)["vllm"]
    assert f"--dtype {'bfloat16' if gpus else 'float32'} " in usual
    for dtype in ("float32", "bfloat16"):
        assert f"--dtype {dtype} " in settings("quickstart.sh", "--dtype", dtype, gpus=gpus)["vllm"]


@pytest.mark.parametrize("script", LAUNCHERS)
def test_arithmetic_is_the_quickstarts_task_in_every_mode(script: str) -> None:
    plain, mode = settings("quickstart.sh"), settings(script, "--dataset", "arithmetic")
    assert mode["env"] == plain["env"]
    assert "--training-steps 20" in mode["trainer"]
    assert "--batch-size 8 --gradient-accumulation-steps 8" in mode["trainer"]


def test_gpus_are_spread_over_vllm_and_trainer() -> None:
    one, two, three = (settings("run_gsm8k_broadcast.sh", gpus=gpus) for gpus in (1, 2, 3))
    assert one["vllm"].startswith("vllm 0:")
    assert "--gpu-memory-utilization 0.4" in one["vllm"]
    assert one["trainer"].startswith("trainer 0:")
    assert "--bridge-backend gloo" in one["trainer"]
    assert two["vllm"].startswith("vllm 0:")
    assert two["trainer"].startswith("trainer 1:")
    assert three["vllm"].startswith("vllm 0,1:")
    assert "--tensor-parallel-size 2" in three["vllm"]
    assert three["trainer"].startswith("trainer 2:")
    assert "gloo" not in three["trainer"]
    small = settings("run_gsm8k_broadcast.sh", "--dataset", "arithmetic", gpus=3)
    assert "--tensor-parallel-size" not in small["vllm"]
    assert small["trainer"].startswith("trainer 1:")


def test_a_single_copy_is_trained_where_vllm_serves_it() -> None:
    for gpus, where in ((1, "0"), (2, "0"), (3, "0,1")):
        found = settings("run_gsm8k_single_copy.sh", gpus=gpus)
        assert found["vllm"].startswith(f"vllm {where}:")
        assert found["trainer"].startswith(f"trainer {where}:")
        assert "gloo" not in found["trainer"]


def test_only_visible_gpus_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    found = settings("run_gsm8k_broadcast.sh", gpus=3)
    assert found["vllm"].startswith("vllm 4,6:")
    assert found["trainer"].startswith("trainer 7:")


def test_a_trainer_that_owns_vllm_is_given_its_flags_and_gpus() -> None:
    alone, two = (settings("run_gsm8k_restart.sh", "--dataset", "arithmetic", gpus=gpus)["trainer"] for gpus in (0, 2))
    assert "--vllm-flags=--max-model-len 256 --dtype float32" in alone
    assert "--vllm-gpu" not in alone
    assert two.startswith("trainer 1:")
    assert "--vllm-gpu 0 " in two
    assert "--vllm-restart-interval 1 " in alone
    assert "--vllm-restart-interval 10 " in settings("run_gsm8k_restart.sh")["trainer"]


def test_the_page_on_bridges_names_every_launcher_and_its_commands_are_understood() -> None:
    page = (ROOT / "docs/bridges.md").read_text()
    assert all(
        f"`scripts/{script}`" in page and MODES[script].removeprefix("--weight-bridge-mode ") in page
        for script in LAUNCHERS
    )
    commands = re.findall(r"^scripts/run_gsm8k_.*$", page, re.MULTILINE)
    assert commands
    for command in commands:
        done = run([*shlex.split(command), "--help"])
        assert done.returncode == 0, command
        assert done.stdout.startswith("Usage: "), command
