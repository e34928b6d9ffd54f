"""A stand-in for ManagedServer over servers that give no token ids, for evaluation and debugging only.

Its nodes hold placeholder tokens, the same for every sequence: training on them teaches nothing. It exists only when
ATROPOS_ALLOW_DUMMY_MANAGED_SERVER is set.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.envs.server_handling.calls import InferenceCalls
from atroposlib.envs.server_handling.sequence_book import ListBook, SequenceBook, SequenceNode, State, TreeBook
from atroposlib.wire.batching import NOT_TRAINED

DUMMY_TOKENS = list(range(128))
DUMMY_LOGPROB = -0.5


class DummyManagedServer:
    """Real text, placeholder tokens: ids 0..127, the first one masked, every log-probability -0.5."""

    def __init__(self, server: InferenceCalls, tokenizer: Any = None, track_tree: bool = False) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self._book: SequenceBook = TreeBook() if track_tree else ListBook()

    @property
    def current_nodes(self) -> list[SequenceNode]:
        """The nodes so far."""
        return self._book.nodes

    def get_state(self) -> State:
        """As `ManagedServer.get_state`."""
        return self._book.state()

    def reset(self) -> None:
        """Forget all nodes."""
        self._book.clear()

    async def chat_completion(self, *, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> ChatCompletion:
        """The server's reply; a node with placeholder tokens per choice."""
        call = self._book.open_call()
        reply = await self.server.chat_completion(messages=list(messages), **arguments)
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        nodes = [
            _node(f"{prompt}\nassistant: {choice.message.content or ''}", choice.finish_reason)
            for choice in reply.choices
        ]
        self._book.record(call, None, nodes)
        return reply

    async def completion(self, *, prompt: str, **arguments: Any) -> Completion:
        """The server's completion; a node with placeholder tokens per choice."""
        call = self._book.open_call()
        reply = await self.server.completion(prompt=prompt, **arguments)
        self._book.record(call, None, [_node(prompt + choice.text, choice.finish_reason) for choice in reply.choices])
        return reply


def _node(text: str, finish_reason: str) -> SequenceNode:
    return SequenceNode(
        full_text=text,
        tokens=DUMMY_TOKENS,
        masked_tokens=[NOT_TRAINED, *DUMMY_TOKENS[1:]],
        logprobs=[DUMMY_LOGPROB] * len(DUMMY_TOKENS),
        metadata={"finish_reason": finish_reason, "policy_versions": None, "dummy_tokens": True},
    )
