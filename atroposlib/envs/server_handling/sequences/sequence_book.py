"""The sequences that a ManagedServer has sampled, and how a new prompt continues one of them without tokenising it
again.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr

from atroposlib.envs.server_handling.sequences.sampling import Settings
from atroposlib.envs.server_handling.sequences.sampling_ledger import SampledLedger
from atroposlib.utils.tokenizers import Tokenizer, encode_prompt, encode_within
from atroposlib.wire.batching import NO_LOGPROB, NOT_TRAINED

State = dict[str, Any]  # of a managed server, as `get_state` returns it


class SequenceNode(BaseModel):
    """One sequence: prompt and completions, over all turns of a conversation; or a prompt that is yet to be continued.

    tokens, masked_tokens and logprobs have one length. masked_tokens repeats each sampled id and is -100 elsewhere;
    logprobs is 1.0 elsewhere. full_text is the prompt's text and the completion's without its special tokens.
    metadata holds finish_reason (of the last completion), policy_versions ([first, last] over all sampled tokens) and
    version_spans ([start, version] pairs: the version of the sampled tokens from that position to the next pair's); the
    latter two are None when a server does not say. routed_experts, from a server that returns them, are those of the
    last call, for all tokens but the last (atroposlib/routing.py).
    """

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] = Field(default_factory=dict)
    # how the completion from each position on was sampled, by the start of each; None where a server's class hides it
    settings: list[tuple[int, Settings]] | None = None
    _carried: int = PrivateAttr(default=0)  # leading tokens that are those of the node it continued

    def __eq__(self, other: object) -> bool:
        """By what was sampled alone: authors compare with nodes that they write themselves, which hold no settings."""
        if not isinstance(other, SequenceNode):
            return NotImplemented
        return self.model_dump(exclude={"settings"}) == other.model_dump(exclude={"settings"})

    def note_in(self, ledger: SampledLedger) -> None:
        """Note how each completion was sampled, of a node that was made in another process."""
        for start, end, settings in self._spans():
            masks = self.masked_tokens[start:end]
            stop = start + next((place for place, value in enumerate(masks) if value == NOT_TRAINED), len(masks))
            ledger.record(
                self.tokens[:start], self.tokens[start:stop], self.logprobs[start:stop], settings, trained=True
            )

    def trained_settings(self) -> list[Settings]:
        """The different settings of the tokens that are trained on."""
        known: list[Settings] = []
        for start, end, settings in self._spans():
            if settings not in known and any(value != NOT_TRAINED for value in self.masked_tokens[start:end]):
                known.append(settings)
        return known

    def _spans(self) -> Iterator[tuple[int, int, Settings]]:
        starts = self.settings or []
        ends = [*(start for start, _ in starts[1:]), len(self.tokens)]
        return ((start, end, settings) for (start, settings), end in zip(starts, ends, strict=False))


def trained_once(nodes: Sequence[SequenceNode]) -> list[SequenceNode]:
    """The sequences of one rollout, of which each sampled token is trained in one: what several carry on from a node is
    context in all but the first.
    """
    masks = [list(node.masked_tokens) for node in nodes]
    logprobs = [list(node.logprobs) for node in nodes]
    tokens, carried = [node.tokens for node in nodes], [node._carried for node in nodes]
    alike = [(0, list(range(len(nodes))))]  # sequences whose tokens before a place are the same
    while alike:
        place, before = alike.pop()
        by_token = defaultdict[int, list[int]](list)
        for number in before:
            if place < len(tokens[number]):
                by_token[tokens[number][place]].append(number)
        for same in by_token.values():
            if len(same) == 1:
                continue
            alike.append((place + 1, same))
            first = next((number for number in same if masks[number][place] != NOT_TRAINED), None)
            for number in same:
                if first is not None and first < number and place < carried[number]:
                    masks[number][place], logprobs[number][place] = NOT_TRAINED, NO_LOGPROB
    return [
        node
        if masks[number] == node.masked_tokens
        else node.model_copy(update={"masked_tokens": masks[number], "logprobs": logprobs[number]})
        for number, node in enumerate(nodes)
    ]


def fresh_prompt(text: str, tokenizer: Tokenizer, *, templated: bool) -> SequenceNode:
    """A prompt that continues nothing. A templated text brings its own special tokens, a raw one gets the
    tokenizer's.
    """
    return unsampled_prompt(
        text, tokenizer.encode(text, add_special_tokens=False) if templated else encode_prompt(tokenizer, text)
    )


def unsampled_prompt(text: str, tokens: list[int]) -> SequenceNode:
    """A prompt of these ids; once the server has replied, of those that it says the model saw."""
    return SequenceNode(
        full_text=text,
        tokens=tokens,
        masked_tokens=[NOT_TRAINED] * len(tokens),
        logprobs=[NO_LOGPROB] * len(tokens),
    )


def extended_prompt(text: str, parent: SequenceNode, tokenizer: Tokenizer) -> SequenceNode:
    """`text` as a continuation of `parent`, whose full_text it starts with: parent's ids, then those of the added text
    alone. Its metadata hold the parent's versions and settings; those of a prompt without sampled tokens are empty.

    When the completion ended with a special token (the end of its turn) and the added text begins with that token's
    text, the sampled one stands for both. When the text continues without it, it is left out, so that the ids say what
    the text says.
    """
    added_text = text[len(parent.full_text) :]
    kept = len(parent.tokens)
    ending = _sampled_ending(parent, tokenizer)
    before = None
    if ending and added_text.startswith(ending):
        added_text = added_text[len(ending) :]
        before = parent.tokens[-1]
    elif ending:
        kept -= 1
    spans = parent.metadata.get("version_spans")
    added = encode_within(tokenizer, added_text, before)
    extended = SequenceNode(
        full_text=text,
        tokens=parent.tokens[:kept] + added,
        masked_tokens=parent.masked_tokens[:kept] + [NOT_TRAINED] * len(added),
        logprobs=parent.logprobs[:kept] + [NO_LOGPROB] * len(added),
        metadata={
            "policy_versions": parent.metadata.get("policy_versions"),
            "version_spans": spans and [span for span in spans if span[0] < kept],
        },
        settings=parent.settings,
    )
    extended._carried = kept
    return extended


def _sampled_ending(node: SequenceNode, tokenizer: Tokenizer) -> str:
    """Text of the special token that was sampled last, which full_text lacks; empty when there is none."""
    if (
        not node.tokens
        or node.masked_tokens[-1] == NOT_TRAINED
        or tokenizer.decode(node.tokens[-1:], skip_special_tokens=True)
    ):
        return ""
    return tokenizer.decode(node.tokens[-1:], skip_special_tokens=False)


class SequenceKeeper:
    """Keeps the sequences that a managed server of this process sampled, in the order of the calls.

    Without `track_tree` there is one node per completion: a continuation takes its parent's place, its siblings
    (n > 1) go to the end. With it, every prefix that was ever sampled is kept by its text, so that a branch keeps the
    turns it shares with its siblings. Nothing here awaits, so concurrent calls cannot interleave.
    """

    def __init__(self, track_tree: bool) -> None:
        self.track_tree = track_tree
        self._calls = 0
        self._entries: list[tuple[int, SequenceNode]] = []  # (the call, what it sampled)

    @property
    def current_nodes(self) -> list[SequenceNode]:
        """The nodes so far."""
        return [node for _, node in self._entries]

    def get_state(self) -> State:
        """`{"nodes": [...]}`, or with track_tree `{"sequences": {text: node}, "tree": {text: node}}`."""
        if not self.track_tree:
            return {"nodes": self.current_nodes}
        by_text = {node.full_text: node for node in self.current_nodes}
        return {"sequences": by_text, "tree": dict(by_text)}

    def reset(self) -> None:
        """Forget all nodes."""
        self._entries.clear()

    def open_call(self) -> int:
        """A number for a call that begins; results stand in the order of these, whichever call ends first."""
        self._calls += 1
        return self._calls

    def longest_prefix(self, text: str) -> SequenceNode | None:
        """The sequence that `text` continues: of all whose full_text starts it, the longest."""
        return max(
            (node for node in self.current_nodes if text.startswith(node.full_text)),
            key=lambda node: len(node.full_text),
            default=None,
        )

    def record(self, call: int, parent: SequenceNode | None, nodes: list[SequenceNode]) -> None:
        """Keep what a call sampled as a continuation of `parent`."""
        if self.track_tree:
            by_text = {node.full_text: node for node in nodes}
            self._entries = [entry for entry in self._entries if entry[1].full_text not in by_text]
            nodes = list(by_text.values())
        else:
            place = next((index for index, (_, node) in enumerate(self._entries) if node is parent), None)
            if place is not None:
                self._entries[place] = (self._entries[place][0], nodes[0])
                nodes = nodes[1:]
        for node in nodes:
            bisect.insort(self._entries, (call, node), key=lambda entry: entry[0])
