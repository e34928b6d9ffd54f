"""What an environment's author calls a rollout: one answer or conversation, in 1 to T sequences of tokens.

    ManagedServer ──nodes──▶ Rollout.sequences ──rollout_group──▶ ScoredDataGroup: lists of sequences, and `rollouts`

A chat is one sequence as long as each prompt repeats, token for token, what was sampled before. Where it does not (the
template strips earlier thoughts, the context was compacted, a sub-agent starts again) the managed server starts another
node, and the rollout has one sequence more. All of its turns are trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from atroposlib.envs.payloads import ScoredDataGroup
from atroposlib.envs.sampling.sampled_with import fields_of, one_setting
from atroposlib.envs.server_handling.sequences.sequence_book import SequenceNode, trained_once
from atroposlib.grading.extraction import after_thoughts
from atroposlib.type_definitions import Messages
from atroposlib.utils.tokenizers import Tokenizer
from atroposlib.wire.batching import NOT_TRAINED

PROMPT_END = 16  # tokens, in which a <think> with blanks stands


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer or conversation: the text that is scored, the messages up to and with it, and the tokens as
    they were sampled, in the order of the calls.

    `state` is what it left behind for the methods that score it: results of tools, counters, the state of a game.
    `own_score` is its reward in an environment that has neither `score` nor a method with `@reward`; None there means
    that it cannot be scored.
    """

    text: str
    messages: Messages
    sequences: Sequence[SequenceNode]
    state: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    own_score: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of one answer: its reward, None when it could not be told, a word for it that is counted, and the
    named rewards that it was added up from, before their weights.
    """

    reward: float | None
    outcome: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)


def said(rollout: Rollout, tokenizer: Tokenizer) -> str:
    """Return what the answer says after its thoughts, which the chat template may have opened; nothing where they have
    no end.
    """
    text = rollout.text
    if "</think>" not in text and _last_prompt(rollout.sequences, tokenizer).endswith("<think>"):
        return ""
    return after_thoughts(text) or ""


def _last_prompt(sequences: Sequence[SequenceNode], tokenizer: Tokenizer) -> str:
    """Return how the text ends that the last answer continues, without blanks; nothing where it is not known."""
    if not sequences:
        return ""
    masks = sequences[-1].masked_tokens
    end = max((place for place, pair in enumerate(pairwise(masks), 1) if _begins_answer(*pair)), default=0)
    return str(tokenizer.decode(sequences[-1].tokens[max(0, end - PROMPT_END) : end])).rstrip()


def _begins_answer(before: int, mask: int) -> bool:
    return before == NOT_TRAINED != mask


def rollout_group(
    rollouts: Sequence[Rollout], rewards: Sequence[float], named: Sequence[Mapping[str, float]] = ()
) -> ScoredDataGroup:
    """A group of rollouts with their rewards: ids, log-probabilities and policy versions as they were sampled, never
    text tokenised again, with how they were sampled if each node says it. It numbers the rollout of each sequence if
    any rollout has several. `named` are the rewards by name of each rollout, kept for people who read the group. Raises
    NotReplayed for a sequence whose turns were sampled in different ways.
    """
    numbered = [(number, node) for number, rollout in enumerate(rollouts) for node in trained_once(rollout.sequences)]
    nodes = [node for _, node in numbered]
    group = ScoredDataGroup(
        tokens=[node.tokens for node in nodes],
        masks=[node.masked_tokens for node in nodes],
        inference_logprobs=[node.logprobs for node in nodes],
        scores=[rewards[number] for number, _ in numbered],
        messages=[rollouts[number].messages for number, _ in numbered],  # type: ignore[misc]
        policy_versions=_of_all(nodes, "policy_versions"),
        version_spans=_of_all(nodes, "version_spans"),
        finish_reasons=_of_all(nodes, "finish_reason"),
        routed_experts=_of_all(nodes, "routed_experts"),
    )
    settings = [one_setting(node.trained_settings(), index) for index, node in enumerate(nodes)]
    known = [each for each in settings if each is not None]
    if len(known) == len(nodes):
        group.update(fields_of(known))  # type: ignore[typeddict-item]
    if len(nodes) > len(rollouts):
        group["rollouts"] = [number for number, _ in numbered]
    if any(named):
        group["rewards"] = [dict(named[number]) for number, _ in numbered]
    return group


def _of_all(nodes: Sequence[SequenceNode], name: str) -> list[Any] | None:
    """A field of the nodes' metadata, if each of them has it."""
    values = [node.metadata.get(name) for node in nodes]
    return values if all(values) else None
