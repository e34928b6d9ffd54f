"""A real vLLM whose engine is frozen, comes back and is killed: /health and every client hear why, and no call
hangs.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from example_trainer.bridges import BridgeError
from example_trainer.bridges.vllm_client import VllmClient
from tests.integration.conftest import API_KEY, Server, session_members, start_server, stop_server

DEADLINE_S = 120


def engine_of(server: Server) -> int:
    (found,) = [
        pid for pid in session_members(server.process.pid) if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()
    ]
    return found


def health_becomes(server: Server, status: int) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while (reply := server.request("GET", "/health", 30)).status_code != status:
        assert time.monotonic() < deadline, reply.text
        time.sleep(0.2)
    return reply.text


@pytest.mark.rotating
def test_health_says_why_an_engine_is_of_no_use(llama_folder: Path, tmp_path: Path) -> None:
    server = start_server(llama_folder, tmp_path, "--engine-deadline-s", "3")
    try:
        client = VllmClient("127.0.0.1", server.port, API_KEY, timeout_s=60)
        engine = engine_of(server)
        os.kill(engine, signal.SIGSTOP)
        assert "has not answered for 3 s (--engine-deadline-s)" in health_becomes(server, 503)
        with pytest.raises(BridgeError, match=r"503.*has not answered for 3 s"):
            client.heartbeat("s")
        refused = server.request("POST", "/generate", json={"prompt": {"prompt_token_ids": [1]}, "max_tokens": 1})
        assert refused.status_code == 503
        assert "has not answered" in refused.text
        os.kill(engine, signal.SIGCONT)
        assert health_becomes(server, 200) == ""
        assert server.generate([1, 2, 3], max_tokens=2)["policy_versions"] == [[0, 0]]

        os.kill(engine, signal.SIGKILL)
        assert "engine has died" in health_becomes(server, 503)
        with pytest.raises(BridgeError, match=r"503.*engine has died"):
            client.heartbeat("s")
    finally:
        stop_server(server)
