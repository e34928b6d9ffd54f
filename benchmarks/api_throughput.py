"""How fast the batching API accepts groups and delivers batches, compared with the archived ancestor's server
(`atroposlib==0.4.0`).

    python benchmarks/api_throughput.py [--accept-encoding identity]

Each server runs as its own uvicorn process on a free loopback port, with the same versions of FastAPI, uvicorn,
pydantic, uvloop and httptools: this one in memory, this one with its journal, the ancestor. One client posts the
same encoded groups to each over one kept-alive connection, then fetches all batches; replies are decompressed where
the server compressed them, and checked against what was posted outside the timed part. Then: the same with
MessagePack, which the ancestor does not read; /status-env beside many queued small groups; posts by many writers at
once, each at a steady pace; memory beside the bytes posted. The ancestor runs in a virtual environment in a temporary
directory, which pip fills unless --peer-python names one. Prints Markdown tables.
"""

import asyncio
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from pydantic import Field

from atropos_launcher.placement.this_machine import processor
from atroposlib.clients.waiting import waiting
from atroposlib.config import Config, load_config
from atroposlib.logs import configure_logging, get_logger
from atroposlib.wire.batching import MSGPACK, NOT_TRAINED

PEER = "atroposlib==0.4.0"
SHARED = ("fastapi", "starlette", "uvicorn", "pydantic", "httptools", "uvloop")
START_DEADLINE_S = 60.0
REQUEST_TIMEOUT_S = 600.0  # the ancestor compresses a large batch in minutes where other work runs

log = get_logger(__name__)


class Settings(Config):
    """Measure the batching API's throughput, compared with the archived ancestor's server."""

    groups: int = Field(1000, ge=1, description="Groups posted and fetched in each run.")
    sequences: int = Field(8, ge=1, description="Sequences per group.")
    tokens: int = Field(512, ge=1, description="Tokens per sequence.")
    groups_per_batch: int = Field(40, ge=1, description="Groups per fetched batch.")
    repeats: int = Field(3, ge=1, description="Runs of each server, in turn; the table shows medians.")
    accept_encoding: str = Field(
        "gzip, deflate", description="The client's Accept-Encoding; requests and aiohttp send this and more."
    )
    status_groups: int = Field(
        100_000, ge=1, description="Groups of two tokens in the queue while /status-env is measured."
    )
    status_asks: int = Field(20, ge=1, description="Requests to /status-env.")
    writers: int = Field(64, ge=1, description="Connections that post at the same time.")
    writer_posts: int = Field(20, ge=1, description="Posts of each writer.")
    writer_pace: float = Field(2.0, gt=0, description="Seconds between two posts of one writer.")
    peer_python: Path | None = Field(
        None, description="Interpreter of an environment that has the ancestor; default: make one."
    )


@dataclass
class Rates:
    """Seconds for all groups; `cpu_s` of the server's processor, which other work on the machine does not stretch."""

    post_s: float
    fetch_s: float
    cpu_s: float

    @property
    def total_s(self) -> float:
        return self.post_s + self.fetch_s


# --- load -----------------------------------------------------------------------------------------------------------


def make_groups(settings: Settings) -> list[bytes]:
    """Encoded groups like an environment's: tokens, masks of the completion, scores, log-probabilities of the
    sampler.
    """
    draw = random.Random(0)
    prompt = settings.tokens // 4

    def group() -> dict[str, Any]:
        tokens = [[draw.randrange(49_152) for _ in range(settings.tokens)] for _ in range(settings.sequences)]
        return {
            "tokens": tokens,
            "masks": [[NOT_TRAINED] * prompt + sequence[prompt:] for sequence in tokens],
            "scores": [float(draw.random() < 0.5) for _ in tokens],
            "inference_logprobs": [
                [1.0] * prompt + [-draw.expovariate(2.0) for _ in range(settings.tokens - prompt)]
                for _ in range(settings.sequences)
            ],
        }

    return [json.dumps(group()).encode() for _ in range(settings.groups)]


class Client:
    """One kept-alive connection."""

    def __init__(self, port: int, accept_encoding: str, accept: str = "*/*") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._accept = {"Accept-Encoding": accept_encoding, "Accept": accept}

    def post(self, path: str, body: bytes, content_type: str = "application/json") -> bytes:
        self._connection.request("POST", path, body, {"Content-Type": content_type, **self._accept})
        return self._answer(path)

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path, headers=self._accept)
        return self._answer(path)

    def reset(self) -> None:
        """Forget everything: by POST, or by GET where the server knows no other way."""
        self._connection.request("POST", "/reset_data")
        reply = self._connection.getresponse()
        reply.read()
        if reply.status == 405:
            self.get("/reset_data")

    def ask_status(self, env_id: int) -> bytes:
        self._connection.request(
            "GET", "/status-env", msgspec.json.encode({"env_id": env_id}), {"Content-Type": "application/json"}
        )
        return self._answer("/status-env")

    def _answer(self, path: str) -> bytes:
        reply = self._connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{path} answered {reply.status}: {body[:200]!r}")
        return gzip.decompress(body) if reply.headers.get("Content-Encoding") == "gzip" else body


