"""`atropos-grpo-run` with a server program that is not vLLM: what it starts, what it refuses, and what it leaves."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from atroposlib.config import resolve_config
from example_trainer import grpo_run
from example_trainer.errors import TrainerError
from example_trainer.settings.config import TrainerConfig
from tests.serving import free_port
from tests.unit.trainer.fakes import model_folder

FAKE = Path(__file__).with_name("bridges") / "fake_vllm_server.py"
OLD_FLAGS = (
    "--model M --vllm-port 9005 --vllm-gpu-memory-utilization 0.3 --max-model-len 512 --dtype float32 --lr 1e-4"
    " --training-steps 20 --optimizer adamw --clip-eps 0.2 --save-path s --log-dir l"
)


def configured(*words: str) -> TrainerConfig:
    return resolve_config(TrainerConfig, [*grpo_run.MODE, *words], prog="run", env={})[0]


def test_flags_of_the_ancestor_go_to_the_server_or_the_trainer() -> None:
    server, words = grpo_run.split(OLD_FLAGS.split())
    assert words[:3] == ["--weight-bridge-mode", "shared_vllm", "--single-copy"]
    config = configured(*words[3:])
    assert (config.bridge.kind, config.training_steps) == ("single_copy", 20)
    expected = "--model M --port 9005 --max-model-len 512 --gpu-memory-utilization 0.3 --dtype float32"
    assert grpo_run.command(Path("launcher.py"), server, config) == ["-u", "launcher.py", *expected.split()]
    assert vars(grpo_run.split([])[0]) == {"gpu_memory_utilization": 0.45, "max_model_len": 4096, "dtype": None}


@pytest.mark.parametrize(
    ("device", "visible", "kept", "flag"),
    [
        ("auto", "2,3", "2,3", []),
        ("cuda", "2,3", "2,3", []),
        ("cuda:1", "2,3", "3", ["--device", "cuda:0"]),
        ("cuda:1", "", "1", ["--device", "cuda:0"]),
    ],
)
def test_both_see_the_gpu_of_the_device_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str, kept: str, flag: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert grpo_run.one_gpu(device, os.environ) == flag
    assert os.environ["CUDA_VISIBLE_DEVICES"] == kept


def test_a_gpu_that_is_not_visible_is_refused() -> None:
    with pytest.raises(TrainerError, match="cuda:2: CUDA_VISIBLE_DEVICES=2,3 leaves 2"):
        grpo_run.one_gpu("cuda:2", {"CUDA_VISIBLE_DEVICES": "2,3"})


def test_another_mode_and_a_port_in_use_start_nothing(tmp_path: Path) -> None:
    other = TrainerConfig.model_validate({"model_name": "m"})
    with (
        pytest.raises(TrainerError, match=r"restart .*start vLLM"),
        grpo_run.running([], other),
    ):
        raise AssertionError
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        config = configured("--model", "m", "--vllm-port", str(port), "--log-dir", str(tmp_path))
        with pytest.raises(TrainerError, match=f"port {port} is in use"), grpo_run.running([], config):
            raise AssertionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.services
@pytest.mark.parametrize(("start", "ends"), [([], False), (["--start-s", "x"], True)], ids=["starts", "ends"])
def test_it_waits_for_the_server_and_ends_it(tmp_path: Path, start: list[str], ends: bool) -> None:
    model = model_folder(tmp_path)
    config = configured("--model", model, "--vllm-port", str(free_port()), "--log-dir", str(tmp_path))
    words = ["-u", str(FAKE), "--model", model, "--port", str(config.vllm_port), *start]
    with grpo_run.running(words, config) as process:
        pid = process.pid
        if ends:
            with pytest.raises(TrainerError, match=r"(?s)vLLM ended: exit status 2.*invalid float value"):
                grpo_run.await_server(process, config)
        else:
            grpo_run.await_server(process, config)
            assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


@pytest.mark.services
@pytest.mark.slow
def test_a_trainer_that_fails_ends_the_server_and_its_exit_status_is_the_command_s(tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    program = f"from pathlib import Path; from example_trainer import grpo_run; grpo_run.main(Path({str(FAKE)!r}))"
    flags = ["--model", model, "--vllm-port", str(free_port()), "--log-dir", str(tmp_path), "--device", "cpu"]
    flags += ["--atropos-url", "http://127.0.0.1:9", "--save-path", str(tmp_path / "s"), "--api-timeout", "1"]
    done = subprocess.run(
        [sys.executable, "-c", program, *flags], capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "Started vLLM (pid" in done.stdout + done.stderr
    (started,) = [line for line in (tmp_path / "vllm.log").read_text().splitlines() if line.startswith("FAKE")]
    assert f"--model {model}" in started
    pid = int((done.stdout + done.stderr).split("Started vLLM (pid ")[1].split(",")[0])
    assert not psutil.pid_exists(pid)
