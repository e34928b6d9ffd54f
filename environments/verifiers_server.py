"""Tasksets and harnesses of verifiers v1, unchanged: installed, built into verifiers, or a file of yours.

    scripts/verifiers_setup.sh                            verifiers, in a virtual environment of its own
    python environments/verifiers_server.py               the example taskset, API on 8000, vLLM on 9001
    python environments/verifiers_server.py serve --env.taskset mine.py --env.harness bash --env.runtime docker

    this server ──JSON lines──▶ verifiers_child.py ──▶ harness ──▶ verifiers' client ──▶ vLLM's /renderers routes
         └────────────────── policy versions, by the id of each trace ─────────────────────────────┘

verifiers plays each episode, scores it, and keeps the tokens as they were sampled. An episode that fails is a failed
rollout and never a 0. See docs/other_ecosystems.md#verifiers.
"""

import asyncio
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import aiohttp
import msgspec
from pydantic import Field

from atroposlib.addresses import without_loopback_proxies
from atroposlib.child_processes import verifiers_child
from atroposlib.child_processes.lines import ChildRefused, LineChild
from atroposlib.child_processes.pool import ChildFailed
from atroposlib.config import Reads
from atroposlib.envs.data.dataset import held_out_count
from atroposlib.envs.errors import EnvError, PeerError, WrongSetting
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.foreign.verifiers_episodes import Episode, Opened, Seat, check_sampling, decoded_episode, seats
from atroposlib.envs.limits.time_limit import paused
from atroposlib.envs.metrics import Metrics
from atroposlib.envs.payloads import Groups, Item, with_failed
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout
from atroposlib.envs.rollouts import rollout_group
from atroposlib.envs.server_handling.dispatching.dispatch import Split, gather_or_cancel
from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages
from atroposlib.wire.sessions import MODELS_ROUTE, PREFIX, SESSION_ROUTE, SessionCalls

log = get_logger(__name__)

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = Path(__file__).resolve().with_name("verifiers_tasksets") / "sums.py"
OWN_PYTHON = ROOT / ".venv-verifiers/bin/python"
KEY_VARIABLE = "ATROPOS_VLLM_API_KEY"  # verifiers keeps what has API_KEY in its name from the harness
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
NOT_INHERITED = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
REPLY_LIMIT_S = 30.0
FRUITLESS_STARTS = 3
END_LIMIT_S = 2.5


def _is_path(taskset: str) -> bool:
    return taskset.endswith(".py") or taskset.startswith((".", "/", "~"))


class VerifiersConfig(QuestionEnvConfig):
    """Settings of this environment, besides those of every question environment."""

    taskset: Annotated[str, Reads(_is_path)] = Field(
        default=str(EXAMPLE),
        min_length=1,
        description="A taskset that is installed, built into verifiers, or the path of its .py file or package.",
    )
    taskset_arguments: dict[str, Any] = Field(default={}, description='Its own settings, as {"split": "train"}.')
    harness: str | None = Field(
        default=None,
        description=(
            "The agent's program: built into verifiers, installed, or a path. If unset the taskset's own; if it has"
            " none, `null`, a chat with the taskset's tools."
        ),
    )
    runtime: Literal["subprocess", "docker"] = Field(
        default="subprocess", description="Where agents run, unless `settings` names another runtime for one."
    )
    max_turns: int | None = Field(default=None, ge=1, description="Turns of an agent, at most.")
    settings: dict[str, Any] = Field(
        default={}, description="verifiers' own configuration of the environment, which beats the fields above."
    )
    renderer: str | None = Field(
        default=None, description="Name of the renderer, for a model whose own verifiers does not know, as qwen3."
    )
    allow_host_execution: bool = Field(
        default=False, description="Let a harness execute what the model writes with runtime subprocess, as you."
    )
    forward_env: list[str] = Field(
        default=[], description="Environment variables with secrets that verifiers gets; the others it does not."
    )
    rollouts_at_once: int = Field(default=16, ge=1, description="Episodes in flight; each has a process of its own.")
    silence_limit: float = Field(
        default=300,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without a sign of life until verifiers is restarted.",
    )
    verifiers_python: str = Field(default=str(OWN_PYTHON), description="The Python of verifiers' virtual environment.")


