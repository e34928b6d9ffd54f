"""What environment tests stand on: the real batching API on a free port, a trainer that only counts, and a small
environment.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib.api.server import create_app
from atroposlib.api.settings import RunApiConfig
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from atroposlib.envs.commands.serve import serve
from atroposlib.envs.question_env import QuestionEnv
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from tests.waiting import until


class Api:
    """The real batching API on loopback; `stop` and `start` restart it without its memory, on the same port."""

    def __init__(self, settings: RunApiConfig | None = None) -> None:
        self.port = 0
        self.settings = settings
        self.answered: Counter[str] = Counter()  # requests by path
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        config = uvicorn.Config(
            self._counting(create_app(self.settings)),
            host="127.0.0.1",
            port=self.port,
            log_level="warning",
            log_config=None,
            lifespan="off",
        )
        server = self._server = uvicorn.Server(config)
        # signals are the test's
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment,method-assign]
        self._task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        self.port = server.servers[0].sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        assert self._task is not None
        self._server.should_exit = self._server.force_exit = True
        await self._task

    async def answers(self, path: str, times: int) -> None:
        """Return when so many more requests for `path` have been answered."""
        goal = self.answered[path] + times
        await until(lambda: self.answered[path] >= goal)

    async def turns(self, count: int = 5) -> None:
        """Return when an environment's loop has turned so often: at each turn it could start groups."""
        await self.answers("/status-env", count)

    def _counting(self, app: ASGIApp) -> ASGIApp:
        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, send)
            if scope["type"] == "http":
                self.answered[scope["path"]] += 1

        return counting


@contextlib.asynccontextmanager
async def running_api(settings: RunApiConfig | None = None) -> AsyncIterator[Api]:
    api = Api(settings)
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


class Trainer:
    """Registers, fetches batches, reports steps as the real trainer does; the policy version is the number of steps."""

    def __init__(
        self, url: str, batch_size: int = 8, num_steps: int = 3, starting_step: int = 0, project: str = ""
    ) -> None:
        self.url = url
        self.step = starting_step
        self.registration = {
            "wandb_group": "g",
            "wandb_project": project,
            "batch_size": batch_size,
            "max_token_len": 512,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": starting_step,
            "num_steps": num_steps,
        }
        self._first: list[dict[str, Any]] | None = None  # a batch that registering found waiting
        self.batches: list[list[dict[str, Any]]] = []
        self.accuracies: dict[int, float | None] = {}

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    async def register(self) -> None:
        await self.call("POST", "/register", self.registration | {"starting_step": self.step})
        await self.report()
        self._first = (await self.call("GET", "/batch"))["batch"]

    async def joined(self, env_id: int = 0) -> None:
        """Return when an environment of that id has registered."""
        async with aiohttp.ClientSession() as session:

            async def known() -> bool:
                return (await session.get(f"{self.url}/status-env?env_id={env_id}")).status == 200

            await until(known)

    async def report(self) -> None:
        await self.call("POST", "/trainer-step", {"step": self.step, "policy_version": self.step})

    async def fetch(self) -> list[dict[str, Any]]:
        while True:
            batch, self._first = self._first or (await self.call("GET", "/batch"))["batch"], None
            if batch:
                self.batches.append(batch)
                return batch
            await asyncio.sleep(0.02)

    async def evaluation(self, version: int) -> None:
        while True:
            reply = await self.call("GET", f"/evaluations?policy_version={version}")
            if not reply["pending"]:
                self.accuracies[version] = next((result["accuracy"] for result in reply["results"]), None)
                return
            await asyncio.sleep(0.02)

    async def train(self, steps: int, on_step: Callable[[int], Awaitable[None] | None] = lambda step: None) -> None:
        """`steps` steps; `on_step` is called between a step's batch and its report."""
        for _ in range(steps):
            await self.fetch()
            result = on_step(self.step)
            if result is not None:
                await result
            self.step += 1
            await self.report()
            await self.evaluation(self.step)


async def served(env: BaseEnv, trainer: Trainer, steps: int, limit_s: float = 20) -> Trainer:
    """The environment serves the trainer until its last step."""
    serving = asyncio.create_task(serve(env))
    await trainer.register()
    await trainer.train(steps)
    await asyncio.wait_for(serving, limit_s)
    return trainer


class CountingEnv(BaseEnv):
    """Asks for the next number; the score of a sample is its place in the group, so that scores differ."""

    name = "counting"

    def __init__(self, config: BaseEnvConfig, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.taken = 0
        self.evaluated: list[int] = []
        self.samples = 0

    async def setup(self) -> None:
        """Nothing to load."""

    async def get_next_item(self) -> int:
        self.taken += 1
        return self.taken

    async def collect_trajectory(self, item: int) -> tuple[ScoredDataItem | None, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=[{"role": "user", "content": str(item)}], max_tokens=8)
            node = managed.get_state()["nodes"][0]
        self.samples += 1
        sample = ScoredDataItem(
            tokens=node.tokens,
            masks=node.masked_tokens,
            scores=float(self.samples),
            inference_logprobs=node.logprobs,
            policy_versions=node.metadata["policy_versions"],
            generation_params={"temperature": 1.0},
        )
        return sample, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float] | None:
        self.evaluated.append(self._env_run.policy_version)
        return {"accuracy": 0.5, "correct": 1, "total": 2, "temperature": 0.0}


class Asking(QuestionEnv):
    """Asks for a number and names it in the prompt. Two numbers are held out."""

    name = "asking"

    async def setup(self) -> None:
        self.held_out = ["1", "2"]

    async def training_item(self, number: int) -> str:
        return str(number)

    def prompt(self, item: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Say {item}."}]


def config(folder: Path, api_url: str, **fields: Any) -> BaseEnvConfig:
    """A configuration that waits for nothing long."""
    defaults: dict[str, Any] = {
        "group_size": 4,
        "tokenizer_name": str(save_tiny_tokenizer(folder / "tokenizer")),
        "rollout_server_url": api_url,
        "startup_timeout": 20,
        "use_wandb": False,
        "max_batches_offpolicy": 1,
        "steps_per_eval": 2,
    }
    return BaseEnvConfig(**defaults | fields)


def server_config(server: FakeInferenceServer) -> list[APIServerConfig]:
    """The client's side of `server`."""
    return [APIServerConfig(server_type="vllm", base_url=server.base_url, model_name=server.model_name)]


def renumbered_tokenizer(folder: Path) -> str:
    """The tiny tokenizer's symbols under other ids than the fake server's own has."""
    file = save_tiny_tokenizer(folder) / "tokenizer.json"
    backend = json.loads(file.read_text())
    backend["model"]["vocab"] = {symbol: 255 - index for index, symbol in enumerate(backend["model"]["vocab"])}
    file.write_text(json.dumps(backend))
    return str(folder)