def run_once(server: "Server", client: Client, bodies: list[bytes], settings: Settings, packed: bool = False) -> Rates:
    """Post all groups, fetch all batches, then check that each group came back once."""
    decode = msgspec.msgpack.decode if packed else msgspec.json.decode
    client.reset()
    client.post("/register", registration(settings.groups_per_batch * settings.sequences, settings.tokens))
    start, used = time.perf_counter(), cpu_seconds(server.process)
    for body in bodies:
        client.post("/scored_data", body, MSGPACK if packed else "application/json")
    posted = time.perf_counter()
    batches = [client.get("/batch") for _ in range(len(bodies) // settings.groups_per_batch)]
    fetched, used = time.perf_counter(), cpu_seconds(server.process) - used
    returned = [item["tokens"] for batch in batches for item in decode(batch)["batch"]]
    expected = [decode(body)["tokens"] for body in bodies[: len(returned)]]
    if sorted(returned) != sorted(expected):
        raise RuntimeError("the fetched groups are not the posted ones")
    return Rates(posted - start, fetched - posted, used)


def status_seconds(client: Client, settings: Settings) -> float:
    """Median seconds of a /status-env while many groups wait."""
    client.reset()
    client.post("/register", registration(settings.groups_per_batch * settings.sequences, settings.tokens))
    client.get("/batch")
    environment = {"max_token_length": 8, "desired_name": "benchmark", "weight": 1.0, "group_size": 1}
    env_id = msgspec.json.decode(client.post("/register-env", msgspec.json.encode(environment)))["env_id"]
    group = {"tokens": [[1, 2]], "masks": [[NOT_TRAINED, 2]], "scores": [1.0], "env_id": env_id}
    for start in range(0, settings.status_groups, 1000):
        client.post("/scored_data_list", msgspec.json.encode([group] * min(1000, settings.status_groups - start)))
    times = []
    for _ in range(settings.status_asks):
        start_s = time.perf_counter()
        client.ask_status(env_id)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


async def write_at_once(port: int, bodies: list[bytes], settings: Settings) -> list[float]:
    """Seconds of each post of all writers."""
    times: list[float] = []

    async def writer(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(settings.writer_pace * number / settings.writers)
        for turn in range(settings.writer_posts):
            body = bodies[(number + turn) % len(bodies)]
            start = time.perf_counter()
            async with session.post(f"http://127.0.0.1:{port}/scored_data", data=body) as reply:
                await reply.read()
                reply.raise_for_status()
            times.append(time.perf_counter() - start)
            await asyncio.sleep(max(0.0, settings.writer_pace - times[-1]))

    connector = aiohttp.TCPConnector(limit=settings.writers)
    async with aiohttp.ClientSession(
        connector=connector, headers={"Content-Type": "application/json"}, trust_env=False
    ) as session:
        await asyncio.gather(*(writer(session, number) for number in range(settings.writers)))
    return times


def memory_ratio(client: Client, process: int, bodies: list[bytes], settings: Settings) -> float:
    """Measure how much a server that has held nothing before grows, by the bytes of the groups that it holds."""
    client.post("/register", registration(settings.groups_per_batch * settings.sequences, settings.tokens))
    before = resident_bytes(process)
    for body in bodies:
        client.post("/scored_data", body)
    return (resident_bytes(process) - before) / sum(map(len, bodies))


def cpu_seconds(process: int) -> float:
    """Processor time that a process has used, in its own code and in the kernel."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(process: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def registration(sequences: int, tokens: int) -> bytes:
    """Make the body of /register for a trainer whose batches have this many sequences of at most so many tokens."""
    return msgspec.json.encode(
        {
            "wandb_group": "benchmark",
            "wandb_project": "benchmark",
            "batch_size": sequences,
            "max_token_len": tokens,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 1000,
        }
    )


# --- servers --------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A running server."""

    name: str
    port: int
    process: int


@contextmanager
def served(name: str, python: Path, folder: Path, journal: Path | None = None, *flags: str) -> Iterator[Server]:
    """`atroposlib.api:app`, as the interpreter finds it from `folder`, in a uvicorn process of its own; ours with a
    journal by run-api, with `flags`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [
        str(python),
        "-m",
        "uvicorn",
        "atroposlib.api:app",
        "--port",
        str(port),
        "--no-access-log",
        "--log-level",
        "warning",
    ]
    command += ["--timeout-keep-alive", "75"]  # s, as run-api has; writers pause between two posts
    if journal is not None:
        command = [str(python), "-m", "atroposlib.cli.run_api", "--port", str(port), "--journal", str(journal), *flags]
    # it would find ours for theirs
    surroundings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(
        command, cwd=folder, env=surroundings, stderr=subprocess.DEVNULL if journal is not None else None
    )
    try:
        with waiting(log, name, peer=f"http://127.0.0.1:{port}", deadline_s=START_DEADLINE_S):
            _wait_for(port, process)
        yield Server(name, port, process.pid)
    finally:
        process.terminate()
        process.wait(timeout=60)


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


# --- table ----------------------------------------------------------------------------------------------------------


def throughput_table(rates: dict[str, list[Rates]], settings: Settings) -> str:
    """Medians of all repeats, in groups per second, and how many times the ancestor's."""

    def median_of(name: str, what: str) -> float:
        seconds: float = statistics.median(getattr(rate, what) for rate in rates[name])
        return settings.groups / max(seconds, 0.01)  # a tick of the CPU clock

    lines = ["| groups/s | " + " | ".join(rates) + " |", "|---" + "|---:" * len(rates) + "|"]
    rows = {
        "posted": "post_s",
        "fetched": "fetch_s",
        "posted and fetched": "total_s",
        "posted and fetched, by CPU seconds": "cpu_s",
    }
    for label, what in rows.items():
        cells = [
            f"{median_of(name, what):.0f} ({median_of(name, what) / median_of(PEER, what):.1f} x)" for name in rates
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def other_table(figures: dict[str, dict[str, str]]) -> str:
    """One row a figure, one column a server."""
    rows = next(iter(figures.values()))
    lines = ["| | " + " | ".join(figures) + " |", "|---" + "|---:" * len(figures) + "|"]
    return "\n".join(
        lines + [f"| {row} | " + " | ".join(column.get(row, "") for column in figures.values()) + " |" for row in rows]
    )


def percentile(times: list[float], share: float) -> float:
    """The time that this share of all does not exceed."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def machine() -> str:
    """Processor, cores and Python, in a line."""
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def measure(
    servers: list[Server], bodies: list[bytes], settings: Settings
) -> tuple[dict[str, list[Rates]], dict[str, dict[str, str]]]:
    """Rates and other results of each server."""
    rates: dict[str, list[Rates]] = {}
    packed = [msgspec.msgpack.encode(msgspec.json.decode(body)) for body in bodies]
    grown = {
        server.name: memory_ratio(Client(server.port, settings.accept_encoding), server.process, bodies, settings)
        for server in servers
    }
    for repeat in range(settings.repeats):
        for server in servers:
            done = [(server.name, run_once(server, Client(server.port, settings.accept_encoding), bodies, settings))]
            if server.name != PEER:
                client = Client(server.port, settings.accept_encoding, MSGPACK)
                done.append((f"{server.name}, MessagePack", run_once(server, client, packed, settings, packed=True)))
            for name, rate in done:
                rates.setdefault(name, []).append(rate)
                log.info(
                    "Run %d of %s: posted in %.2f s, fetched in %.2f s, CPU %.2f s",
                    repeat + 1,
                    name,
                    rate.post_s,
                    rate.fetch_s,
                    rate.cpu_s,
                )
    figures: dict[str, dict[str, str]] = {}
    for server in servers:
        times = asyncio.run(write_at_once(server.port, bodies, settings))
        # after the writers: a server closes a connection that idles
        client = Client(server.port, settings.accept_encoding)
        figures[server.name] = {
            f"post by {settings.writers} writers, median": f"{1000 * percentile(times, 0.5):.1f} ms",
            f"post by {settings.writers} writers, p99": f"{1000 * percentile(times, 0.99):.1f} ms",
            "memory by bytes posted": f"{grown[server.name]:.2f}",
            f"/status-env beside {settings.status_groups} groups": f"{1000 * status_seconds(client, settings):.2f} ms",
        }
        log.info("%s: %s", server.name, figures[server.name])
    return rates, figures


def main() -> None:
    settings = load_config(Settings, prog="api_throughput")
    configure_logging("benchmark")
    bodies = make_groups(settings)
    ours, root = Path(sys.executable), Path(__file__).parents[1]
    with tempfile.TemporaryDirectory(prefix="api-throughput-") as temporary, ExitStack() as running:
        peer_python = settings.peer_python or make_peer(Path(temporary) / "venv")
        servers = [
            running.enter_context(served("in memory", ours, root)),
            running.enter_context(served("with journal", ours, root, Path(temporary) / "groups.db")),
            running.enter_context(served(PEER, peer_python, Path(temporary))),
        ]
        rates, figures = measure(servers, bodies, settings)
    print("Command: `" + shlex.join(["python", "benchmarks/api_throughput.py", *sys.argv[1:]]) + "`")
    print(
        f"Machine: {machine()}; fastapi {version('fastapi')}, uvicorn {version('uvicorn')}, pydantic"
        f" {version('pydantic')}"
    )
    print(
        f"Load: {settings.groups} groups of {settings.sequences} x {settings.tokens} tokens ({len(bodies[0]) / 1e3:.0f}"
        f" kB each), batches of {settings.groups_per_batch} groups, client accepts '{settings.accept_encoding}', median"
        f" of {settings.repeats} runs; a writer posts every {settings.writer_pace:g} s\n"
    )
    print(throughput_table(rates, settings), other_table(figures), sep="\n\n")


if __name__ == "__main__":
    main()
