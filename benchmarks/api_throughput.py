"""How fast the batching API takes groups and gives batches, beside the archived ancestor's server (`atroposlib==0.4.0`).

    python benchmarks/api_throughput.py [--accept-encoding identity]

Both servers run as uvicorn processes of their own on free loopback ports, with the same versions of FastAPI, uvicorn, pydantic, uvloop
and httptools. One client posts the same encoded groups to each over one kept-alive connection, then fetches all batches; replies are
decompressed where the server compressed them, and checked against what was posted outside the timed part. The ancestor lives in a
virtual environment in a temporary folder, made by pip unless --peer-python names one. Prints a Markdown table.
"""

import gzip
import http.client
import json
import os
import platform
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.logs import configure_logging, get_logger, waiting

PEER = "atroposlib==0.4.0"
SHARED = ("fastapi", "starlette", "uvicorn", "pydantic", "httptools", "uvloop")
START_DEADLINE_S = 60.0
REQUEST_TIMEOUT_S = 300.0

log = get_logger(__name__)


class Settings(Config):
    """The load, and where the ancestor is."""

    groups: int = Field(1000, ge=1, description="Groups posted and fetched in each run.")
    sequences: int = Field(8, ge=1, description="Sequences per group.")
    tokens: int = Field(512, ge=1, description="Tokens per sequence.")
    groups_per_batch: int = Field(40, ge=1, description="Groups per fetched batch.")
    repeats: int = Field(3, ge=1, description="Runs of each server, in turn; the table shows medians.")
    accept_encoding: str = Field("gzip, deflate", description="What the client says it accepts; requests and aiohttp send this and more.")
    peer_python: Path | None = Field(None, description="Interpreter of an environment that has the ancestor; default: make one.")


@dataclass
class Rates:
    """Seconds for all groups."""

    post_s: float
    fetch_s: float

    @property
    def total_s(self) -> float:
        return self.post_s + self.fetch_s


# --- load -----------------------------------------------------------------------------------------------------------------


def make_groups(settings: Settings) -> list[bytes]:
    """Encoded groups like an environment's: tokens, masks of the completion, scores, log-probabilities of the sampler."""
    draw = random.Random(0)
    prompt = settings.tokens // 4

    def group() -> dict[str, Any]:
        tokens = [[draw.randrange(49_152) for _ in range(settings.tokens)] for _ in range(settings.sequences)]
        return {
            "tokens": tokens,
            "masks": [[-100] * prompt + sequence[prompt:] for sequence in tokens],
            "scores": [float(draw.random() < 0.5) for _ in tokens],
            "inference_logprobs": [
                [1.0] * prompt + [-draw.expovariate(2.0) for _ in range(settings.tokens - prompt)] for _ in range(settings.sequences)
            ],
        }

    return [json.dumps(group()).encode() for _ in range(settings.groups)]


class Client:
    """One kept-alive connection."""

    def __init__(self, port: int, accept_encoding: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._accept = {"Accept-Encoding": accept_encoding}

    def post(self, path: str, body: bytes) -> bytes:
        self._connection.request("POST", path, body, {"Content-Type": "application/json", **self._accept})
        return self._answer(path)

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path, headers=self._accept)
        return self._answer(path)

    def _answer(self, path: str) -> bytes:
        reply = self._connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{path} answered {reply.status}: {body[:200]!r}")
        return gzip.decompress(body) if reply.headers.get("Content-Encoding") == "gzip" else body


