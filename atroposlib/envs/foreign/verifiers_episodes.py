"""Episodes of verifiers as rollouts: the replies of `child_processes/verifiers_child.py` as sequences to train on.

    trace: nodes (messages and their tokens) in branches (paths of nodes)  ──▶  one sequence a branch

A node that several branches share is trained in the first of them and is context in the others. Policy versions come
from the inference server, which names its replies by their sampled ids.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from atroposlib.envs.errors import NotReplayed
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.rollouts import Rollout
from atroposlib.envs.server_handling.sequences.sampling import LEAST_TEMPERATURE, Settings, settings_of
from atroposlib.envs.server_handling.sequences.sequence_book import SequenceNode
from atroposlib.groups import NOT_REPLAYED, not_replayed
from atroposlib.type_definitions import Messages
from atroposlib.wire.batching import NO_LOGPROB, NOT_TRAINED, Cause
from atroposlib.wire.sessions import Call, digest

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
CAUSES: dict[str, Cause] = {
    "TaskError": "scorer",
    "EnvError": "environment",
}  # of verifiers' errors; others are servers'
SHOWN_ERRORS = 3
SHOWN_CHARS = 800


class Node(Struct):
    """One message with the tokens that it adds; `mask` is 1 where the model sampled."""

    ids: list[TokenId]
    mask: list[Annotated[int, Meta(ge=0, le=1)]]
    logprobs: list[float]  # of the sampled ones
    message: dict[str, Any]
    finish: str | None = None
    sampling: dict[str, Any] | None = None

    @property
    def sampled(self) -> list[int]:
        """The ids that the model sampled."""
        return [token for token, chosen in zip(self.ids, self.mask, strict=True) if chosen]


class Trace(Struct):
    """Records what one agent did."""

    id: str
    agent: str
    trainable: bool
    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]
    nodes: list[Node]
    branches: list[list[int]]


class EpisodeError(Struct):
    """Names what went wrong, in verifiers' words."""

    type: str
    message: str


class Episode(Struct):
    """One task played once."""

    ok: bool
    timed_out: bool
    errors: list[EpisodeError]
    traces: list[Trace]


class Opened(Struct):
    """Describes what the child has loaded; `tasks` is None for a taskset without end."""

    verifiers: str
    tasks: int | None
    environment: str
    agents: dict[str, str]  # name: harness


@dataclass(frozen=True, slots=True)
class Seat:
    """The part of an episode that trains the policy in one of its agents."""

    rollout: Rollout
    reward: float


def decoded_episode(reply: object) -> Episode:
    """A child's reply. Raises RolloutFailed for one that is not an episode, or that failed."""
    try:
        episode = msgspec.convert(reply, Episode)
        for trace in episode.traces:
            _check(trace)
    except (msgspec.ValidationError, ValueError) as error:
        raise RolloutFailed(f"verifiers' episode is malformed: {error}") from None
    if episode.timed_out or not episode.ok:
        raise _failure(episode)
    return episode


def _failure(episode: Episode) -> RolloutFailed:
    causes = [CAUSES.get(error.type, "infrastructure") for error in episode.errors]
    cause: Cause = "timeout" if episode.timed_out else causes[0] if causes else "infrastructure"
    said = "; ".join(f"{error.type}: {error.message}" for error in episode.errors[:SHOWN_ERRORS])
    words = " ".join(said.split())
    shown = words if len(words) <= SHOWN_CHARS else f"{words[: SHOWN_CHARS // 4]} ... {words[-SHOWN_CHARS * 3 // 4 :]}"
    return RolloutFailed(f"verifiers' episode failed: {shown or cause}", cause)


def _check(trace: Trace) -> None:
    """Raise ValueError for nodes that contradict themselves."""
    for number, node in enumerate(trace.nodes):
        if len(node.ids) != len(node.mask) or sum(node.mask) != len(node.logprobs):
            raise ValueError(
                f"node {number}: {len(node.ids)} ids, {len(node.mask)} masks, {sum(node.mask)} sampled,"
                f" {len(node.logprobs)} log-probabilities"
            )
        if not all(math.isfinite(value) and value <= 0 for value in node.logprobs):
            raise ValueError(f"node {number}: log-probabilities that are none")
    if wrong := {place for path in trace.branches for place in path} - set(range(len(trace.nodes))):
        raise ValueError(f"branches of nodes {sorted(wrong)} that do not exist")
    if not math.isfinite(trace.reward):
        raise ValueError(f"reward {trace.reward}")