@dataclass(frozen=True, slots=True)
class PlayedEpisode(Rollout):
    """An episode as a rollout. `seats` are those of its agents that train the policy."""

    seats: Mapping[str, Seat]
    episode: Episode


class VerifiersProcess:
    """The child that plays; started when it is first needed, and again after it has ended."""

    def __init__(self, config: VerifiersConfig, order: Mapping[str, object], environment: Mapping[str, str]) -> None:
        program = [config.verifiers_python, "-P", str(Path(verifiers_child.__file__)), str(os.getpid())]
        self._make = lambda: LineChild(
            program,
            environment=environment,
            silence_limit_s=config.silence_limit,
            said=lambda line: log.info("verifiers: %s", line),
        )
        self._order = order
        self._start_limit_s = config.startup_timeout
        self._child: LineChild | None = None
        self._starting = asyncio.Lock()
        self._fruitless = 0

    async def opened(self) -> LineChild:
        """The live child. Raises EnvError where its settings are wrong or it fails again and again, else
        RolloutFailed.
        """
        with paused():
            async with self._starting:
                if self._child is None or not self._child.is_alive:
                    await self._start()
        assert self._child is not None
        return self._child

    async def play(self, **request: Any) -> Episode:
        """One episode. Raises RolloutFailed."""
        child = await self.opened()
        try:
            return decoded_episode(await child.ask("play", **request))
        except ChildFailed as error:
            raise RolloutFailed(f"the process of verifiers failed: {error}") from error
        except ChildRefused as error:
            raise RolloutFailed(f"verifiers: {error}", "environment") from error

    async def close(self) -> None:
        """End the process and all that it started."""
        if self._child is not None:
            await self._child.close(END_LIMIT_S)

    async def _start(self) -> None:
        if self._child is not None:
            await self._child.close()
        self._child = child = self._make()
        try:
            await child.start()
            reply = await child.ask("open", self._start_limit_s, **self._order)
            self.loaded = msgspec.convert(reply, Opened)
        except (ChildFailed, ChildRefused, TimeoutError, msgspec.ValidationError) as error:
            await child.close(0.0)
            self._fruitless += 1
            reason = f"not ready within {self._start_limit_s:g} s" if isinstance(error, TimeoutError) else str(error)
            if isinstance(error, ChildRefused) or self._fruitless >= FRUITLESS_STARTS:
                raise EnvError(f"verifiers cannot open {self._order['taskset']}: {reason}") from error
            raise RolloutFailed(f"the process of verifiers does not start: {reason}") from error
        self._fruitless = 0
        told = ", ".join(f"{name}: {harness}" for name, harness in self.loaded.agents.items())
        tasks = "endless tasks" if self.loaded.tasks is None else f"{self.loaded.tasks} tasks"
        log.info(
            "verifiers %s plays %s (%s; harness of %s) in process %s",
            self.loaded.verifiers,
            self.loaded.environment,
            tasks,
            told,
            child.pid,
        )


