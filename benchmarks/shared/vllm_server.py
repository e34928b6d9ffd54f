"""A vLLM server whose weights a trainer can exchange, as benchmarks start it for themselves."""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atroposlib.clients.one_request import NoReply, request
from atroposlib.clients.waiting import NotYet, Wait, wait_for
from atroposlib.processes.child_group import ChildGroup
from benchmarks.shared.launched import ROOT

SERVER = ROOT / "example_trainer" / "vllm_api_server.py"
START_DEADLINE_S = 600
GRACE_S = 60  # in which a server ends by itself
SERVER_FLAGS = ["--max-model-len", "256", "--max-num-seqs", "64"]
ENVIRONMENT = {"VLLM_ENABLE_SHARED_WEIGHTS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def vllm_server(model: str, port: int, flags: list[str]) -> Iterator[int]:
    """Yield the pid of a server that answers, and end it after the block. Raises RuntimeError if it does not start."""
    command = [sys.executable, "-u", str(SERVER), "--model", model, "--port", str(port), *SERVER_FLAGS, *flags]
    with tempfile.TemporaryDirectory() as folder:
        server = ChildGroup(command, Path(folder) / "vllm.log", os.environ | ENVIRONMENT | {"LOGDIR": folder})
        try:
            _await_health(server, port)
            yield server.pid
        finally:
            server.stop(GRACE_S)


def _await_health(server: ChildGroup, port: int) -> None:
    def failed(reason: str) -> RuntimeError:
        return RuntimeError(f"vLLM does not serve: {reason}\n{server.last_lines()}")

    def attempt() -> None:
        if (end := server.end()) is not None:
            raise failed(end)
        try:
            status = request("GET", f"http://127.0.0.1:{port}/health", connect_s=5, read_s=5).status
        except NoReply as error:
            raise NotYet(str(error)) from error
        if status != 200:
            raise NotYet(f"/health answers {status}")

    wait_for(attempt, Wait("the vLLM server", f"127.0.0.1:{port}", START_DEADLINE_S, failed))
