"""A client that remembers exactly what was sampled, so that an environment can chat in text and still train on token ids.

    chat_completion(messages) ──template──▶ text ──longest known prefix──▶ ids carried over + ids of the added text
                                                                                │  /generate
    get_state()["nodes"] ◀── SequenceNode(tokens, masked_tokens, logprobs) ◀────┘  sampled ids, log-probabilities, policy versions

Sampled ids are never made from text: a conversation that goes on carries the ids of its earlier turns and tokenises only
what was added. A prompt that continues no known sequence (another conversation, an edited turn, thoughts that the template
dropped) starts a new node, and the old one stays.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.completion_usage import CompletionUsage

from atroposlib.envs.server_handling.calls import InferenceCalls
from atroposlib.envs.server_handling.chat_rendering import render_chat
from atroposlib.envs.server_handling.dispatch import Split
from atroposlib.envs.server_handling.dummy_managed_server import DummyManagedServer
from atroposlib.envs.server_handling.managed_server_adapter import ManagedServerAdapter
from atroposlib.envs.server_handling.sampling import SampledSequence, SampledTokens
from atroposlib.envs.server_handling.sequence_book import (
    ListBook,
    Prompt,
    SequenceBook,
    SequenceNode,
    TreeBook,
    extended_prompt,
    fresh_prompt,
)
from atroposlib.utils.tokenizers import load_tokenizer

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode", "refuse_tool_parser"]


def refuse_tool_parser(tool_parser: str | None) -> None:
    """Raise NotImplementedError for any tool parser: replies would otherwise pass unparsed without a word."""
    if tool_parser is not None:
        raise NotImplementedError(
            f"tool_parser {tool_parser!r} is not available: leave it unset and parse the reply's text, "
            "e.g. with atroposlib.utils.tool_call_parser.parse_tool_call"
        )


class ManagedServer:
    """Chat and text completions whose tokens are kept as nodes; one instance a rollout or a group.

    `server` is anything with `sample_tokens` (a server, a manager's route). `track_tree` keeps every prefix by its text instead of
    one node a completion. Concurrent calls are safe: nodes appear whole, in the order of the calls.
    """

    def __init__(
        self,
        server: InferenceCalls,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,
    ) -> None:
        refuse_tool_parser(tool_parser)
        self.server = server
        self.tokenizer = tokenizer or load_tokenizer(server.tokenizer_id)
        self.track_tree = track_tree
        self.preserve_think_blocks = preserve_think_blocks
        self._book: SequenceBook = TreeBook() if track_tree else ListBook()

    @property
    def current_nodes(self) -> list[SequenceNode]:
        """The nodes so far."""
        return self._book.nodes

    def get_state(self) -> dict[str, Any]:
        """`{"nodes": [...]}`, or with track_tree `{"sequences": {text: node}, "tree": {text: node}}`."""
        return self._book.state()

    def reset(self) -> None:
        """Forget all nodes."""
        self._book.clear()

    async def chat_completion(
        self,
        *,
        messages: Sequence[Mapping[str, Any]],
        n: int | None = 1,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        split: Split = "train",
        **sampling: Any,
    ) -> ChatCompletion:
        """A reply in OpenAI's form; its tokens become nodes.

        `tools` are shown to the model by the template; calls to them stay in the reply's text. `extra_body` may hold
        chat_template_kwargs and further sampling parameters. A reply cut by a stop string keeps that string, as sampled.
        """
        if tool_choice not in (None, "auto", "none"):
            raise ValueError(f"tool_choice {tool_choice!r} is not supported; use 'auto' or 'none'")
        extra = dict(extra_body or {})
        text = render_chat(
            self.tokenizer,
            messages,
            preserve_think_blocks=self.preserve_think_blocks,
            tools=None if tool_choice == "none" else tools,
            template_arguments=extra.pop("chat_template_kwargs", None),
        )
        prompt, sampled, texts = await self._sample(text, n or 1, split, {**extra, **sampling}, templated=True)
        choices = [
            Choice(
                index=index,
                finish_reason=_reason(sequence),
                message=ChatCompletionMessage(role="assistant", content=reply),
            )
            for index, (sequence, reply) in enumerate(zip(sampled.sequences, texts, strict=True))
        ]
        return ChatCompletion(
            id=f"chatcmpl-{uuid.uuid4()}",
            object="chat.completion",
            created=int(time.time()),
            model=self.server.model_name,
            choices=choices,
            usage=_usage(prompt, sampled),
        )

    async def completion(self, *, prompt: str, n: int | None = 1, split: Split = "train", **sampling: Any) -> Completion:
        """A text completion in OpenAI's form; a prompt that repeats earlier text and goes on extends that text's node."""
        extra = sampling.pop("extra_body", None) or {}
        known, sampled, texts = await self._sample(prompt, n or 1, split, {**extra, **sampling}, templated=False)
        choices = [
            CompletionChoice(index=index, finish_reason=_reason(sequence), text=text)
            for index, (sequence, text) in enumerate(zip(sampled.sequences, texts, strict=True))
        ]
        return Completion(
            id=f"cmpl-{uuid.uuid4()}",
            object="text_completion",
            created=int(time.time()),
            model=self.server.model_name,
            choices=choices,
            usage=_usage(known, sampled),
        )

    async def get_logprobs(
        self,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        input_ids: list[int] | None = None,
        top_k: int = 1,
        split: Split = "train",
    ) -> dict[str, Any]:
        """The server's log-probabilities of a conversation, a text or ids (exactly one of them); makes no node."""
        if sum(given is not None for given in (messages, prompt, input_ids)) != 1:
            raise ValueError("get_logprobs needs exactly one of messages, prompt, input_ids")
        if messages is not None:
            text = render_chat(self.tokenizer, messages, preserve_think_blocks=self.preserve_think_blocks)
            input_ids = fresh_prompt(text, self.tokenizer, templated=True).tokens
        elif prompt is not None:
            input_ids = fresh_prompt(prompt, self.tokenizer, templated=False).tokens
        return await self.server.get_logprobs(input_ids=input_ids, top_k=top_k, split=split)

    async def _sample(
        self, text: str, n: int, split: Split, sampling: dict[str, Any], *, templated: bool
    ) -> tuple[Prompt, SampledTokens, list[str]]:
        """Sample n continuations of `text`, keep them as nodes, and return them with their visible texts."""
        if sampling.get("stream"):
            raise ValueError("stream=True is not supported: tokens are kept when a completion is whole")
        parameters = {key: value for key, value in sampling.items() if value is not None and key != "model"}
        call = self._book.open_call()
        parent = self._book.longest_prefix(text)
        prompt = (
            fresh_prompt(text, self.tokenizer, templated=templated) if parent is None else extended_prompt(text, parent, self.tokenizer)
        )
        sampled = await self.server.sample_tokens(prompt=text, input_ids=prompt.tokens, n=n, split=split, **parameters)
        texts = [self.tokenizer.decode(sequence.token_ids, skip_special_tokens=True) for sequence in sampled.sequences]
        nodes = [_node(prompt, sequence, reply) for sequence, reply in zip(sampled.sequences, texts, strict=True)]
        self._book.record(call, parent, nodes)
        return prompt, sampled, texts


def _node(prompt: Prompt, sequence: SampledSequence, text: str) -> SequenceNode:
    versions = sequence.policy_versions
    if versions is not None and prompt.has_sampled:
        earlier = prompt.policy_versions
        versions = (min(earlier[0], versions[0]), max(earlier[1], versions[1])) if earlier is not None else None
    return SequenceNode(
        full_text=prompt.text + text,
        tokens=prompt.tokens + sequence.token_ids,
        masked_tokens=prompt.masked_tokens + sequence.token_ids,
        logprobs=prompt.logprobs + sequence.logprobs,
        metadata={"finish_reason": sequence.finish_reason, "policy_versions": list(versions) if versions is not None else None},
    )


def _reason(sequence: SampledSequence) -> Literal["stop", "length"]:
    """The finish reason in OpenAI's words, which lack vLLM's "repetition"; the node's metadata keep the server's own."""
    return "length" if sequence.finish_reason == "length" else "stop"


def _usage(prompt: Prompt, sampled: SampledTokens) -> CompletionUsage:
    completion = sum(len(sequence.token_ids) for sequence in sampled.sequences)
    total = len(prompt.tokens) + completion
    return CompletionUsage(prompt_tokens=len(prompt.tokens), completion_tokens=completion, total_tokens=total)
