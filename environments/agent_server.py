"""An agent that you did not write: any command, started once per rollout, that calls the model by an API it knows.

    python environments/agent_server.py serve --env.command "python my_agent.py {task}"      API on 8000, vLLM on 9001
    python environments/agent_server.py process --env.command "python my_agent.py {task}" --env.tasks_path tasks.jsonl

    task ─▶ a directory, a session of the agent endpoint, the command ─▶ calls of the model, what it prints ─▶ score

The command gets OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, AGENT_SESSION_ID (what a
sub-agent names as its parent) and AGENT_TASK. A line of the file of tasks is {"task": ..., "answer": ..., "files":
{name: text}}; without a file, the tasks are the quickstart's sums and products. The score is 1 if the last number (or,
if the answer is none, the text) that it prints is the answer, or what `score_command` says, which runs in the directory
afterwards. An agent that crashes, is late or calls no model is a failed rollout.

The endpoint is a process of its own where --env.agent_endpoint names one, as in a run of the launcher. A session is
there until its group is at the batching API or thrown away, under an id that this environment finds again: started
anew, it first finishes what it had begun, and the calls that an agent made before get the replies that they had.
"""

import asyncio
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shlex
import shutil
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SecretStr, field_validator

from atroposlib.agents.flags import TOKEN
from atroposlib.agents.harbor import AT_HOME, HarborTask, read_harbor_tasks
from atroposlib.agents.program import ProgramLimits, Ran, area_of_programs, confinement, run_program, search_path
from atroposlib.config import InputPathText
from atroposlib.envs.data.data_report import question_key
from atroposlib.envs.data.dataset import held_out_count, numbered_lines
from atroposlib.envs.data.problems import Problem, arithmetic_problems
from atroposlib.envs.errors import DataError
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.limits.time_limit import paused
from atroposlib.envs.payloads import Item, ScoredDataGroup
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout
from atroposlib.envs.server_handling.dispatching.dispatch import Split, gather_or_cancel
from atroposlib.envs.server_handling.dispatching.request_seeds import current_sample, with_seed
from atroposlib.errors import reading
from atroposlib.grading import last_number_is
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.wire.batching import Cause

if TYPE_CHECKING:
    from atroposlib.agents.client import EndpointClient, OpenSession, SessionState

log = get_logger(__name__)

