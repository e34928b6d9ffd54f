"""Any environment that an OpenEnv server offers, by its address. The server is used as it is.

    python environments/openenv_server.py serve --env.url http://localhost:8001      API on 8000, vLLM on 9001
    python environments/openenv_server.py process --env.url http://localhost:8001 --env.max_turns 4

    reset {"seed": 7}  ─▶ observation       ─▶ user:       Guess a number from 1 to 9.
                                               assistant:  4
    step {"number": 4} ─▶ observation,      ─▶ user:       too low
                          reward, done         ...

A question is a seed, or a line of a file of arguments for `reset`. Each rollout is an episode in its own session.
What the model writes becomes an action by the schema that the server gives, and the rewards are the environment's. A
session that is lost, or not answered in time, is a failed rollout and never a score. docs/other_ecosystems.md#openenv.
"""

import asyncio
import json
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import msgspec
from pydantic import Field, SecretStr, field_validator, model_validator

from atroposlib.clients.openenv import (
    ActionRefused,
    Limits,
    NotOpenEnv,
    OpenEnvClient,
    OpenEnvError,
    Reply,
    Session,
    StepFailed,
    as_number,
    shown,
)
from atroposlib.clients.waiting import backoff_s
from atroposlib.config import InputPathText
from atroposlib.envs.data.dataset import held_out_count, numbered_lines
from atroposlib.envs.errors import DataError, PeerError
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.foreign.openenv_actions import Part, Unreadable, form_of, instructions
from atroposlib.envs.foreign.openenv_observations import Observations
from atroposlib.envs.limits.time_limit import paused
from atroposlib.envs.limits.waits import wait_for_peer
from atroposlib.envs.metrics import Metrics
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout, Scored, with_reply
from atroposlib.envs.server_handling.dispatching.dispatch import Split, gather_or_cancel
from atroposlib.errors import reading
from atroposlib.grading import after_thoughts
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages
from atroposlib.utils.tokenizers import NoTokenizer, chat_ids
from atroposlib.wire.batching import Cause

log = get_logger(__name__)

SEEDS = 1_000_000  # of training; the held-out ones follow
TEMPLATE_TOKENS = 32  # that a chat template puts around a message, at most
GROUPS_COMPARED = 256
STATE = "state."
SHORTEST_PAUSE_S, LONGEST_PAUSE_S, GROWTH = 0.05, 30.0, 1.5  # after failures in a row
NOTHING_SHOWN = "Begin."

Arguments = dict[str, Any]  # of a reset


