"""One real vLLM server a model, shared by every test that asks for it; tiny random models made on the fly."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from atroposlib.processes.shared_memory import mapped_shared_memory
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from tests.client import http
from tests.integration.namespaces import Host, entering, inside, tied, two_hosts
from tests.serving import free_port

REPOSITORY = Path(__file__).parents[2]
START_DEADLINE_S = 600
SHAPE: dict[str, Any] = dict(
    vocab_size=1000,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


@dataclass
class Server:
    """A running vLLM server with the bridge on; in a network namespace of its own if one is named."""

    port: int
    model: str
    log: Path
    process: subprocess.Popen[bytes]
    host: str = "127.0.0.1"
    namespace: str | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def request(self, method: str, path: str, timeout_s: float = 120, **arguments: Any) -> httpx.Response:
        return inside(
            self.namespace,
            lambda: http.request(method, self.url + path, headers=AUTHORIZED, timeout=timeout_s, **arguments),
        )

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.request("GET", "/v1/bridge/status", 30).json()
        return status

    def generate(self, prompt_token_ids: list[int], **sampling: Any) -> dict[str, Any]:
        reply = self.request("POST", "/generate", json={"prompt": {"prompt_token_ids": prompt_token_ids}, **sampling})
        assert reply.status_code == 200, reply.text
        generated: dict[str, Any] = reply.json()
        return generated


API_KEY = "integration-test-key"
AUTHORIZED = {"Authorization": f"Bearer {API_KEY}"}


def save_tiny_model(folder: Path, config: PretrainedConfig) -> Path:
    """A random model of `config` with the tiny tokenizer beside it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def start_server(
    model: Path,
    folder: Path,
    *flags: str,
    port: int = 0,
    host: str = "127.0.0.1",
    namespace: str | None = None,
    wait: bool = True,
    gpus: str | None = None,
    deadline_s: float = START_DEADLINE_S,
    bridge: bool = True,
    stock: bool = False,
) -> Server:
    """A vLLM server of `model`, which logs into `folder`; on these GPUs, if any are named. A `stock` one is vLLM's own,
    without anything of ours in its processes.
    """
    port = port or free_port()
    log = folder / "vllm.log"
    environment = {
        **os.environ,
        "VLLM_ENABLE_SHARED_WEIGHTS": "1" if bridge else "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LOGDIR": str(folder),
        **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
        **({"VLLM_PLUGINS": ""} if stock else {}),
    }
    ours = str(REPOSITORY / "example_trainer" / "vllm_api_server.py")
    command = [
        sys.executable,
        "-u",
        *(["-m", "vllm.entrypoints.openai.api_server"] if stock else [ours]),
        "--model",
        str(model),
        "--port",
        str(port),
    ]
    # few KV blocks: a cache of a gibibyte grows resident page by page for as long as a test looks, as a leak would
    command += [
        "--max-model-len",
        "512",
        "--num-gpu-blocks-override",
        "512",
        "--api-key",
        API_KEY,
        "--host",
        host,
        *flags,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            entering(namespace, tied(command, "TERM")),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    server = Server(port, str(model), log, process, host, namespace)
    if wait:
        await_server(server, deadline_s)
    return server


def await_server(server: Server, deadline_s: float = START_DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            if server.request("GET", "/health", 5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    stop_server(server)
    raise AssertionError(f"vLLM did not start within {deadline_s} s:\n{server.log.read_text()[-3000:]}")


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


def shared_memory(pid: int) -> set[int]:
    """Inodes in /dev/shm that the processes of session `pid` have mapped."""
    return mapped_shared_memory(session_members(pid))


def left_in_shared_memory(inodes: set[int]) -> list[str]:
    return [entry.name for entry in os.scandir("/dev/shm") if entry.inode() in inodes]


def workers_of(server: Server) -> list[int]:
    """The processes that hold the weights: vLLM names them so."""
    return [pid for pid in session_members(server.process.pid) if "Worker" in Path(f"/proc/{pid}/comm").read_text()]


def stop_server(server: Server) -> None:
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGTERM)
        try:
            server.process.wait(20)
        except subprocess.TimeoutExpired:
            kill_server(server)


def kill_server(server: Server) -> None:
    """By SIGKILL, after which nothing of vLLM's own removes its files in /dev/shm."""
    inodes = shared_memory(server.process.pid)
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(10)
    for name in left_in_shared_memory(inodes):
        Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), LlamaConfig(**SHAPE, tie_word_embeddings=False))


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2: biases on q, k, v and a tied head; a vocabulary that vLLM pads."""
    return save_tiny_model(tmp_path_factory.mktemp("qwen"), Qwen2Config(**SHAPE, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def vllm_server(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(llama_folder, tmp_path_factory.mktemp("vllm"))
    yield server
    stop_server(server)


@pytest.fixture(scope="session")
def vllm_server_tp2(qwen_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of two ranks, which receive in host memory, so that tests of both servers try both ways of staging."""
    flags = ("--tensor-parallel-size", "2", "--bridge-staging", "host")
    server = start_server(qwen_folder, tmp_path_factory.mktemp("vllm_tp2"), *flags)
    yield server
    stop_server(server)


@pytest.fixture(params=["vllm_server", pytest.param("vllm_server_tp2", marks=pytest.mark.nightly)])
def plain_server(request: pytest.FixtureRequest) -> Server:
    """The shared server of one rank; by night that of two as well, for what goes the same way there."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two network namespaces with a cable between them. Skips where the kernel refuses them."""
    try:
        with two_hosts() as pair:
            yield pair
    except PermissionError as refused:
        pytest.skip(f"this machine lets nobody make network namespaces: {refused}")
