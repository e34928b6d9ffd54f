"""How many environments one batching API keeps: registrations, heartbeats and questions for the queue's length.

    python -m benchmarks.api_environments [--environments 25,50,100,200,400]

Every environment has one kept-alive connection, as those of this project have, and sends what they send while they
sample: a heartbeat with a report every 5 s (atroposlib/envs/commands/reporting.py), and /status-env ten times a second
(atroposlib/envs/commands/serve.py). The API runs with its journal, in a process of its own. Clients share one further
process, so their times are upper bounds. Prints a Markdown table.
"""

import asyncio
import os
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.envs.commands.reporting import INTERVAL_S
from atroposlib.logs import configure_logging, get_logger
from benchmarks.api_throughput import cpu_seconds, machine, percentile, resident_bytes, served

log = get_logger(__name__)
STARTING = 50  # registrations at a time
UNLIMITED = ("--max-requests-per-second", "100000")  # of one client, which all environments here are


class Settings(Config):
    """Measure how many environments one batching API keeps."""

    environments: str = Field(
        "25,50,100,200,400", pattern=r"^\d+(,\d+)*$", description="Numbers of environments to try."
    )
    seconds: float = Field(15.0, gt=0, description="How long each number is watched.")
    status_every_s: float = Field(0.1, gt=0, description="Seconds between two /status-env of one environment.")


@dataclass
class Row:
    """Holds what one number of environments came to."""

    environments: int
    registered_s: float
    requests: int
    seconds: float
    cpu_s: float
    times: list[float]
    memory: int

    @property
    def cells(self) -> list[str]:
        return [
            str(self.environments),
            f"{self.registered_s:.1f} s",
            f"{self.requests / self.seconds:.0f}",
            f"{100 * self.cpu_s / self.seconds:.0f} %",
            f"{1000 * statistics.median(self.times):.1f} ms",
            f"{1000 * percentile(self.times, 0.99):.1f} ms",
            f"{self.memory / 1e6:.0f} MB",
        ]


HEAD = ("environments", "all registered in", "requests/s", "API's share of a core", "median", "p99", "API's memory")


class Environments:
    """All of one number, over connections of their own."""

    def __init__(self, session: aiohttp.ClientSession, url: str, settings: Settings) -> None:
        self._session, self._url, self._settings = session, url, settings
        self.times: list[float] = []

    async def post(self, path: str, content: object) -> bytes:
        start = time.perf_counter()
        async with self._session.post(self._url + path, data=msgspec.json.encode(content)) as reply:
            reply.raise_for_status()
            body = await reply.read()
        self.times.append(time.perf_counter() - start)
        return body

    async def status(self, env_id: object) -> None:
        start = time.perf_counter()
        async with self._session.get(f"{self._url}/status-env?env_id={env_id}") as reply:
            reply.raise_for_status()
            await reply.read()
        self.times.append(time.perf_counter() - start)

    async def register(self, count: int) -> list[object]:
        """Their ids."""
        gate = asyncio.Semaphore(STARTING)

        async def one(number: int) -> object:
            async with gate:
                own = {"max_token_length": 2048, "desired_name": f"env{number}", "weight": 1.0, "group_size": 8}
                return msgspec.json.decode(await self.post("/register-env", own))["env_id"]

        return await asyncio.gather(*(one(number) for number in range(count)))

    async def live(self, env_id: object, number: int, count: int) -> None:
        """Heartbeats and questions until the time is over, at a phase of its own."""
        every = self._settings.status_every_s
        over = time.perf_counter() + self._settings.seconds
        await asyncio.sleep(every * number / count)
        beat = 0.0
        while (now := time.perf_counter()) < over:
            if now >= beat:
                beat = now + INTERVAL_S
                report = {"name": f"env{number}", "process": f"{number:016x}", "posted": 1, "in_flight": 8}
                await self.post("/heartbeat", {"env_id": env_id, "report": report})
            await self.status(env_id)
            await asyncio.sleep(max(0.0, now + every - time.perf_counter()))


async def measure(port: int, process: int, count: int, settings: Settings) -> Row:
    """One row."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout, trust_env=False) as session:
        environments = Environments(session, f"http://127.0.0.1:{port}", settings)
        await environments.post("/reset_data", {})
        run = {"wandb_group": "b", "wandb_project": "b", "batch_size": 8, "max_token_len": 2048, "checkpoint_dir": ""}
        await environments.post("/register", {**run, "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 9})
        async with session.get(f"http://127.0.0.1:{port}/batch") as reply:
            await reply.read()
        start = time.perf_counter()
        ids = await environments.register(count)
        registered = time.perf_counter() - start
        environments.times.clear()
        start, used = time.perf_counter(), cpu_seconds(process)
        await asyncio.gather(*(environments.live(env_id, number, count) for number, env_id in enumerate(ids)))
        seconds, used = time.perf_counter() - start, cpu_seconds(process) - used
        times = environments.times
        return Row(count, registered, len(times), seconds, used, times, resident_bytes(process))


def main() -> None:
    settings = load_config(Settings, prog="api_environments")
    configure_logging("benchmark")
    rows = []
    with tempfile.TemporaryDirectory(prefix="api-environments-") as folder, ExitStack() as running:
        server = running.enter_context(
            served(
                "with journal", Path(sys.executable), Path(__file__).parents[1], Path(folder) / "groups.db", *UNLIMITED
            )
        )
        for count in map(int, settings.environments.split(",")):
            rows.append(asyncio.run(measure(server.port, server.process, count, settings)))
            log.info("%s", dict(zip(HEAD, rows[-1].cells, strict=True)))
    print("Command: `" + shlex.join(["python", "-m", "benchmarks.api_environments", *sys.argv[1:]]) + "`")
    print(f"Machine: {machine()}; load average {os.getloadavg()[0]:.1f}\n")
    print("| " + " | ".join(HEAD) + " |", "|---:" * len(HEAD) + "|", sep="\n")
    for row in rows:
        print("| " + " | ".join(row.cells) + " |")


if __name__ == "__main__":
    main()
