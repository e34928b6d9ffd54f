"""A vLLM server whose weights a trainer can exchange, as benchmarks start it for themselves."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atroposlib.clients.one_request import NoReply, request
from atroposlib.clients.waiting import waiting
from atroposlib.logs import get_logger
from benchmarks.shared.launched import ROOT

log = get_logger(__name__)
SERVER = ROOT / "example_trainer" / "vllm_api_server.py"
START_DEADLINE_S = 600
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
        output = Path(folder) / "vllm.log"
        server = subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT | {"LOGDIR": folder},
            stdout=output.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _await_health(server, port, output)
        try:
            yield server.pid
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def _await_health(server: subprocess.Popen[bytes], port: int, output: Path) -> None:
    with waiting(log, "the vLLM server", peer=f"127.0.0.1:{port}", deadline_s=START_DEADLINE_S):
        deadline = time.monotonic() + START_DEADLINE_S
        while server.poll() is None and time.monotonic() < deadline:
            try:
                if request("GET", f"http://127.0.0.1:{port}/health", connect_s=5, read_s=5).status == 200:
                    return
            except NoReply:
                time.sleep(0.5)
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(server.pid, signal.SIGKILL)
        raise RuntimeError(f"vLLM did not come up within {START_DEADLINE_S} s: {output.read_text()[-2000:]}")
