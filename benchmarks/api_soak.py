"""Whether the batching API loses or repeats groups when it is killed: many environments, one trainer, a ledger on the
clients' side.

    python benchmarks/api_soak.py --seconds 600

The API serves from a journal, is killed by SIGKILL at random moments, and is started again. Environments post
numbered groups until each post is acknowledged. The trainer leases batches, forgets some replies, trains,
acknowledges, and sometimes dies: then it continues from its last checkpoint. At the end the ledger must show every
acknowledged group trained on exactly once.
"""

import asyncio
import contextlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.logs import configure_logging, get_logger
from atroposlib.wire.batching import NOT_TRAINED

GROUP = 4  # sequences
BATCH = 32  # sequences
REQUEST_TIMEOUT_S = 10.0
START_DEADLINE_S = 180.0  # other work may run on the machine
DRAIN_DEADLINE_S = 240.0
FILLER = 10**9  # above the numbers of all groups

log = get_logger(__name__)


class Settings(Config):
    """Kill the batching API at random moments, and count lost and repeated groups."""

    seconds: float = Field(600.0, gt=0, description="Seconds of posting; draining comes after.")
    environments: int = Field(50, ge=1, description="Environments that post at the same time.")
    kill_every: float = Field(5.0, gt=0, description="Mean seconds between two kills of the API.")
    trainer_dies: float = Field(0.05, ge=0, le=1, description="Probability, after each batch, that the trainer dies.")
    seed: int = Field(0, ge=0, description="Seed of all random choices.")


@dataclass
class Ledger:
    """Counts what clients were promised and what they got."""

    acknowledged: set[int] = field(default_factory=set)  # groups whose post was answered 200
    trained: Counter[int] = field(default_factory=Counter)  # groups in the steps of the surviving line of checkpoints
    kills: int = 0
    deaths: int = 0
    posting: bool = True

    def faults(self) -> dict[str, int]:
        """Groups by what is wrong with them."""
        return {
            "lost": len(self.acknowledged - self.trained.keys()),
            "repeated": sum(count > 1 for count in self.trained.values()),
            "never acknowledged": len(self.trained.keys() - self.acknowledged),
        }

    def line(self) -> str:
        """The outcome."""
        faults = ", ".join(f"{count} {name}" for name, count in self.faults().items())
        return (
            f"{len(self.acknowledged)} groups acknowledged, {self.kills} kills, {self.deaths} trainer deaths: {faults}"
        )


class Api:
    """The served API, killed and started again on one port."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._command = [
            sys.executable,
            "-m",
            "atroposlib.cli.run_api",
            "--port",
            str(self.port),
            "--journal",
            str(folder / "groups.db"),
        ]
        self._log = (folder / "api.log").open("ab")
        self._process: subprocess.Popen[bytes]
        self.url = f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Return when it answers."""
        self._launch()
        end = time.monotonic() + START_DEADLINE_S
        async with aiohttp.ClientSession(trust_env=False) as session:
            while time.monotonic() < end:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/health"):
                        return
                if self._process.poll() is not None:
                    raise RuntimeError(f"the API ended with exit code {self._process.returncode}; see {self._log.name}")
                await asyncio.sleep(0.05)
        raise TimeoutError(f"no answer of {self.url} within {START_DEADLINE_S:.0f} s")

    def _launch(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=self._log, stdout=self._log)

    def end(self, how: signal.Signals) -> None:
        """End it and wait for that."""
        self._process.send_signal(how)
        self._process.wait(timeout=30)