def check_sampling(episode: Episode, asked: Mapping[str, object]) -> None:
    """Raise NotReplayed if an agent sampled what is trained on in another way than was asked for: a pinned sampling."""
    for trace in episode.traces:
        for node in trace.nodes if trace.trainable else []:
            used = {name: value for name, value in (node.sampling or {}).items() if value is not None}
            for name in ("temperature", "top_p"):
                if any(node.mask) and used.get(name, asked[name]) != asked[name]:
                    raise NotReplayed(
                        f"agent {trace.agent!r} sampled with {name} {used[name]} instead of {asked[name]}: drop it from"
                        " the taskset's or your settings, and give --env." + name
                    )
            if any(node.mask) and (wrong := not_replayed(used)):
                raise NotReplayed(f"agent {trace.agent!r}: {wrong[0]} {used[wrong[0]]} {NOT_REPLAYED}")


def seats(episode: Episode, calls: Mapping[str, Sequence[Call]], asked: Mapping[str, object]) -> dict[str, Seat]:
    """Return what trains the policy, by agent: `solver`, and `solver-2` for a second trace of it. `calls` are those of
    the server, by trace, `asked` the sampling of agents that say nothing of theirs. Raises RolloutFailed where nothing
    was sampled.
    """
    by_name: dict[str, Seat] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    for trace in episode.traces:
        if trace.trainable and (nodes := sequences(trace, calls.get(trace.id, []), asked)):
            counts[trace.agent] += 1
            name = trace.agent if counts[trace.agent] == 1 else f"{trace.agent}-{counts[trace.agent]}"
            by_name[name] = Seat(_rollout(trace, nodes), trace.reward)
    if not by_name:
        raise RolloutFailed("verifiers' episode has no tokens that the policy sampled")
    return by_name


def _rollout(trace: Trace, nodes: Sequence[SequenceNode]) -> Rollout:
    longest = max(trace.branches, key=len)
    messages: Messages = [trace.nodes[place].message for place in longest]
    said = [str(message["content"]) for message in messages if message.get("role") == "assistant"]
    return Rollout(said[-1] if said else "", messages, nodes)


def sequences(trace: Trace, calls: Sequence[Call], asked: Mapping[str, object]) -> list[SequenceNode]:
    """One a branch, without those that would train nothing."""
    versions = _versions(trace, calls)
    trained: set[int] = set()
    nodes = []
    for path in trace.branches:
        mine = {place for place in path if any(trace.nodes[place].mask)} - trained
        if mine:
            nodes.append(_sequence(trace, path, mine, versions, asked))
        trained |= mine
    return nodes


def _versions(trace: Trace, calls: Sequence[Call]) -> dict[int, Call]:
    """The call that sampled each node, as far as the server still knows it."""
    by_ids: defaultdict[str, deque[Call]] = defaultdict(deque)
    for call in calls:
        by_ids[call.sampled].append(call)
    by_node = {}
    for number, node in enumerate(trace.nodes):
        if any(node.mask) and (same := by_ids.get(digest(node.sampled))):
            by_node[number] = same.popleft() if len(same) > 1 else same[0]
    return by_node


def _sequence(
    trace: Trace, path: Sequence[int], mine: set[int], versions: Mapping[int, Call], asked: Mapping[str, object]
) -> SequenceNode:
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] = []
    sampled_by: list[tuple[int, Call | None]] = []  # (position of the first sampled token, the call)
    settings: list[tuple[int, Settings]] = []
    finish = None
    for place in path:
        node = trace.nodes[place]
        values = iter(node.logprobs)
        if any(node.mask):
            sampled_by.append((len(tokens) + node.mask.index(1), versions.get(place)))
            used = {name: value for name, value in (node.sampling or {}).items() if value is not None}
            settings.append((sampled_by[-1][0], settings_of({**asked, **used}, LEAST_TEMPERATURE)))
            finish = node.finish
        for token, chosen in zip(node.ids, node.mask, strict=True):
            value = next(values) if chosen else NO_LOGPROB
            is_mine = chosen and place in mine
            tokens.append(token)
            masks.append(token if is_mine else NOT_TRAINED)
            logprobs.append(value if is_mine else NO_LOGPROB)
    metadata = {
        "finish_reason": finish,
        "policy_versions": _ends(sampled_by),
        "version_spans": _spans(sampled_by),
    }
    return SequenceNode(
        full_text="", tokens=tokens, masked_tokens=masks, logprobs=logprobs, metadata=metadata, settings=settings
    )


def _ends(sampled_by: Sequence[tuple[int, Call | None]]) -> list[int] | None:
    """The first and the last policy version; None where one is not known."""
    ends = [call.policy_versions for _, call in sampled_by if call is not None]
    return [min(first for first, _ in ends), max(last for _, last in ends)] if len(ends) == len(sampled_by) else None


def _spans(sampled_by: Sequence[tuple[int, Call | None]]) -> list[list[int]] | None:
    """[start, version] of each run of tokens that one version sampled; None where one is not known."""
    spans: list[list[int]] = []
    for begin, call in sampled_by:
        if call is None or not call.version_spans:
            return None
        for start, version in call.version_spans:
            if not spans or spans[-1][1] != version:
                spans.append([begin + start if spans else 0, version])
    return spans
