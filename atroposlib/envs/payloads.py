"""Groups of scored sequences, from what an environment returns to what the batching API accepts. Pure functions.

A group holds parallel lists, one entry per sequence (of a rollout there may be several, numbered by `rollouts`):
tokens, masks (the token's id where it is trained on, -100 elsewhere), scores, inference_logprobs (the sampler's
log-probabilities, 1.0 on masked positions), policy_versions ([first, last] a sequence), version_spans ([start, version]
pairs a sequence).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypedDict, cast

from atroposlib.clients.activity import EQUAL_SCORES
from atroposlib.groups import NEUTRAL, Untrainable, check, rollouts_of, scores_differ, shown, size_of
from atroposlib.type_definitions import Item, Message
from atroposlib.wire.batching import NOT_TRAINED, Cause, GroupRequirements, PostedData
from atroposlib.wire.typed import all_encodable

__all__ = [
    "NOT_TRAINED",
    "Groups",
    "Item",
    "ScoredDataGroup",
    "ScoredDataItem",
    "completion_lengths",
    "defect",
    "group_items",
    "group_rollouts",
    "rejection",
    "wire_form",
    "with_failed",
]

REQUIRED = ("tokens", "masks", "scores")
# Lists with one entry per sequence, for which an item has one entry of its own.
PER_SEQUENCE = (
    "advantages",
    "ref_logprobs",
    "messages",
    "inference_logprobs",
    "images",
    "distill_token_ids",
    "distill_logprobs",
    "policy_versions",
    "version_spans",
    "finish_reasons",
    "routed_experts",
)
# Of the generation parameters, what a trainer needs to know the distribution that was sampled from.
SAMPLING = {"temperature", "top_p", "top_k", *NEUTRAL}
WIRE_FIELDS = (
    *REQUIRED,
    *PER_SEQUENCE,
    "rollouts",
    "failed",
    "generation_params",
    "overrides",
    "group_overrides",
    "ordinal",
    "idempotency_key",
)


# What a trainer does otherwise for a sequence or a group: temperature, top_p, set_advantage_to_zero, ...
Overrides = dict[str, Any]


class ScoredDataGroup(TypedDict, total=False):
    """Several samples of one item; tokens, masks and scores are required."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    messages: list[list[Message]] | None
    generation_params: Overrides | None
    inference_logprobs: list[list[float]] | None
    group_overrides: Overrides | None
    overrides: list[Overrides] | None
    images: Any
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None
    policy_versions: list[list[int]] | None
    version_spans: list[list[list[int]]] | None
    rollouts: list[int] | None  # the rollout that each sequence belongs to; None where each is one
    finish_reasons: list[str] | None
    routed_experts: list[str] | None  # of a mixture-of-experts model: atroposlib/routing.py
    ordinal: tuple[str, int, int] | None  # of a run that can be repeated: atroposlib/envs/run/order.py
    idempotency_key: str | None  # under which the API stores it once, also if a later process posts it again
    failed: dict[Cause, int] | None  # rollouts that have no score and stand in no list, by cause
    rewards: list[dict[str, float]] | None  # named rewards before their weights; for people, never sent


class ScoredDataItem(TypedDict, total=False):
    """One sample; tokens, masks and scores are required."""

    tokens: list[int]
    masks: list[int]
    scores: float
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    messages: list[Message] | None
    generation_params: Overrides | None
    inference_logprobs: list[float] | None
    group_overrides: Overrides | None
    overrides: Overrides | None
    images: Any
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None
    policy_versions: list[int] | None
    version_spans: list[list[int]] | None
    finish_reasons: str | None
    routed_experts: str | None


# What `collect_trajectories` and `postprocess_histories` give; None drops the item.
Groups = ScoredDataGroup | list[ScoredDataGroup] | None


def group_items(items: Sequence[Mapping[str, Any]]) -> ScoredDataGroup:
    """One group of `items`, in order. An optional field is set when every item has it, else None.

    Differing generation parameters cannot be the group's: what a trainer reads of them then becomes overrides of
    each sequence.
    """
    group: dict[str, Any] = {key: [item[key] for item in items] for key in REQUIRED}
    for key in PER_SEQUENCE:
        given = [item.get(key) for item in items]
        group[key] = None if any(value is None for value in given) else given
    overrides = [dict(item.get("overrides") or {}) for item in items]
    parameters = [item.get("generation_params") for item in items]
    alike = all(each == parameters[0] for each in parameters)
    if not alike:
        for override, each in zip(overrides, parameters, strict=True):
            for name, value in (each or {}).items():
                if name in SAMPLING:
                    override.setdefault(name, value)
    group["generation_params"] = parameters[0] if items and alike else None
    group["overrides"] = overrides if any(overrides) else None
    merged = {key: value for item in items for key, value in (item.get("group_overrides") or {}).items()}
    group["group_overrides"] = merged or None
    return cast(ScoredDataGroup, group)


