"""How many policy versions the sampled tokens of a group are behind the policy that is trained. Pure functions.

A token's version is known by the group's `version_spans`. With `policy_versions` alone, all tokens of a sequence count
as its first one, the oldest. Groups without either have no staleness.
"""

import numpy as np
from numpy.typing import NDArray

from atroposlib.groups import staleness_weight
from atroposlib.wire.batching import NOT_TRAINED, ScoredData


def sampled_staleness(group: ScoredData, policy_version: int) -> list[NDArray[np.int64]]:
    """Compute the staleness of each sequence's sampled tokens; empty where no versions are known."""
    return [
        policy_version - versions[np.asarray(mask) != NOT_TRAINED]
        for mask, versions in zip(group.masks, _versions(group), strict=False)
    ]


def staleness_weights(group: ScoredData, policy_version: int) -> list[NDArray[np.float32]]:
    """Compute what the advantages of a sequence are multiplied by, [length] or [1]: 1 unless the API down-weights
    old policies.

    The API's weight is that of the group's oldest token. Where each token's version is known, it has its own.
    """
    overrides = group.group_overrides or {}
    weight, limit = overrides.get("staleness_weight"), overrides.get("staleness_limit")
    if weight is None:
        return [np.ones(1, np.float32)] * len(group.tokens)
    if limit is None or not isinstance(group.version_spans, list):
        return [np.full(1, weight, np.float32)] * len(group.tokens)
    return [
        staleness_weight(np.maximum(0, policy_version - versions), limit).astype(np.float32)
        for versions in _versions(group)
    ]


def _versions(group: ScoredData) -> list[NDArray[np.int64]]:
    """The policy version of every token of each sequence, [length]."""
    lengths = [len(tokens) for tokens in group.tokens]
    if isinstance(group.version_spans, list):
        return [_spread(spans, length) for spans, length in zip(group.version_spans, lengths, strict=True)]
    if isinstance(group.policy_versions, list):
        firsts = [first for first, _last in group.policy_versions]
        return [np.full(length, first) for first, length in zip(firsts, lengths, strict=True)]
    return []


def _spread(spans: list[tuple[int, int]], length: int) -> NDArray[np.int64]:
    starts, versions = np.asarray(spans, np.int64).T
    return np.asarray(versions[np.searchsorted(starts, np.arange(length), side="right") - 1])
