"""The sessions of an endpoint: each is one rollout's ManagedServer, with its turns, limits, key and reward.

    call ──▶ the same call before? ──yes──▶ its reply, again
                 └─no─▶ limits ──▶ ManagedServer ──▶ journal ──▶ reply

A call that was answered is never sampled again, so a client that retries gets the tokens that are trained on. A call
that differs from the one that was answered at its place in the conversation is a branch, and is counted. A child is a
session of its own whose sequences belong to its parent's rollout; limits are those of the whole rollout. A rollout that
breaks one, or that nobody uses, has failed: it has a cause, and no reward.
"""

import asyncio
import math
import secrets
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field

from atroposlib.agents.dialects import responses
from atroposlib.agents.model_call import (
    BAD_REQUEST,
    FORBIDDEN,
    NOT_FOUND,
    JsonObject,
    Messages,
    ModelCall,
    ModelReply,
    Refused,
    reply_of,
)
from atroposlib.agents.tape import Tape, TapedRoute, playing, recording
from atroposlib.agents.turn_journal import SessionRecord, Turn, TurnJournal
from atroposlib.api.journal.journal_file import JournalError
from atroposlib.envs.server_handling.dispatching.request_seeds import RequestSeeds, seeded
from atroposlib.envs.server_handling.managed_server import ManagedServer, SequenceNode
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.logs import get_logger
from atroposlib.utils.tokenizers import Tokenizer

log = get_logger(__name__)

CONFLICT = 409
INLINE_BYTES = 1 << 16
NAME_CHARS = 200  # of a session's id, or a sub-agent's name, at most
NOT_TRAINED_ON = "nobody trains on it"


class Limits(BaseModel):
    """What a session and all below it may use together. Time passes while the endpoint runs."""

    turns: int = Field(default=256, ge=1, description="Most calls of the model in a session, or answers to them.")
    tokens: int = Field(default=1_000_000, ge=1, description="Most sampled tokens of a session.")
    time_s: float = Field(default=3600.0, gt=0, description="Seconds after which a session ends as failed.")
    idle_s: float = Field(default=900.0, gt=0, description="Seconds without a call after which a session has failed.")
    megabytes: float = Field(default=64.0, gt=0, description="Most MB of requests of a session.")
    children: int = Field(default=32, ge=0, description="Most sub-agents that are sessions of their own.")
    kept_s: float = Field(
        default=86_400.0, gt=0, description="Seconds for which a session is kept that has failed or has a reward."
    )


class SessionSettings(BaseModel):
    """What a session is created with. The numbers of sampling hold where a request names none."""

    model_config = ConfigDict(extra="forbid")

    tool_parser: str | None = "hermes"
    preserve_think_blocks: bool = False
    track_tree: bool = False
    base_url: str | None = None  # of the one server to sample from
    samples_again: bool = False  # a call that is repeated, as in the environment's own process
    split: Literal["train", "eval"] = "train"
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(default=1024, ge=1)
    seed: int | None = None  # from which a request without one gets its own
    limits: Limits = Limits()


