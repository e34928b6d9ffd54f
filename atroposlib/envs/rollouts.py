"""What an environment's author calls a rollout: one answer or conversation, in 1 to T sequences of tokens.

    ManagedServer ──nodes──▶ Rollout.sequences ──rollout_group──▶ ScoredDataGroup: lists of sequences, and `rollouts`

A chat is one sequence as long as each prompt repeats, token for token, what was sampled before. Where it does not (the
template strips earlier thoughts, the context was compacted, a sub-agent starts again) the managed server starts another
node, and the rollout has one sequence more. All of its turns are trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.payloads import ScoredDataGroup
from atroposlib.envs.server_handling.sequence_book import SequenceNode, trained_once
from atroposlib.type_definitions import Messages


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer or conversation: the text that is scored, the messages up to and with it, and the tokens as
    they were sampled, in the order of the calls.
    """

    text: str
    messages: Messages
    sequences: Sequence[SequenceNode]


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of one answer: its reward, None when it could not be told, and a word for it that is counted."""

    reward: float | None
    outcome: str = ""


def rollout_group(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> ScoredDataGroup:
    """A group of rollouts with their rewards: ids, log-probabilities and policy versions as they were sampled, never
    text tokenised again. It says which sequences belong together if any rollout has several.
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
    )
    if len(nodes) > len(rollouts):
        group["rollouts"] = [number for number, _ in numbered]
    return group


def _of_all(nodes: Sequence[SequenceNode], name: str) -> list[Any] | None:
    """A field of the nodes' metadata, if each of them has it."""
    values = [node.metadata.get(name) for node in nodes]
    return values if all(values) else None
