"""A vLLM process that is killed takes the others with it, leaves nothing behind, and is reported by the trainer within
its deadline.
"""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.integration.conftest import (
    Server,
    left_in_shared_memory,
    session_members,
    shared_memory,
    start_server,
    stop_server,
    workers_of,
)
from tests.integration.trainer_process import trainer_process


def nothing_is_left(server: Server, mapped: set[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while session_members(server.process.pid) and time.monotonic() < deadline:
        server.process.poll()
        time.sleep(0.2)
    assert session_members(server.process.pid) == []
    assert left_in_shared_memory(mapped) == []
    with socket.create_server(("127.0.0.1", server.port)):
        pass


@pytest.mark.rotating
def test_killed_api_process_takes_engine_and_workers_with_it(llama_folder: Path, tmp_path: Path) -> None:
    server = start_server(llama_folder, tmp_path)
    with trainer_process(str(llama_folder), tmp_path, "--vllm-port", str(server.port)) as trainer:
        assert len(session_members(server.process.pid)) >= 3
        mapped = shared_memory(server.process.pid)
        os.kill(server.process.pid, signal.SIGKILL)
        trainer.ask()
        assert f"http://localhost:{server.port}" in trainer.failure()
        server.process.wait(10)
        nothing_is_left(server, mapped, within_s=20)


@pytest.mark.nightly
def test_one_killed_worker_of_two_ends_the_server_and_a_new_pair_goes_on(qwen_folder: Path, tmp_path: Path) -> None:
    server = start_server(qwen_folder, tmp_path, "--tensor-parallel-size", "2")
    server.generate([1, 2, 3], max_tokens=1)  # the first of a server takes seconds more than the probe waits
    with trainer_process(str(qwen_folder), tmp_path, "--vllm-port", str(server.port)) as trainer:
        assert trainer.sync_with(1) == 1
        mapped = shared_memory(server.process.pid)
        _, second = sorted(workers_of(server))
        os.kill(second, signal.SIGKILL)
        trainer.ask()
        failure = trainer.failure()
        assert "BridgeError" in failure
        assert f"http://localhost:{server.port}" in failure
        nothing_is_left(server, mapped, within_s=60)
    server = start_server(qwen_folder, tmp_path, "--tensor-parallel-size", "2", port=server.port)
    server.generate([1, 2, 3], max_tokens=1)
    with trainer_process(str(qwen_folder), tmp_path, "--vllm-port", str(server.port)) as trainer:
        assert trainer.sync_with(1) == 1  # and the parity probe agrees
    stop_server(server)