@dataclass(eq=False)
class Session:
    """One rollout, or a sub-agent's part of its parent's. `answer` is all that agents reach of it."""

    record: SessionRecord
    settings: SessionSettings
    managed: ManagedServer
    journal: TurnJournal | None
    context: int | None = None  # tokens of a prompt and its answer together, if the server says
    parent: "Session | None" = None
    turns: dict[str, Turn] = field(default_factory=dict)  # by the hash of the call
    children: list["Session"] = field(default_factory=list)
    branches: int = 0
    repeated: int = 0
    sampled: int = 0
    nbytes: int = 0
    used_at: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.monotonic)
    is_written: bool = True  # its record; the next look writes what could not be written
    is_ending: bool = False  # it is forgotten once that is on disk
    _in_flight: dict[str, "asyncio.Task[ModelReply]"] = field(default_factory=dict)
    _awaited: dict[str, int] = field(default_factory=dict)  # answers of each
    _begun: int = 0

    @property
    def line(self) -> list["Session"]:
        """It, its parent, and so on up to the session whose rollout it belongs to."""
        return [self, *(self.parent.line if self.parent is not None else ())]

    @property
    def family(self) -> list["Session"]:
        """It and all below it."""
        return [self, *(each for child in self.children for each in child.family)]

    @property
    def nodes(self) -> list[SequenceNode]:
        """Its sequences, then those of its children."""
        return [*self.managed.current_nodes, *(node for child in self.children for node in child.nodes)]

    @property
    def conversation(self) -> Messages:
        """The messages of its last turn, with the first answer to them; for people who read the samples."""
        if not self.turns:
            return next((said for child in self.children if (said := child.conversation)), [])
        last = max(self.turns.values(), key=lambda turn: turn.order)
        return [*last.asked["messages"], {"role": "assistant", "content": last.reply.answers[0].text}]

    def expect_going_on(self) -> None:
        """Raise Refused if it, or one that it is below, is being ended."""
        if any(each.is_ending for each in self.line):
            raise self.line[-1].ended(NOT_TRAINED_ON)

    async def answer(self, call: ModelCall, nbytes: int = 0) -> ModelReply:
        """The reply to a call, which is on disk by then. Raises Refused, ServerError, ValueError, JournalError."""
        rollout = self.line[-1]
        rollout.used_at = time.monotonic()
        key = uuid.uuid4().hex if self.settings.samples_again else call.key()
        if (known := self.turns.get(key)) is not None:
            self.repeated += 1
            log.info("Session %s: a call is repeated, and gets the reply that it had", self.record.id)
            return known.reply
        if key not in self._in_flight:
            self.expect_going_on()
            self.nbytes += nbytes
            await rollout.check_limits(answers=call.n)
            task = asyncio.create_task(self._turn(call, key, nbytes))
            self._in_flight[key], self._awaited[key] = task, call.n
            task.add_done_callback(lambda _: (self._in_flight.pop(key, None), self._awaited.pop(key, None)))
        task = self._in_flight[key]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise rollout.ended(rollout.record.failed or NOT_TRAINED_ON) from None
        finally:
            rollout.used_at = time.monotonic()

    async def count(self, call: ModelCall, nbytes: int) -> int:
        """The tokens of the prompt that a call would send, which uses no turn of the session, but time and bytes as a
        call does. Raises Refused, ValueError.
        """
        rollout = self.line[-1]
        rollout.used_at = time.monotonic()
        self.nbytes += nbytes
        await rollout.check_limits()
        return await asyncio.to_thread(self.prompt_tokens, call)

    def conversation_of(self, response_id: str) -> Messages:
        """The messages up to and with a response, without its instructions. Raises Refused."""
        for turn in self.turns.values():
            if f"resp_{turn.reply.id}" == response_id:
                return [*turn.said, *responses.messages_of(responses.output(turn.reply))]
        raise Refused(
            BAD_REQUEST, f"Previous response with id '{response_id}' not found.", param="previous_response_id"
        )

    def prompt_tokens(self, call: ModelCall) -> int:
        """The tokens of the prompt that a call would send. Raises ValueError."""
        return self.managed.prompt_length(call.messages, call.tools, call.sampling.get("chat_template_kwargs"))

    async def fail(self, cause: str) -> None:
        """End the session and the calls under way without a reward, unless it has one. Raises JournalError."""
        if self.record.failed is None and self.record.reward is None:
            log.warning("Session %s has failed: %s", self.record.id, cause)
            self.record.failed, self.used_at = cause, time.monotonic()
            for each in self.family:
                each.cancel()
            await self.written()

    def cancel(self) -> None:
        """End the calls that are under way."""
        for task in self._in_flight.values():
            task.cancel()

    def ended(self, cause: str) -> Refused:
        """The error of a call of a session that has ended."""
        return Refused(FORBIDDEN, f"session {self.record.id} has ended: {cause}", code="session_ended")

    async def reward(self, value: float) -> None:
        """Set the reward. Raises Refused for a number that is none, and for a session that failed."""
        if not math.isfinite(value):
            raise Refused(BAD_REQUEST, f"the reward is {value}: expected a finite number", param="reward")
        if self.record.failed is not None:
            raise Refused(CONFLICT, f"session {self.record.id} has failed ({self.record.failed}): it has no reward")
        self.record.reward, self.used_at = value, time.monotonic()
        await self.written()

    async def replay(self, turns: list[Turn]) -> None:
        """Make the sequences of these turns again, as they were."""
        rollout = self.line[-1]
        for turn in turns:
            with playing(turn.tape):
                made = reply_of(await self.managed.chat_completion(**turn.asked), ())
            self._know_calls(made, turn.reply)
            self._keep(turn)
            self.nbytes += turn.nbytes
            rollout.started_at = min(rollout.started_at, time.monotonic() - turn.after_s)
        for node in self.managed.current_nodes:
            node.note_in(self.managed.server.ledger)

    def description(self) -> JsonObject:
        """What GET /sessions/ID shows besides the sequences."""
        return {
            "id": self.record.id,
            "parent": self.record.parent,
            "children": [child.record.id for child in self.children],
            "created_at": self.record.created_at,
            "turns": len(self.turns),
            "sampled_tokens": self.sampled,
            "branches": self.branches,
            "repeated_calls": self.repeated,
            "reward": self.record.reward,
            "failed": self.record.failed,
        }

    async def check_limits(self, *, answers: int = 0) -> None:
        """Fail before a call for so many answers that its rollout may not make. Raises Refused for it."""
        cause = self._broken_time(time.monotonic()) or self._broken_bytes()
        cause = cause or (self._broken_use(answers) if answers else None)
        if cause is not None:
            await self.fail(cause)
        if (cause := self.record.failed or cause) is not None:
            raise self.ended(cause)

    async def check_time(self, now: float) -> None:
        """Fail if nobody used it for too long, or it takes too long; write what could not be written before. Raises
        JournalError.
        """
        if not self.is_written:
            await self.written()
        if (cause := self._broken_time(now)) is not None:
            await self.fail(cause)

    def is_old(self, now: float) -> bool:
        """Return whether it failed or got its reward so long ago that it is forgotten."""
        has_ended = self.record.failed is not None or self.record.reward is not None
        return has_ended and now - self.used_at > self.settings.limits.kept_s

    def _broken_time(self, now: float) -> str | None:
        limits = self.settings.limits
        if now - self.started_at > limits.time_s:
            return f"it took more than {limits.time_s:g} s"
        if now - self.used_at > limits.idle_s and not any(each._in_flight for each in self.family):
            return f"it was idle for {limits.idle_s:g} s"
        return None

    def _broken_use(self, answers: int) -> str | None:
        limits, family = self.settings.limits, self.family
        known = sum(len(turn.reply.answers) for each in family for turn in each.turns.values())
        if known + sum(sum(each._awaited.values()) for each in family) + answers > limits.turns:
            return f"it made more than {limits.turns} calls"
        if sum(each.sampled for each in family) >= limits.tokens:
            return f"it sampled {limits.tokens} tokens"
        return None

    def _broken_bytes(self) -> str | None:
        most = self.settings.limits.megabytes
        return f"it sent more than {most:g} MB" if sum(each.nbytes for each in self.family) > most * 1e6 else None

    async def _turn(self, call: ModelCall, key: str, nbytes: int) -> ModelReply:
        # of a large prompt all tokens are counted, while others are answered
        asked = await asyncio.to_thread(self._asked, call) if nbytes > INLINE_BYTES else self._asked(call)
        self._begun += 1
        order = self._begun
        place = call.place()
        tape = Tape()
        seed = self.settings.seed
        seeds = seeded(RequestSeeds(seed)) if seed is not None else nullcontext()
        with recording(tape), seeds:
            completion = await self.managed.chat_completion(**asked)
        reply = reply_of(completion, asked.get("stop") or ())
        after_s = time.monotonic() - self.line[-1].started_at
        turn = Turn(order, key, place, asked, call.shown.get("said", []), tape, reply, nbytes, after_s)
        if self.journal is not None:
            await self._written_turn(self.journal, turn)
        if any(other.place == place for other in self.turns.values()):
            self.branches += 1
            log.info("Session %s: turn %d is another branch of the conversation", self.record.id, order)
        self._keep(turn)
        return reply

    def _asked(self, call: ModelCall) -> JsonObject:
        """The arguments of `ManagedServer.chat_completion`. Raises Refused for a conversation that is too long."""
        settings = self.settings
        defaults: JsonObject = {"temperature": settings.temperature, "top_p": settings.top_p}
        rollout = self.line[-1]
        left = rollout.settings.limits.tokens - sum(each.sampled for each in rollout.family)
        limit = min(call.sampling.get("max_tokens") or settings.max_tokens, max(1, left // call.n))
        if self.context is not None:
            used = self.prompt_tokens(call)
            if used >= self.context:
                raise Refused(
                    BAD_REQUEST,
                    f"This model's maximum context length is {self.context} tokens. However, your messages resulted in"
                    f" {used} tokens. Please reduce the length of the messages.",
                    code="context_length_exceeded",
                    param="messages",
                )
            limit = min(limit, self.context - used)
        chosen: JsonObject = {"messages": call.messages, "n": call.n, "split": settings.split}
        chosen |= {"tools": call.tools} if call.tools else {}
        chosen |= {"tool_choice": call.tool_choice} if call.tool_choice else {}
        extra = {"chat_template_kwargs": call.sampling["chat_template_kwargs"]} if _has_template(call) else {}
        given = {name: value for name, value in call.sampling.items() if name != "chat_template_kwargs"}
        return defaults | given | chosen | {"max_tokens": limit} | ({"extra_body": extra} if extra else {})

    def _know_calls(self, made: ModelReply, told: ModelReply) -> None:
        """Give the text of each tool call to the id under which the agent knows the call."""
        translator = self.managed.translator
        if translator is None:
            return
        for new, old in zip(made.answers, told.answers, strict=True):
            for ours, theirs in zip(new.calls, old.calls, strict=True):
                translator.call_id_to_raw_text[theirs.id] = translator.call_id_to_raw_text.pop(ours.id)

    def _keep(self, turn: Turn) -> None:
        self.turns[turn.key] = turn
        self._begun = max(self._begun, turn.order)
        self.sampled += turn.reply.completion_tokens

    async def _written_turn(self, journal: TurnJournal, turn: Turn) -> None:
        """Raises JournalError; the rollout has failed then, since its sequences hold a turn that nobody saw."""
        try:
            await journal.write_turn(self.record.id, turn)
        except JournalError as error:
            rollout = self.line[-1]
            rollout.record.failed, rollout.is_written = str(error), False
            raise

    async def written(self) -> None:
        """Return once its record is on disk, where there is a journal. One that is being ended is not written again,
        unless that fails: it would be there after a restart. Raises JournalError.
        """
        self.is_written = self.journal is None
        if self.journal is not None and not self.is_ending:
            await self.journal.write_session(self.record)
            self.is_written = True


@dataclass
class Sessions:
    """All sessions of an endpoint, by id and by key."""

    manager: ServerManager
    tokenizer: Tokenizer
    journal: TurnJournal | None = None
    context: int | None = None
    by_id: dict[str, Session] = field(default_factory=dict)
    by_key: dict[str, Session] = field(default_factory=dict)

    def prepare(self) -> None:
        """Load what the first call would load while others wait: the chat template is compiled, a text tokenised."""
        with suppress(ValueError, TemplateError):  # no template, or one that refuses this: so are calls
            nowhere = TapedRoute(self.manager, [], pinned=True)
            ManagedServer(nowhere, self.tokenizer).prompt_length([{"role": "user", "content": ""}])

    async def restore(self) -> None:
        """Make the journal's sessions again, at the endpoint's start. One whose server is not there has failed until a
        start at which it is. Raises JournalError.
        """
        for record, turns in self.journal.restored() if self.journal is not None else []:
            try:
                settings = SessionSettings.model_validate(record.settings)
                if gone := self._gone(settings):
                    settings = settings.model_copy(update={"base_url": None})
                    log.warning("Session %s cannot go on: %s", record.id, gone)
                await self._add(record, settings).replay(turns)
            except (ValueError, TemplateError) as error:
                raise JournalError(
                    f"session {record.id} of the journal cannot be made again ({error}): start with the --server,"
                    " tokenizer and chat template with which it was written, or give another --journal"
                ) from error
            if gone and record.reward is None:
                record.failed = record.failed or gone
            log.info("Session %s is restored with %d turns", record.id, len(turns))

    async def create(
        self, settings: SessionSettings, identity: str | None = None, parent: Session | None = None
    ) -> Session:
        """A new session, on disk by then. Raises Refused for an id that is taken or too many children."""
        identity = identity or str(uuid.uuid4())
        if identity in self.by_id:
            raise Refused(CONFLICT, f"there is a session {identity!r:.80} already", code="session_exists")
        if parent is not None:
            parent.expect_going_on()
            rollout = parent.line[-1]
            if (below := len(rollout.family) - 1) >= rollout.settings.limits.children:
                raise Refused(FORBIDDEN, f"session {rollout.record.id} has {below} children: no more")
        record = SessionRecord(
            identity,
            f"sk-session-{secrets.token_urlsafe(24)}",
            settings.model_dump(mode="json"),
            time.time(),
            parent.record.id if parent else None,
        )
        session = self._add(record, settings)
        try:
            await session.written()
        except JournalError:
            self._forget(session)
            raise
        return session

    async def child(self, name: str, parent: Session) -> Session:
        """The sub-agent that its parent knows by this name, which its first call makes. Raises Refused for too many."""
        identity = f"{parent.record.id}:{name}"
        known = self.by_id.get(identity)
        if known is not None and known.parent is not parent:
            raise Refused(FORBIDDEN, f"{identity!r:.80} is no session of {parent.record.id}: name another")
        if known is None and len(name) > NAME_CHARS:
            raise Refused(BAD_REQUEST, f"a sub-agent's name has at most {NAME_CHARS} characters, not {len(name)}")
        return known or await self.create(parent.settings, identity, parent)

    def get(self, identity: str) -> Session:
        """The session. Raises Refused if there is none."""
        if identity not in self.by_id:
            raise Refused(NOT_FOUND, f"no session {identity!r:.80}: it was never created, or has ended")
        return self.by_id[identity]

    async def end(self, sessions: Iterable[Session]) -> None:
        """Forget sessions and their children, all at once on disk, and then here; none is born meanwhile. Raises
        JournalError, and none has ended then.
        """
        family = list(dict.fromkeys(each for session in sessions for each in session.family))
        if self.journal is not None:
            await self._end_on_disk(self.journal, family)
        for each in family:
            each.cancel()
            self._forget(each)

    async def _end_on_disk(self, journal: TurnJournal, family: Sequence[Session]) -> None:
        for each in family:
            each.is_ending = True
        try:
            await journal.end([each.record.id for each in family])
        except JournalError:
            for each in family:
                each.is_ending = False
            raise

    async def expire(self) -> None:
        """Fail the sessions that nobody uses, or that take too long; forget those that ended long ago. Raises
        JournalError after a look at all.
        """
        unwritten: JournalError | None = None
        for session in [each for each in self.by_id.values() if each.parent is None]:
            if self.by_id.get(session.record.id) is not session:
                continue  # it was ended meanwhile
            try:
                if session.is_old(time.monotonic()):
                    await self.end([session])
                else:
                    await session.check_time(time.monotonic())
            except JournalError as error:
                unwritten = error
        if unwritten is not None:
            raise unwritten

    def _forget(self, session: Session) -> None:
        if self.by_id.pop(session.record.id, None) is None:
            return  # two requests have ended it
        self.by_key.pop(session.record.key, None)
        if (parent := self.by_id.get(session.record.parent or "")) is not None:
            parent.children.remove(session)

    def _gone(self, settings: SessionSettings) -> str:
        """Tell that the one server of a session is not there, if so."""
        try:
            if settings.base_url:
                self.manager.servers_at(settings.base_url)
        except ValueError as error:
            return str(error)
        return ""

    def _add(self, record: SessionRecord, settings: SessionSettings) -> Session:
        servers = self.manager.servers_at(settings.base_url) if settings.base_url else self.manager.servers
        managed = ManagedServer(
            TapedRoute(
                self.manager,
                [server for server in servers if server.supports_token_ids],
                pinned=settings.base_url is not None,
            ),
            self.tokenizer,
            settings.track_tree,
            tool_parser=settings.tool_parser,
            preserve_think_blocks=settings.preserve_think_blocks,
        )
        session = Session(record, settings, managed, self.journal, self.context)
        self.by_id[record.id] = self.by_key[record.key] = session
        if (parent := self.by_id.get(record.parent or "")) is not None:
            session.parent = parent
            parent.children.append(session)
        return session


def _has_template(call: ModelCall) -> bool:
    return "chat_template_kwargs" in call.sampling


def nodes_as_json(nodes: list[SequenceNode]) -> list[dict[str, Any]]:
    """The sequences as GET /sessions/ID/nodes shows them."""
    return [node.model_dump() for node in nodes]