TASK = "{task}"
BASE_URLS = "OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
NOT_FINITE = ("nan", "inf", "-inf")  # as Python prints them
DAY_S = 86400.0  # after which a session whose environment has gone ends; agents have limits of their own


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What the agent is told, the answer if it is known, and the files of its directory by their names. Logs show the
    first two.
    """

    task: str
    answer: str | None = None
    files: dict[str, str] = field(default_factory=dict, repr=False)
    number: int = field(default=0, repr=False)  # among the items of training
    harbor: HarborTask | None = field(default=None, repr=False)


class AgentConfig(QuestionEnvConfig):
    """Settings of the agent environment, besides those of every question environment."""

    command: str = Field(
        default="",
        description='The agent: a command, without a shell, such as "python my_agent.py {task}"; {task} becomes the'
        " task's text.",
    )
    agent_endpoint: str = Field(
        default="", description="Address of the agent endpoint; default: the run's own, or one in this process."
    )
    agent_endpoint_token: SecretStr = Field(
        default=SecretStr(""), description="Its token.", json_schema_extra={"env": TOKEN}
    )
    tasks_path: InputPathText | None = Field(
        default=None,
        description="JSONL file of tasks, or directory of Harbor's task directories; default: the quickstart's.",
    )
    score_command: str = Field(
        default="",
        description="Command that scores the directory: the number or the reward of the JSON object in its last line,"
        " else 1 for exit status 0 and 0 for 1.",
    )
    max_new_tokens: int = Field(default=512, ge=1, description="Most tokens of one call, if the agent names none.")
    max_turns: int = Field(default=64, ge=1, description="Most calls of the model in one rollout.")
    agents_at_once: int = Field(default=8, ge=1, description="Agents that run at a time.")
    agent_limit_s: float = Field(default=300.0, gt=0, description="Seconds after which an agent has failed.")
    agent_memory_mb: int = Field(default=4096, ge=64, description="Address space of each process of an agent, in MB.")
    agent_folder_mb: int = Field(default=256, ge=1, description="Most MB in an agent's directory.")
    agent_processes: int = Field(default=64, ge=1, description="Most processes of an agent.")
    agent_sandbox: Literal["auto", "none"] = Field(
        default="auto", description="auto: bubblewrap where the machine grants it; none: an agent runs as you do."
    )

    @field_validator("command", "score_command")
    @classmethod
    def _can_be_split(cls, command: str) -> str:
        shlex.split(command)
        return command.strip()

    def lacks(self) -> list[str]:
        """Tell, too, which commands are not given, or name no program."""
        if not self.command:
            return ['there is no agent to start: give --env.command "python my_agent.py {task}"', *super().lacks()]
        unknown = [
            f"{program!r} is not executable: write what runs it in --env.{setting}, such as python, or `chmod +x`"
            if Path(program).is_file()
            else f"there is no program {program!r} to run: correct --env.{setting}"
            for setting, command in (("command", self.command), ("score_command", self.score_command))
            if command and shutil.which(program := words_of(command)[0], path=search_path()) is None
        ]
        return [*unknown, *super().lacks()]


class AgentEnv(QuestionEnv):
    """See the module's head."""

    name = "agent"
    env_config_cls = AgentConfig
    deterministic = False

    def __init__(self, config: AgentConfig, *others: Any, **named: Any) -> None:
        super().__init__(config, *others, **named)
        self._open = AsyncExitStack()
        self._endpoint: EndpointClient | None = None
        self._unended: defaultdict[int, list[OpenSession]] = defaultdict(list)  # of groups in work, by item
        self._begun_before: list[int] = []  # items that an earlier process had begun, the last one first
        self._slots = asyncio.Semaphore(config.agents_at_once)
        self._command = words_of(config.command)
        self.tasks: list[AgentTask] = []

    async def setup(self) -> None:
        """Read the tasks, hold some out, and find the endpoint."""
        config = self.config
        for what in config.lacks():
            raise DataError(what)
        if config.tasks_path is None:
            problems = arithmetic_problems(config.held_out_limit)
            self.held_out, self.tasks = map(_tasks_of, (problems.held_out, problems.train))
            Random(config.seed).shuffle(self.tasks)
        else:
            tasks = self._expect_scored(read_tasks(Path(config.tasks_path)))
            Random(config.seed).shuffle(tasks)
            asked = [asked_of(task) for task in tasks]
            held = held_out_count(config.held_out_limit, len(set(asked)), config.tasks_path)
            self.held_out = tasks[:held]
            kept = set(asked[:held])
            self.tasks = [task for task, key in zip(tasks, asked, strict=True) if key not in kept]
            if copies := len(tasks) - held - len(self.tasks):
                log.warning("%d copies of held-out tasks of %s are not trained on", copies, config.tasks_path)
        self._endpoint = await self._found_endpoint()
        log.info("Agents call the model at %s", self._endpoint.url)
        await self._endpoint.end(await self._endpoint.unended(self._prefix("eval")))
        begun = await self._endpoint.unended(self._prefix("train"))
        self._begun_before = sorted({int(each.split("~")[2]) for each in begun}, reverse=True)

    def _expect_scored(self, tasks: list[AgentTask]) -> list[AgentTask]:
        """The tasks, unless they cannot be scored as the settings say. Raises DataError."""
        given = {"score_command": bool(self.config.score_command), "agent_sandbox none": _is_open(self.config)}
        dropped = [f"--env.{setting}" for setting, is_given in given.items() if is_given]
        if dropped and any(task.harbor for task in tasks):
            raise DataError(f"tasks of Harbor are scored by their tests, in bubblewrap: drop {' and '.join(dropped)}")
        return tasks

    async def _found_endpoint(self) -> "EndpointClient":
        """The endpoint that the settings name, else one in this process, whose packages the help does not load."""
        from atroposlib.agents.client import EndpointClient
        from atroposlib.agents.endpoint import ANY_MODEL, EndpointSettings
        from atroposlib.agents.serve import listening
        from atroposlib.agents.sessions import Sessions

        config, token = self.config, self.config.agent_endpoint_token.get_secret_value()
        if config.agent_endpoint:
            return EndpointClient(config.agent_endpoint, token, config.startup_timeout)
        server = self.server.servers[0]
        tokenizer = self.tokenizer or load_tokenizer(server.tokenizer_id)
        sessions = Sessions(self.server, tokenizer, context=await server.context_length())
        token = token or secrets.token_urlsafe(32)  # or an agent that leaves its key out opens every session
        settings = EndpointSettings(server.model_name, (ANY_MODEL,), token)
        return EndpointClient((await self._open.enter_async_context(listening(sessions, settings))).url, token)

    async def close(self) -> None:
        """End the endpoint, if it is in this process."""
        await self._open.aclose()

    async def get_next_item(self) -> AgentTask:
        """What an earlier process had begun, then the next task."""
        if self._begun_before:
            number = self._begun_before.pop()
            self.taken = max(self.taken, number + 1)
            return await self.training_item(number)
        item: AgentTask = await super().get_next_item()
        return item

    async def training_item(self, number: int) -> AgentTask:
        """The tasks again and again."""
        return replace(self.tasks[number % len(self.tasks)], number=number)

    def prompt(self, item: AgentTask) -> Messages:
        """The task; how it is put to the model is the agent's affair."""
        return [{"role": "user", "content": item.task}]

    async def collect_trajectories(self, item: AgentTask) -> tuple[ScoredDataGroup | None, list[Item]]:
        """The group, which the API stores once even if another process posts it again after this one has died."""
        group, more = await super().collect_trajectories(item)
        if group:
            keys = sorted(each.key for each in self._unended[item.number])
            group["idempotency_key"] = hashlib.sha256(repr(keys).encode()).hexdigest()
        return group, more

    async def _decided(self, items: Sequence[Item]) -> None:
        """End the sessions of these groups: until now they were what the groups could be made of again."""
        assert self._endpoint is not None
        for number in sorted({item.number for item in items}):
            await self._endpoint.end(each.id for each in self._unended.pop(number, []))

    async def rollouts(self, item: AgentTask, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        """`n` runs of the agent, each with a session and a directory of its own."""
        return await gather_or_cancel([self._run(item, split, temperature, top_p) for _ in range(n)])

    async def _run(self, item: AgentTask, split: Split, temperature: float, top_p: float) -> Rollout:
        endpoint, config = self._endpoint, self.config
        assert endpoint is not None
        settings = {
            "split": split,
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": config.max_new_tokens,
            "limits": {"turns": config.max_turns, "time_s": DAY_S, "idle_s": DAY_S},
            **with_seed({}),
        }
        with paused():  # who waits for a place is not slow
            await self._slots.acquire()
        try:
            session = await endpoint.open(settings, self._identity_of(item, split))
            is_kept = False
            try:
                rollout = await self._rollout(item, endpoint, session)
                is_kept = split == "train"
            except asyncio.CancelledError:  # this process ends, and the next one continues the session
                is_kept = split == "train"
                raise
            finally:
                if is_kept:
                    self._unended[item.number].append(session)
                else:
                    await endpoint.end([session.id])
        finally:
            self._slots.release()
        return rollout

    def _prefix(self, split: Split) -> str:
        name = re.sub("[^A-Za-z0-9_.-]", "-", self.config.wandb_name or self.name)
        return f"{name}~{split}~"

    def _identity_of(self, item: AgentTask, split: Split) -> str:
        """An id that the next process finds. A task that is asked again, or evaluated, is another session."""
        if split == "eval" or self.config.repeat_share:
            return f"{self._prefix('eval')}{uuid.uuid4()}"
        return f"{self._prefix('train')}{item.number}~{current_sample()}"

    async def _rollout(self, item: AgentTask, endpoint: "EndpointClient", session: "OpenSession") -> Rollout:
        async with area_of_programs() as area:
            folder, ran, state = await self._ran_whole(item, endpoint, session, area)
            for node in state.nodes:
                node.note_in(self.server.ledger)
            reward = await self._scored_folder(item, folder)
        return Rollout(ran.output, state.messages, state.nodes, state={"reward": reward})

    async def _ran_whole(
        self, item: AgentTask, endpoint: "EndpointClient", session: "OpenSession", area: Path
    ) -> tuple[Path, Ran, "SessionState"]:
        """The agent's directory, its run and its session. An agent that fails while the endpoint is killed starts
        again in the same session. Raises RolloutFailed.
        """
        command = [word.replace(TASK, item.task) for word in self._command]
        for number in itertools.count():
            process, folder = await endpoint.process(), work_folder(str(area / str(number)), item)
            ran = await self._ran(command, folder, _addresses(endpoint.url, session, item.task), item.harbor)
            state = await endpoint.state(session)
            try:
                _expect_whole(ran, state)
            except RolloutFailed as error:
                if process == await endpoint.process() or state.failed is not None:
                    raise
                log.warning("An agent starts again, because the endpoint did: %s", error)
            else:
                break
        return folder, ran, state

    @property
    def _limits(self) -> ProgramLimits:
        config = self.config
        return ProgramLimits(
            config.agent_limit_s, config.agent_memory_mb << 20, config.agent_folder_mb << 20, config.agent_processes
        )

    async def _ran(
        self, command: list[str], folder: Path, environment: Mapping[str, str], harbor: HarborTask | None = None
    ) -> Ran:
        limits = self._limits
        around = [] if _is_open(self.config) else confinement(folder)
        if harbor is not None:
            limits = replace(limits, seconds=min(limits.seconds, harbor.agent_s))
            around, environment = harbor.around_agent(folder), {**environment, **AT_HOME}
        try:
            return await run_program(command, folder, environment, limits, around=around)
        except OSError as error:
            raise RolloutFailed(f"{command[0]} cannot be started: {error}", "infrastructure") from error

    async def _scored_folder(self, item: AgentTask, folder: Path) -> float | None:
        """What the task's tests or `score_command` say; None without either. Raises RolloutFailed where they say
        nothing.
        """
        if item.harbor is not None:
            return await item.harbor.reward(folder, folder.parent, self._limits)
        if not self.config.score_command:
            return None
        ran = await self._ran(words_of(self.config.score_command), folder, {})
        reward = reward_of(ran)
        if reward is None:
            raise RolloutFailed(f"score_command gave no reward: {ran.why() or ran.output[-200:]!r}", "scorer")
        return reward

    async def score(self, item: AgentTask, answer: str, state: Mapping[str, Any]) -> float | None:
        """The reward that `score_command` gave, else whether the answer is right; None if it is not known."""
        if state["reward"] is not None:
            return float(state["reward"])
        if item.answer is None:
            return None
        expected = item.answer.strip()
        return float(answer.strip() == expected or last_number_is(answer, expected))

    def reference_answer(self, item: AgentTask) -> str | None:
        """The answer, for people who read the samples."""
        return item.answer


def asked_of(task: AgentTask) -> str:
    """Return what a copy of the task asks, too: the same of the same files."""
    files = task.files if task.harbor is None else task.harbor.digests()
    return f"{question_key(task.task)} {hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()}"


def words_of(command: str) -> list[str]:
    """The words of a command, its files by their whole paths: it runs in another directory."""
    return [os.path.abspath(word) if os.path.isfile(word) else word for word in shlex.split(command)]


def _is_open(config: AgentConfig) -> bool:
    """Whether agents run without a sandbox."""
    return config.agent_sandbox == "none"


def _tasks_of(problems: Sequence[Problem]) -> list[AgentTask]:
    return [AgentTask(problem.question, problem.result) for problem in problems]


def read_tasks(path: Path) -> list[AgentTask]:
    """The tasks of a file, or Harbor's. Raises DataError, with the line or the directory."""
    if path.is_dir():
        return [AgentTask(task.instruction, harbor=task) for task in read_harbor_tasks(path)]
    with reading(f"cannot read --env.tasks_path {path}", DataError):
        lines = numbered_lines(path)
    tasks = []
    for number, line in lines:
        try:
            row = json.loads(line)
            answer = row.get("answer")
            files = {str(name): str(text) for name, text in row.get("files", {}).items()}
            tasks.append(AgentTask(str(row["task"]), None if answer is None else str(answer), files))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}:{number}: expected an object with a task ({error!r})") from error
        if wrong := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
            raise DataError(f"{path}:{number}: the file {wrong[0]!r} is not inside of the agent's directory")
    if not tasks:
        raise DataError(f"{path} has no task")
    return tasks


