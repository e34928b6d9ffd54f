"""Killing vLLM's API process must leave no process, no port and no shared memory behind."""

import os
import signal
import socket
import time
from pathlib import Path

from tests.integration.conftest import start_server


def session_members(session: int) -> list[int]:
    """Living processes of a session (zombies are dead)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


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