class VerifiersEnv(QuestionEnv):
    """See the module's head. An item is the number of a task."""

    name = "verifiers"
    env_config_cls = VerifiersConfig
    deterministic = False  # its agents ask through an endpoint, and may use tools and judges that we do not know

    async def setup(self) -> None:
        """Start verifiers, and hold tasks out. Raises EnvError."""
        config: VerifiersConfig = self.config
        if not os.access(config.verifiers_python, os.X_OK):
            raise EnvError(
                f"there is no {config.verifiers_python}: run scripts/verifiers_setup.sh, or name the Python of an"
                " environment that has verifiers 0.4 with --env.verifiers_python"
            )
        self.slots = asyncio.Semaphore(config.rollouts_at_once)
        self.rewards: defaultdict[str, list[float]] = defaultdict(list)
        keys = [server.config.key for server in self.server.servers]
        self.keys = {server: f"{KEY_VARIABLE}_{number}" for number, server in enumerate(self.server.servers)}
        environment = child_environment(config, dict(zip(self.keys.values(), keys, strict=True)))
        lengths = [await self._longest(server) for server in self.server.servers]
        self.process = VerifiersProcess(config, order(config, min(lengths)), environment)
        try:
            await self.process.opened()
        except RolloutFailed as error:
            raise EnvError(str(error)) from error
        self.train_tasks, self.held_out = split_tasks(
            self.process.loaded.tasks, config.held_out_limit, config.seed, config.taskset
        )

    async def close(self) -> None:
        """End verifiers."""
        if hasattr(self, "process"):
            await self.process.close()

    async def training_item(self, number: int) -> int:
        """The tasks again and again, each time in another order; those of an endless taskset in turn."""
        if self.train_tasks is None:
            return len(self.held_out) + number
        epoch, place = divmod(number, len(self.train_tasks))
        return shuffled(self.train_tasks, f"{self.config.seed} {epoch}")[place]

    def prompt(self, item: int) -> Messages:
        """verifiers asks."""
        raise NotImplementedError("verifiers makes the prompt")

    def _identity(self, item: Item) -> object:
        config: VerifiersConfig = self.config
        return [config.taskset, config.taskset_arguments, config.harness, config.settings, item]

    def _prompt_of(self, item: Item) -> Messages | None:
        return None  # known once an episode was played

    async def rollouts(self, item: int, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        """`n` episodes of one task, which verifiers scores."""
        return await gather_or_cancel([self._play(item, temperature, top_p) for _ in range(n)])

    async def _play(self, item: int, temperature: float, top_p: float) -> PlayedEpisode:
        with paused():
            await self.slots.acquire()
        try:
            async with self.server.dedicated_server() as server:
                asked = {"temperature": temperature, "top_p": top_p, "max_tokens": self.config.max_new_tokens}
                episode = await self.process.play(
                    task=item,
                    base_url=f"{root_url(server)}{PREFIX}/v1",
                    key_variable=self.keys.get(server, f"{KEY_VARIABLE}_0"),  # one that joined has the first one's key
                    model=server.model_name,
                    tokenizer=self.config.tokenizer_name,
                    sampling=asked,
                )
                if temperature > 0:
                    check_sampling(episode, asked)
                calls = {trace.id: (await versions(server, trace.id)).calls for trace in episode.traces}
        finally:
            self.slots.release()
        trained = seats(episode, calls, asked)
        first = next(iter(trained.values())).rollout
        mean = sum(seat.reward for seat in trained.values()) / len(trained)  # of the agents that train
        return PlayedEpisode(first.text, first.messages, first.sequences, trained, episode, own_score=mean)

    async def collect_trajectories(self, item: Item) -> tuple[Groups, list[Item]]:  # type: ignore[override]
        """A group for each agent that trains the policy; it compares what the same agent did."""
        left, failed = self._env_run.survivors(await self._judged_answers(item), item)
        played = [rollout for rollout, _ in left if isinstance(rollout, PlayedEpisode)]
        groups = []
        for agent in dict.fromkeys(name for episode in played for name in episode.seats):
            mine = [episode.seats[agent] for episode in played if agent in episode.seats]
            group = rollout_group([seat.rollout for seat in mine], [seat.reward for seat in mine])
            if len(mine) < len(played):  # it did not take part in each episode
                group["group_overrides"] = {"group_size": len(mine) + failed.total()}
            groups.append(with_failed(group, Counter(failed)))
        self._note(played)
        return (groups[0] if len(groups) == 1 else groups), []

    def _note(self, played: list[PlayedEpisode]) -> None:
        for trace in (trace for episode in played for trace in episode.episode.traces):
            for name, value in {**trace.rewards, **trace.metrics}.items():
                self.rewards[name].append(value)

    async def wandb_log(self, wandb_metrics: Metrics | None = None) -> None:
        """Add the means of verifiers' named rewards and metrics."""
        named, self.rewards = self.rewards, defaultdict(list)
        means = {f"train/verifiers_{name}": sum(values) / len(values) for name, values in named.items()}
        await super().wandb_log({**(wandb_metrics or {}), **means})

    async def _longest(self, server: object) -> int:
        """Tokens that a conversation may have at this server. Raises PeerError for a server without our routes."""
        url = f"{root_url(server)}{PREFIX}{MODELS_ROUTE}"
        try:
            cards = msgspec.json.decode(await _get(server, url))["data"]
            return min(int(card["max_model_len"]) for card in cards if card.get("max_model_len"))
        except (PermanentServerError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise PeerError(
                f"{url} is not answered as verifiers' client needs it ({error}): start the server with"
                " example_trainer/vllm_api_server.py of this release"
            ) from error


def root_url(server: Any) -> str:
    """The address without /v1. Raises EnvError for a server of another kind."""
    from atroposlib.envs.server_handling.vllm_server import VLLMServer  # `--help` does not need its HTTP client

    if not isinstance(server, VLLMServer) or server.config.server_type != "vllm":
        raise WrongSetting(f"{server.name}: verifiers samples from vLLM alone (--openai.server_type vllm)")
    return server.root_url


async def versions(server: object, trace: str) -> SessionCalls:
    """Ask which policy versions sampled a trace."""
    return msgspec.json.decode(
        await _get(server, f"{root_url(server)}{PREFIX}{SESSION_ROUTE}/{trace}"), type=SessionCalls
    )


async def _get(server: Any, url: str) -> bytes:
    from atroposlib.envs.server_handling.openai_server import replied

    limit = aiohttp.ClientTimeout(total=REPLY_LIMIT_S)
    async with replied(server.http, "GET", url, timeout=limit) as reply:
        return await reply.read()


def order(config: VerifiersConfig, longest: int) -> dict[str, object]:
    """Build what the child is to open. An agent ends while there is room for one more answer in the model's context."""
    limits: dict[str, int] = {"max_total_tokens": max(1, longest - config.max_new_tokens)}
    if config.max_turns is not None:
        limits["max_turns"] = config.max_turns
    return {
        "taskset": config.taskset,
        "taskset_arguments": config.taskset_arguments,
        "harness": config.harness,
        "rollouts_at_once": config.rollouts_at_once,
        "runtime": config.runtime,
        "settings": config.settings,
        "limits": limits,
        "tokenizer": config.tokenizer_name,
        "renderer": None if config.renderer is None else {"name": config.renderer},
        "allow_host_execution": config.allow_host_execution,
    }


def child_environment(config: VerifiersConfig, keys: Mapping[str, str]) -> dict[str, str]:
    """The variables that verifiers gets: no secrets but those that were named, and `uv` on its PATH."""
    inherited = {
        name: value
        for name, value in without_loopback_proxies(os.environ).items()
        if name not in NOT_INHERITED and (name in config.forward_env or not SECRET.search(name))
    }
    folder = str(Path(config.verifiers_python).absolute().parent)
    path = os.pathsep.join([folder, inherited.get("PATH", os.defpath)])
    own = {"PATH": path, "UV_PYTHON": config.verifiers_python, "TOKENIZERS_PARALLELISM": "false"}
    return {**own, **inherited, "PATH": path, **{name: key or "EMPTY" for name, key in keys.items()}}


def split_tasks(count: int | None, held_out: int, seed: int, taskset: str) -> tuple[list[int] | None, list[int]]:
    """Numbers of tasks to train on, and to measure with: as many as `held_out_count` says. Of an endless taskset the
    first ones are held out, and None says that the others follow. Raises DataError.
    """
    if count is None:
        return None, list(range(held_out))
    kept = held_out_count(held_out, count, taskset)
    numbers = Random(seed).sample(range(count), count)
    return sorted(numbers[kept:]), numbers[:kept]


def shuffled(numbers: list[int], seed: str) -> tuple[int, ...]:
    """`numbers` in the order of one epoch."""
    return _shuffled(tuple(numbers), seed)


@lru_cache(maxsize=4)
def _shuffled(numbers: tuple[int, ...], seed: str) -> tuple[int, ...]:
    return tuple(Random(seed).sample(numbers, len(numbers)))


if __name__ == "__main__":
    VerifiersEnv.cli(default_command="serve")