def run_once(client: Client, bodies: list[bytes], settings: Settings) -> Rates:
    """Post all groups, fetch all batches, then check that each group came back once."""
    client.get("/reset_data")
    client.post("/register", _registration(settings))
    start = time.perf_counter()
    for body in bodies:
        client.post("/scored_data", body)
    posted = time.perf_counter()
    batches = [client.get("/batch") for _ in range(len(bodies) // settings.groups_per_batch)]
    fetched = time.perf_counter()
    returned = [item["tokens"] for batch in batches for item in orjson.loads(batch)["batch"]]
    expected = [orjson.loads(body)["tokens"] for body in bodies[: len(returned)]]
    if sorted(returned) != sorted(expected):
        raise RuntimeError("the fetched groups are not the posted ones")
    return Rates(posted - start, fetched - posted)


def _registration(settings: Settings) -> bytes:
    return orjson.dumps(
        {
            "wandb_group": "benchmark",
            "wandb_project": "benchmark",
            "batch_size": settings.groups_per_batch * settings.sequences,
            "max_token_len": settings.tokens,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 1000,
        }
    )


# --- servers --------------------------------------------------------------------------------------------------------------


@contextmanager
def served(python: Path, folder: Path) -> Iterator[int]:
    """The port of `atroposlib.api:app`, as the interpreter finds it from `folder`, in a uvicorn process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [str(python), "-m", "uvicorn", "atroposlib.api:app", "--port", str(port), "--no-access-log", "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=folder)
    try:
        with waiting(log, "a server", peer=f"http://127.0.0.1:{port}", deadline_s=START_DEADLINE_S):
            _wait_for(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise TimeoutError(f"no server on port {port} within {START_DEADLINE_S:.0f} s")


def make_peer(folder: Path) -> Path:
    """The interpreter of a new virtual environment with the ancestor and what its API imports, at our own versions."""
    log.info("Installing %s into %s", PEER, folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-warn-conflicts"]
    subprocess.run([*pip, "--no-deps", PEER], check=True)
    subprocess.run([*pip, *(f"{name}=={version(name)}" for name in SHARED)], check=True)
    return python


# --- table ----------------------------------------------------------------------------------------------------------------


def table(ours: list[Rates], peer: list[Rates], settings: Settings) -> str:
    """Medians of all repeats, in groups per second."""

    def median_of(rates: list[Rates], what: str) -> float:
        return settings.groups / statistics.median(getattr(rate, what) for rate in rates)

    lines = ["| groups/s | this server | " + PEER + " | ratio |", "|---|---:|---:|---:|"]
    for label, what in (("posted", "post_s"), ("fetched", "fetch_s"), ("posted and fetched", "total_s")):
        mine, theirs = median_of(ours, what), median_of(peer, what)
        lines.append(f"| {label} | {mine:.0f} | {theirs:.0f} | {mine / theirs:.1f} |")
    return "\n".join(lines)


def machine() -> str:
    """Processor, cores and Python, in a line."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    settings = load_config(Settings, prog="api_throughput")
    configure_logging("benchmark")
    bodies = make_groups(settings)
    ours: list[Rates] = []
    peer: list[Rates] = []
    with tempfile.TemporaryDirectory(prefix="api-throughput-") as temporary:
        peer_python = settings.peer_python or make_peer(Path(temporary) / "venv")
        with served(Path(sys.executable), Path(__file__).parents[1]) as our_port, served(peer_python, Path(temporary)) as peer_port:
            for repeat in range(settings.repeats):
                for name, port, rates in (("this server", our_port, ours), (PEER, peer_port, peer)):
                    rates.append(run_once(Client(port, settings.accept_encoding), bodies, settings))
                    log.info("Run %d of %s: posted in %.2f s, fetched in %.2f s", repeat + 1, name, rates[-1].post_s, rates[-1].fetch_s)
    print("Command: `" + shlex.join(["python", "benchmarks/api_throughput.py", *sys.argv[1:]]) + "`")
    print(f"Machine: {machine()}; fastapi {version('fastapi')}, uvicorn {version('uvicorn')}, pydantic {version('pydantic')}")
    print(
        f"Load: {settings.groups} groups of {settings.sequences} x {settings.tokens} tokens ({len(bodies[0]) / 1e3:.0f} kB each), "
        f"batches of {settings.groups_per_batch} groups, client accepts '{settings.accept_encoding}', median of {settings.repeats} runs\n"
    )
    print(table(ours, peer, settings))


if __name__ == "__main__":
    main()