class Client:
    """Requests that are repeated until they are answered."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def post(self, path: str, body: object, key: str | None = None) -> dict[str, Any]:
        """The reply of status 200, however long that takes."""
        headers = {} if key is None else {"Idempotency-Key": key}
        while True:
            try:
                async with self._session.post(self._url + path, json=body, headers=headers) as reply:
                    content: dict[str, Any] = await reply.json()
                    if reply.status == 200:
                        return content
                    if reply.status < 500 and reply.status != 429:
                        raise RuntimeError(f"{path} answered {reply.status}: {content}")
            except (aiohttp.ClientError, TimeoutError):
                pass  # the API is down: what this whole program is about
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(trust_env=False, timeout=timeout) as session:
        yield Client(session, url)


async def environment(client: Client, ledger: Ledger, number: int, chance: random.Random) -> None:
    """Post groups, sometimes several at once, some in halves, until posting ends."""
    joined: dict[str, Any] = {"status": "wait"}
    announcement = {"max_token_length": 8, "desired_name": f"env{number}", "weight": 1.0, "group_size": GROUP}
    while joined["status"] != "success":
        joined = await client.post("/register-env", announcement)
        await asyncio.sleep(0.1)
    mark = number * 1_000_000
    while ledger.posting:
        size = chance.choice([GROUP, GROUP, GROUP // 2])
        marks = list(range(mark, mark + chance.choice([1, 1, 2]) * GROUP // size))
        mark += len(marks)
        groups = [
            {
                "tokens": [[one, 7]] * size,
                "masks": [[NOT_TRAINED, 7]] * size,
                "scores": [0.5] * size,
                "env_id": joined["env_id"],
            }
            for one in marks
        ]
        for sent in [groups] if chance.random() < 0.5 else [[group] for group in groups]:
            key = f"{number}-{sent[0]['tokens'][0][0]}"
            await (
                client.post("/scored_data_list", sent, key)
                if len(sent) > 1
                else client.post("/scored_data", sent[0], key)
            )
            ledger.acknowledged.update(group["tokens"][0][0] for group in sent)
        await asyncio.sleep(chance.random() * 0.5)


class Trainer:
    """Trains by counting, with a checkpoint every third step."""

    def __init__(self, client: Client, ledger: Ledger, chance: random.Random, dies: float) -> None:
        self._client = client
        self._ledger = ledger
        self._chance = chance
        self._dies = dies
        self._step = 0
        self._since: list[list[int]] = []  # batches since the last checkpoint, with their leases
        self._holding: list[int] = []
        self._contained: list[int] = []  # leases in the last checkpoint that may not be acknowledged
        self._uuid = 0
        self._fresh = False  # no batch was asked for since it was registered

    async def register(self) -> None:
        """Continue from the last checkpoint."""
        self._step -= len(self._since)
        self._since, self._holding = [], []
        body = {
            "wandb_group": "soak",
            "wandb_project": "soak",
            "batch_size": BATCH,
            "max_token_len": 8,
            "checkpoint_dir": "",
        }
        body |= {"save_checkpoint_interval": 3, "starting_step": self._step, "num_steps": 10**6, "run": "soak"}
        self._fresh = True
        self._uuid = (await self._client.post("/register", body | {"trained_leases": self._contained}))["uuid"]

    async def step(self) -> bool:
        """Train on a batch; False when there is none."""
        self._fresh = False
        body = {"trainer": self._uuid, "holding": self._holding, "wait_s": 0.5}
        reply = await self._client.post("/batch/lease", body)
        if reply["batch"] is None:
            return False
        if self._chance.random() < 0.1:
            return True  # this reply never arrived
        self._holding.append(reply["lease"])
        self._since.append([item["tokens"][0][0] for item in reply["batch"]])
        self._step += 1
        await asyncio.sleep(self._chance.random() * 0.02)
        if self._step % 3 == 0:
            await self.checkpoint()
        if self._chance.random() < self._dies:
            await self.die()
        return True

    @property
    def has_lost_steps(self) -> bool:
        """Return whether it died after its last checkpoint, so that batches may wait again."""
        return self._fresh

    async def checkpoint(self) -> None:
        """Keep what was trained on; then say so, unless death comes between."""
        for marks in self._since:
            self._ledger.trained.update(mark for mark in marks if mark != FILLER)
        self._since, self._contained = [], list(self._holding)
        if self._chance.random() < self._dies:
            await self.die()
            return
        await self._client.post("/batch/ack", {"trainer": self._uuid, "leases": self._holding})
        self._holding = []

    async def die(self) -> None:
        """Forget everything since the checkpoint."""
        self._ledger.deaths += 1
        await self.register()


async def train(trainer: Trainer, everything_in: asyncio.Event) -> None:
    """Train until all groups are in and no batch is left."""
    await trainer.register()
    while True:
        last_look = everything_in.is_set()
        if await trainer.step():
            continue
        if last_look:
            await trainer.checkpoint()
            if not trainer.has_lost_steps:
                return
        await asyncio.sleep(0.05)


async def kill_now_and_then(api: Api, ledger: Ledger, mean_s: float, chance: random.Random) -> None:
    """SIGKILL and a new start, at random moments, until posting ends."""
    while ledger.posting:
        await asyncio.sleep(min(chance.expovariate(1 / mean_s), 3 * mean_s))
        api.end(signal.SIGKILL)
        ledger.kills += 1
        await asyncio.sleep(chance.random() * 0.5)
        await api.start()


async def soak(settings: Settings, folder: Path) -> Ledger:
    """The ledger of one run, whose files are in `folder`."""
    ledger, api, everything_in = Ledger(), Api(folder), asyncio.Event()
    chances = [random.Random(f"{settings.seed}-{number}") for number in range(settings.environments + 2)]
    await api.start()
    try:
        async with client_of(api.url) as client:
            trainer = Trainer(client, ledger, chances[-1], settings.trainer_dies)
            training = asyncio.create_task(train(trainer, everything_in))
            killing = asyncio.create_task(kill_now_and_then(api, ledger, settings.kill_every, chances[-2]))
            posting = [
                asyncio.create_task(environment(client, ledger, number, chances[number]))
                for number in range(settings.environments)
            ]
            await asyncio.wait([training, killing], timeout=settings.seconds, return_when=asyncio.FIRST_EXCEPTION)
            ledger.posting = False
            await asyncio.gather(killing, *posting)
            await fill_up(client)
            everything_in.set()
            await asyncio.wait_for(training, DRAIN_DEADLINE_S)
    finally:
        api.end(signal.SIGTERM)
    return ledger


async def fill_up(client: Client) -> None:
    """Post what completes the last batch, so that nothing has to stay behind. These groups are not in the ledger."""
    filler = {"tokens": [[FILLER, 7]] * GROUP, "masks": [[NOT_TRAINED, 7]] * GROUP, "scores": [0.5] * GROUP}
    for number in range(BATCH // GROUP):
        await client.post("/scored_data", filler, f"filler-{number}")


def main() -> None:
    settings = load_config(Settings, prog="api_soak")
    configure_logging("soak")
    with tempfile.TemporaryDirectory(prefix="api-soak-") as folder:
        ledger = asyncio.run(soak(settings, Path(folder)))
    print(ledger.line())
    if any(ledger.faults().values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
