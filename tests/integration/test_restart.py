"""Mode none on a real vLLM: the trainer's own server, restarted while environments sample, and one that is somebody
else's.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from tests.client import http
from tests.integration.conftest import API_KEY, Server, left_in_shared_memory, session_members, shared_memory
from tests.integration.namespaces import tied
from tests.integration.test_bridge import PARITY, PROMPT
from tests.serving import free_port

CHILD = Path(__file__).with_name("restart_child.py")
DEADLINE_S = 120


def start_child(model: Path, port: int, folder: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    with (folder / "child.log").open("w") as log:
        return subprocess.Popen(
            tied([sys.executable, str(CHILD), str(model), str(port), str(folder), *flags]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        )


def next_line(child: subprocess.Popen[str], folder: Path) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, (folder / "child.log").read_text()[-3000:]
    return line


def go_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def started_servers(folder: Path) -> list[int]:
    return [int(pid) for pid in re.findall(r"Started vLLM \(pid (\d+)", (folder / "child.log").read_text())]


class Sampler:
    """An environment's client that samples without a pause, in a thread; `versions` are those that its samples were
    labelled with.
    """

    def __init__(self, port: int, model: str) -> None:
        self.versions: list[tuple[int, int] | None] = []
        self.error: BaseException | None = None
        url = f"http://127.0.0.1:{port}/v1"
        self._config = APIServerConfig(model_name=model, base_url=url, server_type="vllm", num_max_requests_at_once=8)
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    async def _run(self) -> None:
        server = VLLMServer(self._config)
        try:
            await asyncio.gather(*(self._sample(server) for _ in range(4)))
        except BaseException as error:
            self.error = error
        await server.close()

    async def _sample(self, server: VLLMServer) -> None:
        while not self._end.is_set():
            reply = await server.sample_tokens(input_ids=PROMPT, n=2, max_tokens=60, ignore_eos=True)
            assert [len(sequence.token_ids) for sequence in reply.sequences] == [60, 60]
            self.versions += [sequence.policy_versions for sequence in reply.sequences]

    def end(self) -> None:
        self._end.set()
        self._thread.join(DEADLINE_S)


@pytest.mark.nightly
def test_own_server_of_two_ranks_is_started_restarted_under_load_and_dies_with_a_killed_trainer(
    qwen_folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    child = start_child(qwen_folder, port, tmp_path, "--vllm-flags=--tensor-parallel-size 2")
    try:
        assert next_line(child, tmp_path).startswith("SYNCED 0 serves 0 stall 0.00")
        assert float(next_line(child, tmp_path).split()[1]) <= PARITY
        go_on(child)
        assert next_line(child, tmp_path).startswith("SYNCED 1 serves 0 stall 0.00")
        (first,) = started_servers(tmp_path)
        mapped = shared_memory(first)
        assert http.get(f"http://127.0.0.1:{port}/v1/bridge/status", timeout=30).json()["tp_size"] == 2
        sampler = Sampler(port, str(qwen_folder))
        while not sampler.versions:
            time.sleep(0.1)
        go_on(child)
        assert next_line(child, tmp_path).startswith("SYNCED 2 serves 2 stall ")
        assert float(next_line(child, tmp_path).split()[1]) <= PARITY
        before = len(sampler.versions)
        while len(sampler.versions) < before + 8 and sampler.error is None:
            time.sleep(0.1)
        sampler.end()  # every request of before, during and after the restart has been answered
        assert sampler.error is None
        assert set(sampler.versions) == {(0, 0), (2, 2)}

        first, second = started_servers(tmp_path)
        assert session_members(first) == []
        assert len(session_members(second)) >= 4
        assert len(mapped) >= 2
        assert left_in_shared_memory(mapped) == []
        mapped = shared_memory(second)
        child.send_signal(signal.SIGKILL)
        child.wait(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while session_members(second) + left_in_shared_memory(mapped) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert session_members(second) == []
        assert left_in_shared_memory(mapped) == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    finally:
        child.kill()
        child.wait()


@pytest.mark.nightly
def test_an_adapter_is_served_after_the_restart_and_gone_with_the_trainer(llama_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    child = start_child(
        llama_folder,
        port,
        tmp_path,
        "--weight-bridge-mode",
        "lora_restart",
        "--vllm-restart-interval",
        "1",
        "--lora-r",
        "4",
    )
    try:
        for version in range(2):
            assert next_line(child, tmp_path).startswith(f"SYNCED {version} serves {version}")
            assert float(next_line(child, tmp_path).split()[1]) <= PARITY
            body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 2}
            reply = http.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60).json()
            assert reply["policy_versions"] == [[version, version]]
            if version == 0:
                go_on(child)
        child.send_signal(signal.SIGINT)
        child.wait(DEADLINE_S)
        assert all(session_members(pid) == [] for pid in started_servers(tmp_path))
    finally:
        child.kill()
        child.wait()


@pytest.mark.rotating
def test_a_server_of_somebody_else_is_asked_for_and_left_alone(vllm_server: Server, tmp_path: Path) -> None:
    pid = vllm_server.process.pid
    members = session_members(pid)
    child = start_child(
        Path(vllm_server.model), vllm_server.port, tmp_path, "--vllm-start-timeout", "5", VLLM_API_KEY=API_KEY
    )
    for _ in range(3):
        go_on(child)
    assert child.wait(DEADLINE_S) != 0
    log = (tmp_path / "child.log").read_text()
    assert "is already in use: the trainer leaves that server alone" in log
    assert re.search(
        rf"Restart the vLLM server at \S+ now, .*--model \S+/served_\d --served-model-name {vllm_server.model} --port",
        log,
    )
    assert "after 5 s: it serves" in log
    assert session_members(pid) == members
    assert http.get(f"{vllm_server.url}/health", timeout=30).status_code == 200
