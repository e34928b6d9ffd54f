"""Killing vLLM's API process must leave no process, no port and no shared memory behind."""

import os
import signal
import socket
import time
from pathlib import Path

from tests.integration.conftest import session_members, start_server


def test_killed_api_process_takes_engine_and_workers_with_it(llama_folder: Path, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    server = start_server(llama_folder, tmp_path)
    assert len(session_members(server.process.pid)) >= 3
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(10)
    deadline = time.monotonic() + 20
    while session_members(server.process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert session_members(server.process.pid) == []
    assert set(os.listdir("/dev/shm")) - before == set()
    with socket.create_server(("127.0.0.1", server.port)):
        pass
