"""What the vLLM launcher refuses, before a model is loaded: one clear line with value and remedy, exit code 2."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import VLLM, Forked
from tests.integration.conftest import REPOSITORY
from tests.serving import free_port

SHARED = {**os.environ, "VLLM_ENABLE_SHARED_WEIGHTS": "1"}


def refusal(*flags: str) -> str:
    launcher = Forked("example_trainer.vllm_api_server", flags, SHARED, VLLM)
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 2, said[-2000:]
    return said.strip().splitlines()[-1]


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    """As typed."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "example_trainer" / "vllm_api_server.py"), "--model", str(tmp_path)],
        env=SHARED,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"--model {tmp_path}: no config.json there" in done.stderr.strip().splitlines()[-1]


def test_a_taken_port_is_refused(llama_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port} on 127.0.0.1: Address already in use" in refusal(
            "--model", str(llama_folder), "--port", str(port)
        )


def test_a_port_that_another_server_is_about_to_take_is_refused(llama_folder: Path) -> None:
    port = free_port()
    claim = (
        f"from example_trainer import vllm_api_server as s; s._check_port('127.0.0.1', {port}); print('claimed',"
        " flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", claim], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        assert f"--port {port} on 127.0.0.1: another vLLM server is starting there" in refusal(
            "--model", str(llama_folder), "--port", str(port)
        )
        other.kill()
    assert "--max-num-seqs" in refusal("--model", str(llama_folder), "--port", str(port), "--max-num-seqs", "none")


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 without --api-key"),
        (["--quantization", "fp8"], "--quantization fp8: the weight bridge carries unquantised weights only"),
        (["--data-parallel-size", "2"], "no data parallelism"),
    ],
)
def test_what_the_bridge_cannot_serve_is_refused(llama_folder: Path, flags: list[str], fragment: str) -> None:
    assert fragment in refusal("--model", str(llama_folder), "--port", str(free_port()), *flags)