def group_rollouts(rollouts: Sequence[Sequence[Mapping[str, Any]]]) -> ScoredDataGroup:
    """One group of rollouts, each the list of its sequences. `rollouts` numbers them if any has several."""
    group = group_items([item for rollout in rollouts for item in rollout])
    if any(len(rollout) > 1 for rollout in rollouts):
        group["rollouts"] = [number for number, rollout in enumerate(rollouts) for _ in rollout]
    return group


def with_failed(group: ScoredDataGroup, failed: Mapping[Cause, int]) -> ScoredDataGroup:
    """`group`, and how many of its rollouts failed, by cause, if any did."""
    if failed:
        group["failed"] = dict(failed)
    return group


def defect(group: Mapping[str, Any], needs: GroupRequirements) -> str | None:
    """Return what is wrong with `group` by its author's fault, whatever was sampled, or why the registered trainer
    cannot use it; None when it is whole.
    """
    missing = [key for key in REQUIRED if group.get(key) is None]
    if missing:
        return f"it has no {', '.join(missing)}"
    if (found := _miscounted(group)) is not None:
        return found
    for index, score in enumerate(group["scores"]):
        if not _is_finite(score):
            return f"scores[{index}]: {shown(score)} is not a finite number"
    try:
        check(group, needs)
    except Untrainable as error:
        return str(error)
    return None


def _miscounted(group: Mapping[str, Any]) -> str | None:
    """Return which of a group's lists is none, or has another length than the tokens have."""
    lists = ("tokens", "masks", "scores", "inference_logprobs")
    if wrong := [key for key in lists if group.get(key) is not None and not isinstance(group[key], Sized)]:
        return f"{wrong[0]}: {shown(group[wrong[0]])} is not a list"
    count = len(group["tokens"])
    for key in ("masks", "scores", "inference_logprobs", "policy_versions", "version_spans", "finish_reasons"):
        lengths = (count, 0) if key == "inference_logprobs" else (count,)  # environments send [] for "none"
        if group.get(key) is not None and len(group[key]) not in lengths:
            return f"{len(group[key])} {key} for {count} sequences"
    for key in ("masks", "inference_logprobs"):
        rows = group[key] if group.get(key) is not None else []
        for index, (tokens, values) in enumerate(zip(group["tokens"], rows, strict=False)):
            if len(values) != len(tokens):
                return f"sequence {index}: {len(values)} {key} for {len(tokens)} tokens"
    return None


def _is_finite(score: Any) -> bool:
    try:
        return math.isfinite(score)
    except (TypeError, ValueError, OverflowError):  # None, a text, an integer larger than every float
        return False


class Rejection(NamedTuple):
    """Says why a group is dropped: the kind, which is counted, and what was found."""

    kind: str
    reason: str


def rejection(
    group: Mapping[str, Any], *, group_size: int, max_token_len: int, scores_must_differ: bool
) -> Rejection | None:
    """Return the reason why no part of `group` can be sent, or None. `max_token_len` 0 or less means no limit."""
    expected = (group.get("group_overrides") or {}).get("group_size", group_size)
    count = size_of(group)
    if count != expected:
        return Rejection("of the wrong size", f"{count} rollouts instead of {expected} (group_size)")
    if scores_must_differ and count > 1 and not scores_differ(group["scores"]):
        return Rejection(EQUAL_SCORES, f"all scores are {group['scores'][0]:g}")
    longest = max((len(tokens) for tokens in group["tokens"]), default=0)
    if 0 < max_token_len < longest:
        return Rejection(
            "too long for the trainer",
            f"a sequence of {longest} tokens exceeds the trainer's limit of {max_token_len} (--seq-len)",
        )
    return None


def wire_form(group: Mapping[str, Any], env_id: int | None, include_messages: bool) -> PostedData:
    """The body of /scored_data: the known fields that are set, and who posts."""
    wanted = [key for key in WIRE_FIELDS if group.get(key) is not None and (include_messages or key != "messages")]
    fields = {key: all_encodable(group[key]) if key == "messages" else group[key] for key in wanted}
    return PostedData(**fields, env_id=env_id)


def completion_lengths(group: Mapping[str, Any]) -> list[int]:
    """Sampled tokens of each rollout."""
    lengths: Counter[int] = Counter()
    for rollout, mask in zip(rollouts_of(group), group["masks"], strict=True):
        lengths[rollout] += sum(value != NOT_TRAINED for value in mask)
    return list(lengths.values())