def work_folder(area: str, task: AgentTask) -> Path:
    """The agent's new directory, with the task's files."""
    folder = Path(area).resolve() / "work"
    folder.mkdir(parents=True)
    if task.harbor is not None:
        task.harbor.start(folder)
    for name, text in task.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def reward_of(ran: Ran) -> float | None:
    """The reward that a scorer's run tells; None if it tells none, one that is not finite, or broke a limit."""
    if ran.broken is not None:
        return None
    last = ran.output.strip().rpartition("\n")[2]
    try:
        said = json.loads(last, parse_int=float)  # an integer of any length, then
    except (ValueError, RecursionError):
        said = math.nan if last.lower() in NOT_FINITE else None
    value = said.get("reward") if isinstance(said, dict) else said
    if isinstance(value, float):
        return value if ran.status == 0 and math.isfinite(value) else None
    return {0: 1.0, 1: 0.0}.get(ran.status)


def _expect_whole(ran: Ran, session: "SessionState") -> None:
    """Raise RolloutFailed for an agent that crashed, was late, broke a limit, or called no model."""
    late = ran.broken is not None and "longer" in ran.broken
    cause: Cause = "timeout" if late else "environment"
    if (why := session.failed or ran.why()) is not None:
        when = f"after {session.turns} calls of the model" if session.turns else f"before it called {BASE_URLS}"
        raise RolloutFailed(f"the agent failed {when}: {why}", cause)
    if not session.nodes:
        raise RolloutFailed(f"the agent called no model: does it read {BASE_URLS}?", cause)


def _addresses(url: str, session: "OpenSession", task: str) -> dict[str, str]:
    key = session.key
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "AGENT_SESSION_ID": session.id,
        "AGENT_TASK": task,
    }


if __name__ == "__main__":
    AgentEnv.cli(default_command="serve")