class OpenEnvConfig(QuestionEnvConfig):
    """The settings of this environment, beside those of every question environment."""

    url: str = Field(default="http://localhost:8001", description="Address of the OpenEnv server.")
    token: SecretStr | None = Field(
        default=None, description="Its bearer token.", json_schema_extra={"env": "OPENENV_TOKEN"}
    )
    max_turns: int = Field(default=8, ge=1, description="Actions of one episode, at most.")
    max_new_tokens: int = Field(default=256, ge=1, description="Tokens of one turn.")
    action_format: Literal["auto", "text", "json", "tool"] = Field(
        default="auto",
        description=(
            "What the model writes: the value of one field (text), a JSON object, or a tool call; auto: by the schema."
        ),
    )
    action_field: str | None = Field(default=None, description="The field whose value the model writes.")
    answer_part: Part = Field(
        default="whole", description="With format text, where that value stands: code_block, answer_tag, or whole."
    )
    system_prompt: str | None = Field(
        default=None, description="In place of the one made from the schema; an empty one for none."
    )
    task: str = Field(default="", description="Text before the first observation.")
    observation_fields: list[str] = Field(
        default=[], description="What the model sees of an observation; all if unset."
    )
    observation_template: str = Field(
        default="",
        description="Text of an observation with a place {field} for each value, instead of its fields by name.",
    )
    observation_limit: int = Field(default=4096, ge=1, description="Characters of an observation; the rest is cut.")
    observation_role: Literal["user", "tool"] = Field(
        default="user", description="Role of the messages that hold observations."
    )
    reward: str = Field(
        default="sum",
        pattern=r"^(sum|last|state\..+)$",
        description="Score of an episode: its rewards' sum, the last one, or a field of the final state (state.FIELD).",
    )
    right_from: float = Field(default=1.0, description="The score from which an episode counts as solved.")
    unfinished_score: float | None = Field(
        default=None, description="Score of an episode that the environment did not end; if unset, as of one it ended."
    )
    invalid_action: Literal["tell", "end"] = Field(
        default="tell",
        description="After an answer that is not an action: tell the model and continue, or end the episode.",
    )
    invalid_score: float = Field(default=0.0, description="Score of an episode that an invalid action ended.")
    step_error: Literal["fail", "invalid"] = Field(
        default="fail",
        description="When the environment's own code raises in a step: the rollout failed, or the action was invalid.",
    )
    reset_arguments: dict[str, Any] = Field(default={}, description="Arguments of every reset, beside the seed.")
    resets_path: InputPathText | None = Field(
        default=None, description="JSONL file with the arguments of one reset in each line; part of it is held out."
    )
    max_sessions: int = Field(default=0, ge=0, description="Sessions at once; 0: as many as the server takes.")
    session_wait: float = Field(
        default=300.0,
        gt=0,
        description="Seconds without any session becoming free, after which a waiting rollout fails.",
    )
    reply_timeout: float = Field(default=60.0, gt=0, description="Seconds for the answer to a reset or a step.")

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url.strip())
        scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
        if scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ValueError("expected http://HOST:PORT; a token goes to OPENENV_TOKEN")
        return f"{scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/ws')}"

    @field_validator("observation_fields", mode="before")
    @classmethod
    def _by_commas(cls, value: object) -> object:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parts_are_of_text(self) -> Self:
        if self.observation_template and self.observation_fields:
            raise ValueError("observation_template and observation_fields both choose what is shown: give one")
        if self.answer_part != "whole" and self.action_format not in ("auto", "text"):
            raise ValueError(f"answer_part {self.answer_part} is for action_format text")
        return self


@dataclass
class Play:
    """An episode so far."""

    messages: Messages
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    invalid: int = 0
    used: int | None = None  # tokens of the conversation, if the server told
    text: str = ""
    outcome: str = ""


