"""A client that remembers exactly what was sampled, so that an environment can chat in text and still train on token
ids.

    chat_completion(messages) ──template──▶ text ──longest known prefix──▶ ids carried over + ids of the added text
                                                                                │  /generate: sampled ids,
    get_state()["nodes"] ◀── SequenceNode(tokens, masked_tokens, logprobs) ◀────┘  log-probabilities, policy versions

Sampled ids are never made from text: a conversation that continues carries the ids of its earlier turns and tokenises
only what was added. A prompt that continues no known sequence (another conversation, an edited turn, thoughts that
the template dropped) starts a new node, and the old one stays.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob
from openai.types.completion_usage import CompletionUsage

from atroposlib.envs.server_handling.dispatching.dispatch import Split
from atroposlib.envs.server_handling.sequences.chat_rendering import plain_message, render_chat
from atroposlib.envs.server_handling.sequences.sampling import (
    Arguments,
    PromptLogprobs,
    SampledSequence,
    SampledTokens,
    Settings,
)
from atroposlib.envs.server_handling.sequences.sequence_book import (
    SequenceKeeper,
    SequenceNode,
    extended_prompt,
    fresh_prompt,
    unsampled_prompt,
)
from atroposlib.envs.server_handling.server_baseline import InferenceCalls
from atroposlib.envs.server_handling.tool_call_parsers import text_parser, tool_call_parser, without_thoughts
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.wire.batching import NOT_TRAINED

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]

DUMMY_TOKENS = list(range(128))
DUMMY_LOGPROB = -0.5


class ManagedServer(SequenceKeeper):
    """Chat and text completions whose tokens are kept as nodes; one instance per rollout or group.

    `server` is anything with `sample_tokens` (a server, a manager's route). `track_tree` keeps every prefix by its
    text instead of one node per completion. `tool_parser` (see `tool_call_parsers.py`) turns tool calls into OpenAI's
    form and back. Concurrent calls are safe: nodes appear whole, in the order of the calls.
    """

    def __init__(
        self,
        server: InferenceCalls,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,
    ) -> None:
        super().__init__(track_tree)
        self.server = server
        self.tokenizer = tokenizer or server.tokenizer or load_tokenizer(server.tokenizer_id)
        self.translator: ToolCallTranslator | None = None
        if tool_parser is not None:
            self._parse = tool_call_parser(tool_parser, self.tokenizer, server)
            self.translator = ToolCallTranslator(self.tokenizer, text_parser(tool_parser))
        self.preserve_think_blocks = preserve_think_blocks

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[object] | None = None,
        template_arguments: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation; tool calls in it are the text that they were parsed from."""
        messages = [plain_message(message, index) for index, message in enumerate(messages)]
        if self.translator is not None:
            messages = self.translator.convert_messages_for_template(messages)
        return render_chat(
            self.tokenizer,
            messages,
            preserve_think_blocks=self.preserve_think_blocks,
            tools=tools,
            template_arguments=template_arguments,
        )

    # The ancestor's names, which its users' tests call.
    _convert_messages_to_prompt = render

    def _get_translator(self) -> ToolCallTranslator | None:
        return self.translator

    async def chat_completion(
        self,
        *,
        messages: Sequence[Any],
        n: int | None = 1,
        tools: Sequence[object] | None = None,
        tool_choice: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        split: Split = "train",
        **sampling: object,
    ) -> ChatCompletion:
        """A reply in OpenAI's form; its tokens become nodes.

        `tools` are shown to the model by the template, or by the system prompt where it shows none. Calls to them stay
        in the reply's text unless there is a `tool_parser`. `extra_body` may hold chat_template_kwargs and further
        sampling parameters. tool_choice "required" is asked for, not enforced. With `logprobs` the reply has those of
        the sampled tokens.
        """
        if tool_choice not in (None, "auto", "none", "required"):
            raise ValueError(f"tool_choice {tool_choice!r} is not supported; use 'auto', 'required' or 'none'")
        parses = self.translator is not None and bool(tools) and tool_choice != "none"
        extra = dict(extra_body or {})
        text = self.render(messages, tools, extra.pop("chat_template_kwargs", None))
        sampling = {**extra, **sampling}
        if sampling.pop("top_logprobs", None):
            raise ValueError("top_logprobs is not supported: of a sampled token its own log-probability is known")
        shows_logprobs = bool(sampling.pop("logprobs", False))
        made = await self._sample(text, n or 1, split, sampling, templated=True, shows_special=parses)
        choices = [
            (await self._choice(index, sequence, reply, tools if parses else None, split)).model_copy(
                update={"logprobs": self._logprobs(sequence)} if shows_logprobs else {}
            )
            for index, (sequence, reply) in enumerate(made.answers)
        ]
        self._keep(made)  # now that nothing can fail: a caller never sees what a failed call has sampled
        return ChatCompletion(
            id=f"chatcmpl-{uuid.uuid4()}",
            object="chat.completion",
            created=int(time.time()),
            model=self.server.model_name,
            choices=choices,
            usage=_usage(made.prompt, made.sampled),
        )

    async def completion(
        self, *, prompt: str, n: int | None = 1, split: Split = "train", **sampling: Any
    ) -> Completion:
        """A text completion in OpenAI's form; a prompt that repeats earlier text and continues extends that text's
        node.
        """
        extra = sampling.pop("extra_body", None) or {}
        made = await self._sample(prompt, n or 1, split, {**extra, **sampling}, templated=False)
        self._keep(made)
        return Completion(
            id=f"cmpl-{uuid.uuid4()}",
            object="text_completion",
            created=int(time.time()),
            model=self.server.model_name,
            choices=[
                CompletionChoice(index=index, finish_reason=_reason(sequence), text=text)
                for index, (sequence, text) in enumerate(made.answers)
            ],
            usage=_usage(made.prompt, made.sampled),
        )

    def prompt_length(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None = None,
        template_arguments: Mapping[str, object] | None = None,
    ) -> int:
        """The tokens of the prompt that `chat_completion` would send for a conversation."""
        text = self.render(messages, tools, template_arguments)
        return len(self._prompt(text, self.longest_prefix(text), templated=True).tokens)

    async def get_logprobs(
        self,
        *,
        messages: Sequence[Mapping[str, object]] | None = None,
        prompt: str | None = None,
        input_ids: list[int] | None = None,
        top_k: int = 1,
        n: int = 1,
        split: Split = "train",
    ) -> PromptLogprobs:
        """The server's log-probabilities of a conversation, a text or ids (exactly one of them); makes no node. `n`
        can only be 1.
        """
        if sum(given is not None for given in (messages, prompt, input_ids)) != 1:
            raise ValueError("get_logprobs needs exactly one of messages, prompt and input_ids")
        if n != 1:
            raise ValueError(f"n {n}: the log-probabilities of a prompt are one set")
        if input_ids is not None:
            return await self.server.get_logprobs(input_ids=input_ids, top_k=top_k, split=split)
        text = self.render(messages) if messages is not None else prompt or ""
        return await self.server.get_logprobs(
            prompt=text,
            input_ids=fresh_prompt(text, self.tokenizer, templated=messages is not None).tokens,
            top_k=top_k,
            split=split,
        )

    async def _choice(
        self, index: int, sequence: SampledSequence, reply: str, tools: Sequence[object] | None, split: Split
    ) -> Choice:
        """A reply in OpenAI's form; one that was cut says so even if it holds a call."""
        reason: Literal["stop", "length", "tool_calls"] = _reason(sequence)
        content, calls = reply, None
        if self.translator is not None and tools:
            found = await self._parse(reply, sequence.token_ids, tools, split)
            parsed, calls, _ = self.translator.reply_of(reply, found)
            content = parsed or ""
            reason = "tool_calls" if calls and reason == "stop" else reason
        return Choice(
            index=index,
            finish_reason=reason,
            message=ChatCompletionMessage(role="assistant", content=content, tool_calls=calls),
        )

    def _logprobs(self, sequence: SampledSequence) -> ChoiceLogprobs:
        """Each sampled token with its log-probability, in OpenAI's form."""
        pairs = zip(sequence.token_ids, sequence.logprobs, strict=True)
        texts = [(self.tokenizer.decode([token]), logprob) for token, logprob in pairs]
        return ChoiceLogprobs(
            content=[
                ChatCompletionTokenLogprob(token=text, logprob=logprob, bytes=list(text.encode()), top_logprobs=[])
                for text, logprob in texts
            ]
        )

    def _visible_text(self, sequence: SampledSequence, shows_special: bool) -> str:
        """The text of what was sampled, without special tokens; or, since those may mark a tool call, without the one
        that ends it.
        """
        ids = sequence.token_ids
        if shows_special and not self.tokenizer.decode(ids[-1:], skip_special_tokens=True):
            ids = ids[:-1]
        return str(self.tokenizer.decode(ids, skip_special_tokens=not shows_special))

    def _prompt(self, text: str, parent: SequenceNode | None, templated: bool) -> SequenceNode:
        if parent is None:
            return fresh_prompt(text, self.tokenizer, templated=templated)
        return extended_prompt(text, parent, self.tokenizer)

    async def _sample(
        self, text: str, n: int, split: Split, sampling: Arguments, *, templated: bool, shows_special: bool = False
    ) -> "_Made":
        """Sample n continuations of `text`, which are not kept yet."""
        if sampling.get("stream"):
            raise ValueError("stream=True is not supported: tokens are kept when a completion is whole")
        parameters = {key: value for key, value in sampling.items() if value is not None and key != "model"}
        call = self.open_call()
        parent = self.longest_prefix(text)
        prompt = self._prompt(text, parent, templated)
        sampled = await self.server.sample_tokens(prompt=text, input_ids=prompt.tokens, n=n, split=split, **parameters)
        if parent is None:
            prompt = unsampled_prompt(text, sampled.prompt_token_ids)
        texts = [self._visible_text(sequence, shows_special) for sequence in sampled.sequences]
        return _Made(call, parent, prompt, sampled, texts)

    def _keep(self, made: "_Made") -> None:
        """Keep what was sampled as nodes."""
        self.record(made.call, made.parent, [_node(made.prompt, sequence, text) for sequence, text in made.answers])


@dataclass(frozen=True)
class _Made:
    """What one call sampled: continuations of `prompt`, which itself continues `parent`, with their visible texts."""

    call: int
    parent: SequenceNode | None
    prompt: SequenceNode
    sampled: SampledTokens
    texts: list[str]

    @property
    def answers(self) -> list[tuple[SampledSequence, str]]:
        """Each continuation with its text."""
        return list(zip(self.sampled.sequences, self.texts, strict=True))


def _node(prompt: SequenceNode, sequence: SampledSequence, text: str) -> SequenceNode:
    versions = sequence.policy_versions
    if versions is not None and prompt.metadata:
        earlier = prompt.metadata["policy_versions"]
        versions = (min(earlier[0], versions[0]), max(earlier[1], versions[1])) if earlier is not None else None
    node = SequenceNode(
        full_text=prompt.full_text + text,
        tokens=prompt.tokens + sequence.token_ids,
        masked_tokens=prompt.masked_tokens + sequence.token_ids,
        logprobs=prompt.logprobs + sequence.logprobs,
        metadata={
            "finish_reason": sequence.finish_reason,
            "policy_versions": list(versions) if versions is not None else None,
            "version_spans": _version_spans(prompt, sequence),
        },
        settings=_settings(prompt, sequence),
    )
    if sequence.routed_experts is not None:
        node.metadata["routed_experts"] = sequence.routed_experts  # of earlier turns, too: the model read them again
    node._carried = prompt._carried
    return node


def _version_spans(prompt: SequenceNode, sequence: SampledSequence) -> list[list[int]] | None:
    """[start, version] of each run of tokens that one version sampled, over all turns; None where one is not known."""
    if sequence.version_spans is None:
        return None
    turn = [[len(prompt.tokens) + start, version] for start, version in sequence.version_spans]
    if not prompt.metadata:
        return [[0, turn[0][1]], *turn[1:]]
    if (earlier := prompt.metadata["version_spans"]) is None:
        return None
    return [*earlier, *(turn[1:] if turn[0][1] == earlier[-1][1] else turn)]


def _settings(prompt: SequenceNode, sequence: SampledSequence) -> list[tuple[int, Settings]] | None:
    """(start, settings) of each completion, over all turns; None where one is not known."""
    earlier = prompt.settings if prompt.metadata else []
    if sequence.settings is None or earlier is None:
        return None
    return [*earlier, (len(prompt.tokens), sequence.settings)]


def _reason(sequence: SampledSequence) -> Literal["stop", "length"]:
    """The finish reason in OpenAI's words, which lack vLLM's "repetition"; the node's metadata keep the server's
    own.
    """
    return "length" if sequence.finish_reason == "length" else "stop"


def _usage(prompt: SequenceNode, sampled: SampledTokens) -> CompletionUsage:
    completion = sum(len(sequence.token_ids) for sequence in sampled.sequences)
    known = len(prompt.tokens)
    return CompletionUsage(prompt_tokens=known, completion_tokens=completion, total_tokens=known + completion)


class DummyManagedServer(SequenceKeeper):
    """Stands in for ManagedServer over servers that give no token ids, for evaluation and debugging only.

    Its nodes hold real text and placeholder tokens: ids 0..127, the first one masked, every log-probability -0.5.
    Training on them teaches nothing, so it exists only when ATROPOS_ALLOW_DUMMY_MANAGED_SERVER is set.
    """

    def __init__(
        self,
        server: InferenceCalls,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
    ) -> None:
        super().__init__(track_tree)
        self.server = server
        self.tokenizer = tokenizer
        self.translator = ToolCallTranslator(tokenizer, text_parser(tool_parser)) if tool_parser is not None else None

    async def chat_completion(
        self, *, messages: Sequence[Mapping[str, Any]], tools: Sequence[object] | None = None, **arguments: Any
    ) -> ChatCompletion:
        """The server's reply; a node with placeholder tokens per choice. With a `tool_parser`, calls that the server
        left in the text are found there.
        """
        call = self.open_call()
        given: dict[str, Any] = {"tools": list(tools)} if tools else {}
        reply = await self.server.chat_completion(messages=list(messages), **given, **arguments)
        for choice in reply.choices:
            if self.translator is not None and tools and not choice.message.tool_calls:
                _find_calls(choice.message, self.translator, tools)
        prompt = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
        self.record(
            call,
            None,
            [
                _dummy_node(f"{prompt}\nassistant: {choice.message.content or ''}", choice.finish_reason)
                for choice in reply.choices
            ],
        )
        return reply

    def prompt_length(self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None) -> None:
        """Not known: the server renders the prompt."""

    async def completion(self, *, prompt: str, **arguments: Any) -> Completion:
        """The server's completion; a node with placeholder tokens per choice."""
        call = self.open_call()
        reply = await self.server.completion(prompt=prompt, **arguments)
        self.record(call, None, [_dummy_node(prompt + each.text, each.finish_reason) for each in reply.choices])
        return reply


def _find_calls(message: ChatCompletionMessage, translator: ToolCallTranslator, tools: Sequence[object]) -> None:
    """Turn the calls that a server left in its text into OpenAI's form."""
    thoughts, said = without_thoughts(message.content or "")
    content, calls, _ = translator.parse_model_output(said, tools=tools)
    if calls:
        message.content, message.tool_calls = thoughts + (content or ""), [*calls]


def _dummy_node(text: str, finish_reason: str) -> SequenceNode:
    return SequenceNode(
        full_text=text,
        tokens=DUMMY_TOKENS,
        masked_tokens=[NOT_TRAINED, *DUMMY_TOKENS[1:]],
        logprobs=[DUMMY_LOGPROB] * len(DUMMY_TOKENS),
        metadata={"finish_reason": finish_reason, "policy_versions": None, "version_spans": None, "dummy_tokens": True},
    )


class ManagedServerAdapter:
    """A managed server under the face of `openai.AsyncOpenAI`, for agent libraries that insist on one.

    It has `chat.completions.create`, `completions.create` and `base_url`; everything else of the SDK raises.
    """

    def __init__(self, managed_server: Any, base_url: str | None = None) -> None:
        self.base_url = base_url
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=managed_server.chat_completion))
        self.completions = SimpleNamespace(create=managed_server.completion)

    async def post(self, *args: object, **kwargs: object) -> NoReturn:
        """Raw requests would bypass the bookkeeping."""
        raise NotImplementedError(
            "ManagedServerAdapter offers no raw requests; use chat.completions.create or completions.create"
        )

    def copy(self, **kwargs: object) -> NoReturn:
        """A copy with other options would be another server."""
        raise NotImplementedError("ManagedServerAdapter cannot be copied; make one per ManagedServer")
