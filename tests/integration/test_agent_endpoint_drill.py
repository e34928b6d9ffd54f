"""Agents are trained while the endpoint, the environment, the model's server and the batching API are killed in turn.

The agent retries nothing. It notes each reply in a file, before it continues the conversation, so that a turn that was
sampled a second time after an agent has seen it shows as two ids.
"""

import asyncio
import contextlib
import random
import shlex
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer, save_tiny_tokenizer
from tests.integration.conftest import REPOSITORY
from tests.serving import free_port
from tests.waiting import until

pytestmark = [pytest.mark.services, pytest.mark.slow]

TURNS = 12
GROUP = 4
WAIT_S = 600.0
ANSWER = "It is 4."
END = "<|im_end|>"
AGENT = """
import hashlib, json, os, sys, urllib.request
key, notes, turns = os.environ["OPENAI_API_KEY"], sys.argv[1], int(sys.argv[2])
mark = hashlib.sha256(key.encode()).hexdigest()[:12]
said = [{"role": "user", "content": f"<{mark}> start"}]
for turn in range(turns):
    asked = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": said}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
    reply = json.loads(urllib.request.urlopen(asked).read())
    with open(notes, "a") as file:
        file.write(f"{mark} {turn} {reply['id']}\\n")
    said += [reply["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
print(len(said))
"""