class OpenEnv(QuestionEnv):
    """See the module's head."""

    name = "openenv"
    env_config_cls = OpenEnvConfig
    outcomes = ("finished", "stopped", "out_of_turns", "out_of_context", "invalid")
    deterministic = False  # a server that we do not know gives observations and rewards

    def __init__(self, config: OpenEnvConfig, *others: Any, **named: Any) -> None:
        super().__init__(config, *others, **named)
        token = config.token.get_secret_value() if config.token else None
        limits = Limits(config.max_sessions, config.session_wait, config.reply_timeout)
        self.right_from = config.right_from
        self.openenv = OpenEnvClient(config.url, limits, token)
        self.observations = Observations(
            self.tokenizer, config.observation_fields, config.observation_limit, config.observation_template
        )
        self.resets: list[Arguments] = []  # of the file to train on
        self.played: list[Mapping[str, Any]] = []  # the states of the episodes since the last log
        self._first: dict[str, str] = {}  # observation of a reset
        self._compared: deque[str] = deque()
        self._is_told = False
        self._failed_in_row = 0

    # --- the questions --------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Read the schema, begin an episode to see that it works, and hold questions out."""
        config = self.config
        schema = self._defused(await self._asked("the schema of an action", self.openenv.schema))
        self.observations.declare(self.openenv.observation_schema)
        name, about = await self._asked("the environment's name", self.openenv.description)
        try:
            self.form = form_of(schema, config.action_format, config.action_field, config.answer_part)
        except ValueError as error:
            raise PeerError(f"{config.url}: {error}") from None
        self._hold_out()
        first, tools = await self._tried(self.held_out[0])
        self.system = config.system_prompt
        if self.system is None:
            intro = self.observations.clean(f"You act in the environment {name}{f': {about}' if about else '.'}")
            self.system = f"{intro}\n\n{instructions(self.form, tools)}"
        try:
            self._opening(self.held_out[0], first)
        except RolloutFailed as error:
            raise PeerError(f"{config.url}: {error}") from None
        log.info(
            "%s is %s; an action is %s",
            config.url,
            shown(name),
            {"text": f"its {self.form.field}", "json": "a JSON object", "tool": "a tool call"}[self.form.kind],
        )

    async def _asked(self, what: str, ask: Any) -> Any:
        remedy = "start the OpenEnv server, or correct --env.url"
        try:
            return await wait_for_peer(
                what, self.config.url, ask, timeout_s=self.config.startup_timeout, remedy=remedy, every_s=1.0
            )
        except NotOpenEnv as error:
            raise PeerError(str(error)) from None

    async def _tried(self, item: Arguments) -> tuple[Reply, list[Mapping[str, object]]]:
        """The first observation, and the tools if the environment has any. Raises PeerError where no episode can
        begin.
        """
        listed: object = []
        try:
            session, first = await self.openenv.begin(item)
            try:
                if self.form.kind == "tool":
                    listed = (await session.step({"type": "list_tools"})).observation.get("tools")
            finally:
                await self.openenv.end(session)
        except OpenEnvError as error:
            raise PeerError(f"no episode can begin: {error}") from None
        log.info("The first observation of %s: %s", item, shown(self.observations.text(first.observation)))
        tools = [self._defused(tool) for tool in listed if _is_tool(tool)] if isinstance(listed, list) else []
        if self.form.kind == "tool" and not tools:
            raise PeerError(f"{self.config.url} lists no tools; choose --env.action_format json or text")
        return first, tools

    def _defused(self, described: Mapping[str, object]) -> Mapping[str, object]:
        """The server's description of actions, without special tokens."""
        found: Mapping[str, object] = json.loads(self.observations.defuse(json.dumps(described, ensure_ascii=False)))
        return found

    def _hold_out(self) -> None:
        config = self.config
        if config.resets_path is None:
            self.held_out = [self._seeded(SEEDS + n) for n in range(config.held_out_limit)]
            return
        resets = read_resets(Path(config.resets_path))
        held = held_out_count(config.held_out_limit, len(resets), config.resets_path)
        shuffled = random.Random(config.seed).sample(resets, len(resets))
        held_out, self.resets = shuffled[:held], shuffled[held:]
        self.held_out = [self._seeded(SEEDS + n) | reset for n, reset in enumerate(held_out)]

    async def training_item(self, number: int) -> Arguments:
        """A seed that is never a held-out one; with a file its lines again and again, each time in another order."""
        generator = random.Random(f"{self.config.seed} {number}")
        seeded = self._seeded(generator.randrange(SEEDS))
        if not self.resets:
            return seeded
        epoch, place = divmod(number, len(self.resets))
        order = random.Random(f"{self.config.seed} epoch {epoch}").sample(range(len(self.resets)), len(self.resets))
        return seeded | self.resets[order[place]]

    def _seeded(self, seed: int) -> Arguments:
        return {"seed": seed, **self.config.reset_arguments}

    def prompt(self, item: Arguments) -> Messages:
        """Return what comes before the first observation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.config.task}]

    def _identity(self, item: Arguments) -> object:
        return [self.config.url, item, self.prompt(item)]

    async def score(self, item: Arguments, answer: str, state: Mapping[str, Any]) -> Scored:
        """Return the environment's score of the episode, and how it ended."""
        return Scored(state["score"], state["outcome"])

    # --- an episode -----------------------------------------------------------------------------------------------

    async def rollouts(self, item: Arguments, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        """`n` episodes that begin with the same reset."""
        return await gather_or_cancel([self._episode(item, split, temperature, top_p) for _ in range(n)])

    async def _episode(self, item: Arguments, split: Split, temperature: float, top_p: float) -> Rollout:
        try:
            with paused():  # who waits for a session is not slow
                session, first = await self.openenv.begin(item)
            try:
                episode = await self._play(session, self._opening(item, first), split, temperature, top_p)
            finally:
                await self.openenv.end(session)
        except OpenEnvError as error:
            await self._slow_down()
            cause: Cause = "environment" if isinstance(error, StepFailed) else "infrastructure"
            raise RolloutFailed(str(error), cause) from None
        self._failed_in_row = 0
        if split == "train":
            self.played.append(episode.state)
        return episode

    async def _slow_down(self) -> None:
        """A server that fails at once is not asked at once again."""
        self._failed_in_row += 1
        with paused():
            await asyncio.sleep(backoff_s(self._failed_in_row, SHORTEST_PAUSE_S, LONGEST_PAUSE_S, GROWTH))

    def _opening(self, item: Arguments, first: Reply) -> Play:
        """The conversation up to the first observation."""
        if first.done:
            raise RolloutFailed(f"the environment ended the episode in the reset with {item}", "environment")
        seen = self.observations.text(first.observation)
        self._compare(item, seen)
        messages = self.conversation(item)
        content = "\n\n".join(filter(None, [messages[-1]["content"], seen])) or NOTHING_SHOWN
        play = Play([*messages[:-1], {"role": "user", "content": content}])
        if (taken := self._taken(play, "")) + self.config.max_new_tokens > self._context:
            raise RolloutFailed(
                f"the first prompt has {taken} tokens, which with max_new_tokens {self.config.max_new_tokens} is more"
                f" than {self._context}, {self._env_run.conversation_limit[1]}: raise that, or lower"
                " --env.observation_limit",
                "environment",
            )
        return play

    async def _play(self, session: Session, play: Play, split: Split, temperature: float, top_p: float) -> Rollout:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            while not play.outcome:
                reply = await managed.chat_completion(
                    messages=play.messages,
                    max_tokens=self.config.max_new_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    split=split,
                )
                play.text = reply.choices[0].message.content or ""
                play.used = reply.usage.total_tokens if reply.usage else None
                play.messages = with_reply(play.messages, play.text)
                play.turns += 1
                await self._act(session, play)
            sequences = managed.get_state()["nodes"]
        score = await self._score_of(session, play)
        state = {"score": score, "outcome": play.outcome, "turns": play.turns, "invalid": play.invalid}
        return Rollout(play.text, play.messages, sequences, state=state)

    async def _act(self, session: Session, play: Play) -> None:
        """The answer as an action, and what the environment shows after it."""
        try:
            action = self.form.read(without_thoughts(play.text))
            if action is None:
                play.outcome = "stopped"
                return
            reply = await self._stepped(session, action)
        except (Unreadable, ActionRefused) as error:
            play.invalid += 1
            if self.config.invalid_action == "end" or (isinstance(error, ActionRefused) and error.is_over):
                play.outcome = "invalid"
                return
            seen = self.observations.clean(f"Invalid action: {self._without_address(str(error))}")
        else:
            if reply.reward is not None:
                play.rewards.append(reply.reward)
            if reply.done:
                play.outcome = "finished"
                return
            seen = self.observations.text(reply.observation) or "(nothing)"
        self._go_on(play, seen)

    def _without_address(self, text: str) -> str:
        """Return what the model may see: an address says nothing to it, and would differ from run to run."""
        url = self.config.url
        return text.replace(f" at {url}", "").replace(url, "the server").replace(urlsplit(url).netloc, "the server")

    async def _stepped(self, session: Session, action: Mapping[str, object]) -> Reply:
        try:
            return await session.step(action)
        except StepFailed as error:
            if self.config.step_error == "fail":
                raise
            raise ActionRefused(str(error)) from None

    def _go_on(self, play: Play, seen: str) -> None:
        """Another turn, unless there are too many, or it would not fit the context."""
        play.messages = [*play.messages, {"role": self.config.observation_role, "content": seen}]
        if play.turns >= self.config.max_turns:
            play.outcome = "out_of_turns"
        elif self._taken(play, seen) + self.config.max_new_tokens > self._context:
            play.outcome = "out_of_context"
        if play.outcome:
            play.messages = play.messages[:-1]  # the model does not see it

    def _taken(self, play: Play, seen: str) -> int:
        """Tokens of the conversation, about; none where an evaluation has no tokenizer: the server refuses too many."""
        if isinstance(self.tokenizer, NoTokenizer):
            return 0
        if play.used is None:
            return len(chat_ids(self.tokenizer, play.messages, add_generation_prompt=True))
        return play.used + len(self.tokenizer.encode(seen, add_special_tokens=False)) + TEMPLATE_TOKENS

    @property
    def _context(self) -> int:
        """Tokens of an episode, at most: what this environment was told, and what the trainer takes."""
        return self._env_run.conversation_limit[0]

    async def _score_of(self, session: Session, play: Play) -> float:
        """By the settings. Raises RolloutFailed where the environment ended the episode and gave no reward."""
        rule, unfinished = self.config.reward, self.config.unfinished_score
        if play.outcome == "invalid":
            return float(self.config.invalid_score)
        if play.outcome != "finished" and unfinished is not None:
            return float(unfinished)
        if rule.startswith(STATE):
            return self._state_score(await session.state(), rule.removeprefix(STATE))
        if not play.rewards and play.outcome == "finished":
            raise RolloutFailed(
                "the environment ended the episode without a reward; if its state has one, --env.reward state.FIELD",
                "environment",
            )
        total = as_number(sum_of(play.rewards) if rule == "sum" else [0.0, *play.rewards][-1])
        if total is None:
            raise RolloutFailed("the rewards of the episode add up to no finite number", "environment")
        return total

    def _state_score(self, state: Mapping[str, object], path: str) -> float:
        found: object = state
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        number = as_number(found)
        if number is None:
            raise RolloutFailed(f"the state has no number {path} (--env.reward {STATE}{path})", "environment")
        return number

    def _compare(self, item: Arguments, seen: str) -> None:
        """Warn once where two episodes of one group begin differently."""
        key = json.dumps(item, sort_keys=True, default=str)
        if key not in self._first:
            self._first[key] = seen
            self._compared.append(key)
            if len(self._compared) > GROUPS_COMPARED:
                del self._first[self._compared.popleft()]
        elif self._first[key] != seen and not self._is_told:
            self._is_told = True
            log.warning(
                "Two episodes of one group began differently, both by the reset with %s. If the environment ignores the"
                " seed, a group's answers are to different tasks, and their scores say less about the answers",
                item,
            )

    # --- evaluation and metrics -----------------------------------------------------------------------------------

    async def wandb_log(self, wandb_metrics: Metrics | None = None) -> None:
        """Add how long episodes were, and how many of their actions were invalid."""
        played, self.played = self.played, []
        metrics = dict(wandb_metrics or {})
        if played:
            turns = sum(state["turns"] for state in played)
            metrics["train/turns"] = turns / len(played)
            metrics["train/actions_invalid"] = sum(state["invalid"] for state in played) / turns
        await super().wandb_log(metrics)

    async def close(self) -> None:
        """Leave the server."""
        await self.openenv.close()


def without_thoughts(answer: str) -> str:
    """Return what follows the thoughts. Raises Unreadable where they have no end."""
    said = after_thoughts(answer)
    if said is None:
        raise Unreadable("nothing follows the thoughts, which have no </think>")
    return said


def sum_of(rewards: Sequence[float]) -> float:
    """Return the sum as it is rounded once: ten times 0.1 is 1. Not finite where it is too large for a number, or has
    infinities of both signs.
    """
    try:
        return math.fsum(rewards)
    except (OverflowError, ValueError):
        return sum(rewards)


def read_resets(path: Path) -> list[Arguments]:
    """The lines of a JSONL file, each an object. Raises DataError naming file and line."""
    with reading(f"cannot read {path}", DataError):
        lines = numbered_lines(path)
    found = []
    for number, line in lines:
        with reading(f"{path}:{number} is not JSON", DataError, remedy="write one object per line"):
            record = msgspec.json.decode(line)
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number} is not an object with the arguments of a reset")
        found.append(record)
    return found


def _is_tool(tool: object) -> bool:
    kinds = {"name": str, "description": str, "input_schema": dict}
    return isinstance(tool, dict) and all(isinstance(tool.get(name), kind) for name, kind in kinds.items())


if __name__ == "__main__":
    OpenEnv.cli(default_command="serve")