@dataclass
class Programs:
    """Processes by name, and what starts each again; `health` is where it answers once it is up."""

    folder: Path
    commands: dict[str, list[str]]
    health: dict[str, str]
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = await asyncio.create_subprocess_exec(
                *self.commands[name], stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        while name in self.health and not await answers(self.health[name]):
            assert self.running[name].returncode is None, (self.folder / f"{name}.log").read_text()[-2000:]
            await asyncio.sleep(0.1)

    async def kill(self, name: str) -> None:
        process = self.running[name]
        assert process.returncode is None, f"{name} has ended: {(self.folder / f'{name}.log').read_text()[-2000:]}"
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def end(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def answers(url: str) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            return (await http.get(url)).status_code == 200
    except httpx.TransportError:
        return False


def programs(folder: Path) -> tuple[Programs, str]:
    """The four processes, and the address of the batching API."""
    tokenizer = str(save_tiny_tokenizer(folder / "tokenizer"))
    model, api, endpoint = free_port(), free_port(), free_port()
    vllm, url, agents = (f"http://127.0.0.1:{port}" for port in (model, api, endpoint))
    (folder / "agent.py").write_text(AGENT)
    command = shlex.join([sys.executable, str(folder / "agent.py"), str(folder / "notes"), str(TURNS)])
    score = shlex.join([sys.executable, "-c", "import random; print(random.Random().random())"])
    python = [sys.executable, "-u"]
    environment = [
        *("--env.command", command, "--env.score_command", score, "--env.agent_sandbox", "none"),
        *("--env.agent_endpoint", agents, "--env.rollout_server_url", url, "--env.tokenizer_name", tokenizer),
        *("--env.group_size", str(GROUP), "--env.max_batches_offpolicy", "2", "--env.use_wandb", "false"),
        *("--env.steps_per_eval", "0", "--env.total_steps", "-1", "--env.max_new_tokens", "32"),
        *("--openai.base_url", f"{vllm}/v1", "--openai.server_type", "vllm", "--openai.model_name", "fake"),
    ]
    serve = [*python, str(REPOSITORY / "environments" / "agent_server.py"), "serve", *environment]
    endpoint_flags = ["--server", f"{vllm}/v1", "--model", "fake", "--tokenizer", tokenizer, "--port", str(endpoint)]
    commands = {
        "model": [
            *(*python, "-m", "atroposlib.testing.fake_inference_server", "--port", str(model)),
            *("--tokenizer", tokenizer, "--answer", ANSWER),
        ],
        "api": [*python, "-m", "atroposlib.cli.run_api", "--port", str(api), "--journal", str(folder / "api.db")],
        "endpoint": [
            *(*python, "-m", "atroposlib.agents.serve", *endpoint_flags),
            *("--journal", str(folder / "agents.journal")),
        ],
        "environment": serve,
    }
    health = {"model": f"{vllm}/health", "api": f"{url}/health", "endpoint": f"{agents}/health"}
    return Programs(folder, commands, health), url


class Trainer:
    """Leases batches of one group and holds all of them; a reply that a kill has cut off is asked for again."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, trust_env=False, timeout=30)
        self._holding: list[int] = []
        self._uuid = 0
        self.items: list[dict[str, Any]] = []

    async def register(self) -> None:
        shape = {"batch_size": GROUP, "max_token_len": 4096, "starting_step": 0, "num_steps": 10**6, "run": "drill"}
        where = {"wandb_group": "g", "wandb_project": "", "checkpoint_dir": "", "save_checkpoint_interval": 0}
        self._uuid = (await self._http.post("/register", json=shape | where)).raise_for_status().json()["uuid"]

    async def train(self, sessions: int) -> None:
        while sum(len(item["tokens"]) for item in self.items) < sessions:
            body = {"trainer": self._uuid, "holding": self._holding, "wait_s": 0.5}
            try:
                reply = (await self._http.post("/batch/lease", json=body)).raise_for_status().json()
            except httpx.HTTPError:
                await asyncio.sleep(0.1)
                continue
            if reply["batch"] is not None:
                self._holding.append(reply["lease"])
                self.items += reply["batch"]

    async def close(self) -> None:
        await self._http.aclose()


def noted(folder: Path) -> Mapping[tuple[str, str], set[str]]:
    """The ids of the replies that agents have seen, by session and turn."""
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    path = folder / "notes"
    for line in path.read_text().splitlines() if path.exists() else []:
        mark, turn, reply = line.split()
        found[mark, turn].add(reply)
    return found


async def kill_in_turn(processes: Programs, sessions: int, kills: int, seed: int) -> None:
    """Kill and start again, evenly over the turns of the drill."""
    names = [name for _, name in zip(range(kills), list(processes.commands) * kills, strict=False)]
    random.Random(seed).shuffle(names)
    for number, name in enumerate(names, 1):
        due = number * sessions * TURNS // (kills + 1)
        await until(lambda: len(noted(processes.folder)) >= due, limit_s=WAIT_S)  # noqa: B023
        await processes.kill(name)
        await processes.start(name)


@pytest.mark.parametrize(
    ("sessions", "kills"),
    [
        pytest.param(8, 4, marks=pytest.mark.timeout(600)),
        pytest.param(40, 20, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]),
    ],
)
async def test_each_turn_is_trained_once_whoever_is_killed(tmp_path: Path, sessions: int, kills: int) -> None:
    processes, url = programs(tmp_path)
    trainer = Trainer(url)
    try:
        for name in ("model", "api", "endpoint"):
            await processes.start(name)
        await trainer.register()
        await processes.start("environment")
        killing = asyncio.create_task(kill_in_turn(processes, sessions, kills, seed=sessions))
        await trainer.train(sessions)
        await killing
    finally:
        await trainer.close()
        await processes.end()
    trained = Counter[str]()
    decode = make_tiny_tokenizer().decode
    for item in trainer.items:
        assert not item.get("failed")
        for tokens, mask in zip(item["tokens"], item["masks"], strict=True):
            answers_of = decode([token for token in mask if token != -100])
            assert answers_of == f"{ANSWER}{END}" * TURNS
            trained[decode(tokens).partition("<")[2].partition("<")[2].partition(">")[0]] += 1
    seen = noted(tmp_path)
    assert trained.total() == sessions
    assert set(trained.values()) == {1}, trained
    assert {mark for mark, _ in seen} >= set(trained)
    twice = {place: replies for place, replies in seen.items() if len(replies) > 1}
    assert not twice, twice
