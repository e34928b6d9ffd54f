"""From the API's batch items to the arrays that are trained on; every group is checked before a gradient depends on it.

An item is one group: parallel lists `tokens`, `masks` (-100 where a token was not sampled, else its id), `scores` and
`inference_logprobs` (the sampler's log-probabilities, 1.0 where not sampled), and optional fields that may be null.
Rules: a group without a signal (equal scores, or given advantages that are all zero) is counted and left out of the loss, its
denominator and its metrics; a sequence above `seq_len` keeps its first `seq_len` tokens and is counted; a first token cannot
be trained, since nothing predicts it. A group that breaks the contract raises BatchError, naming item, sequence and lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from example_trainer.advantages import group_advantages, has_signal
from example_trainer.errors import TrainerError

NOT_TRAINED = -100
Item = Mapping[str, Any]


class BatchError(TrainerError):
    """A batch item that cannot be trained on."""


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence, prompt and answer. Arrays are [length]."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    sampler_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    reference_logprobs: NDArray[np.float32] | None
    temperature: float
    top_p: float = 1.0  # of the sampler; 1 keeps all
    top_k: int = 0  # of the sampler; 0 keeps all

    @property
    def trained_tokens(self) -> int:
        """Tokens of this sequence that enter the loss."""
        return int(self.trained.sum())


@dataclass(frozen=True)
class Batch:
    """What one optimizer step trains on, and figures of everything that was sampled for it."""

    rollouts: list[Rollout]
    groups: int
    zero_variance_groups: int
    sequences: int
    truncated_sequences: int
    completion_tokens: int
    reward_mean: float
    reward_std: float
    staleness_mean: float | None

    @property
    def trained_tokens(self) -> int:
        """Tokens that enter the loss."""
        return sum(rollout.trained_tokens for rollout in self.rollouts)


def make_batch(items: Sequence[Item], *, seq_len: int, divide_by_std: bool, policy_version: int) -> Batch:
    """Check and convert a batch; `policy_version` is the one being trained, against which staleness counts."""
    rollouts: list[Rollout] = []
    completions: list[int] = []
    scores: list[float] = []
    staleness: list[int] = []
    zero_variance = truncated = 0
    for index, item in enumerate(items):
        group = _group(item, f"batch item {index} (env_id {item.get('env_id')})", divide_by_std)
        scores += [float(score) for score in item["scores"]]
        completions += [int((np.asarray(mask) != NOT_TRAINED).sum()) for mask in item["masks"]]
        staleness += [policy_version - int(first) for first, _last in item.get("policy_versions") or []]
        if group is None:
            zero_variance += 1
            continue
        truncated += sum(len(rollout.tokens) > seq_len for rollout in group)
        rollouts += [_truncate(rollout, seq_len) for rollout in group]
    return Batch(
        rollouts=[rollout for rollout in rollouts if rollout.trained_tokens],
        groups=len(items),
        zero_variance_groups=zero_variance,
        sequences=len(scores),
        truncated_sequences=truncated,
        completion_tokens=sum(completions),
        reward_mean=float(np.mean(scores)),
        reward_std=float(np.std(scores)),
        staleness_mean=float(np.mean(staleness)) if staleness else None,
    )


def _group(item: Item, where: str, divide_by_std: bool) -> list[Rollout] | None:
    """The rollouts of one item, or None for a group without a signal."""
    sequences = len(item["tokens"])
    for key in ("masks", "scores"):
        _expect_length(item[key], sequences, f"{where}: {key}", "sequences")
    if item.get("inference_logprobs") is None:
        raise BatchError(
            f"{where} has no inference_logprobs: the loss needs the sampler's log-probability of every sampled token; "
            "have the environment send them (ManagedServer collects them from vLLM's /generate)"
        )
    _expect_length(item["inference_logprobs"], sequences, f"{where}: inference_logprobs", "sequences")
    scores = np.asarray(item["scores"], dtype=np.float64)
    if sequences == 0 or not np.isfinite(scores).all():
        raise BatchError(f"{where}: scores must be at least one and finite, got {item['scores']}")
    advantages = _advantages(item, scores, where, divide_by_std)
    if advantages is None:
        return None
    return [_rollout(item, index, advantages[index], f"{where}, sequence {index}") for index in range(sequences)]


def _advantages(item: Item, scores: NDArray[np.float64], where: str, divide_by_std: bool) -> list[NDArray[np.float32]] | None:
    """Advantages of each sequence, [length] or [1]: the environment's where given, else group-relative. None without a signal."""
    given = item.get("advantages")
    if given is not None:
        _expect_length(given, len(scores), f"{where}: advantages", "sequences")
        rows = [np.asarray(row, dtype=np.float32) for row in given]
    elif has_signal(scores):
        rows = [np.asarray([value], dtype=np.float32) for value in group_advantages(scores, divide_by_std=divide_by_std)]
    else:
        return None
    for index, override in enumerate(item.get("overrides") or []):
        if override and override.get("set_advantage_to_zero"):
            rows[index] = np.zeros_like(rows[index])
    staleness_weight = (item.get("group_overrides") or {}).get("staleness_weight")
    if staleness_weight is not None:  # an API that was told to down-weight groups of old policies
        rows = [row * np.float32(staleness_weight) for row in rows]
    return rows if any(row.any() for row in rows) else None


def _rollout(item: Item, index: int, advantages: NDArray[np.float32], where: str) -> Rollout:
    tokens = np.asarray(item["tokens"][index], dtype=np.int64)
    mask = np.asarray(item["masks"][index], dtype=np.int64)
    logprobs = np.asarray(item["inference_logprobs"][index], dtype=np.float32)
    _expect_length(mask, len(tokens), f"{where}: masks", "tokens")
    _expect_length(logprobs, len(tokens), f"{where}: inference_logprobs", "tokens")
    if len(advantages) == 1:
        advantages = np.repeat(advantages, len(tokens))
    _expect_length(advantages, len(tokens), f"{where}: advantages", "tokens")
    trained = mask != NOT_TRAINED
    trained[:1] = False
    _expect_equal_ids(tokens, mask, trained, where)
    _expect_logprobs(logprobs[trained], f"{where}: inference_logprobs")
    return Rollout(
        tokens=tokens,
        trained=trained,
        sampler_logprobs=logprobs,
        advantages=advantages,
        reference_logprobs=_reference_logprobs(item, index, trained, where),
        temperature=sampling_temperature(item, index),
        top_p=float(sampling_setting(item, index, "top_p") or 1.0),
        top_k=max(0, int(sampling_setting(item, index, "top_k") or 0)),
    )


def _reference_logprobs(item: Item, index: int, trained: NDArray[np.bool_], where: str) -> NDArray[np.float32] | None:
    if item.get("ref_logprobs") is None:
        return None
    logprobs = np.asarray(item["ref_logprobs"][index], dtype=np.float32)
    _expect_length(logprobs, len(trained), f"{where}: ref_logprobs", "tokens")
    _expect_logprobs(logprobs[trained], f"{where}: ref_logprobs")
    return logprobs


def sampling_temperature(item: Item, index: int) -> float:
    """The sampler's temperature for one sequence: its override, else the group's parameters, else 1. Greedy (0) counts as 1."""
    temperature = sampling_setting(item, index, "temperature")
    return float(temperature) if temperature is not None and float(temperature) > 0 else 1.0


def sampling_setting(item: Item, index: int, name: str) -> Any:
    """One sampling parameter of one sequence: its override, else the group's parameters, else None."""
    overrides = item.get("overrides")
    for source in (overrides[index] if overrides else None, item.get("generation_params"), item.get("group_overrides")):
        if source and source.get(name) is not None:
            return source[name]
    return None


def _truncate(rollout: Rollout, seq_len: int) -> Rollout:
    if len(rollout.tokens) <= seq_len:
        return rollout
    reference = rollout.reference_logprobs
    return replace(
        rollout,
        tokens=rollout.tokens[:seq_len],
        trained=rollout.trained[:seq_len],
        sampler_logprobs=rollout.sampler_logprobs[:seq_len],
        advantages=rollout.advantages[:seq_len],
        reference_logprobs=None if reference is None else reference[:seq_len],
    )


def _expect_length(values: Sequence[Any] | NDArray[Any], expected: int, what: str, unit: str) -> None:
    if len(values) != expected:
        raise BatchError(f"{what} has length {len(values)} for {expected} {unit}; the environment must send one per {unit[:-1]}")


def _expect_equal_ids(tokens: NDArray[np.int64], mask: NDArray[np.int64], trained: NDArray[np.bool_], where: str) -> None:
    wrong = np.flatnonzero(trained & (mask != tokens))
    if len(wrong):
        at = int(wrong[0])
        raise BatchError(f"{where}: mask {mask[at]} at position {at} is neither {NOT_TRAINED} nor the token {tokens[at]}")


def _expect_logprobs(values: NDArray[np.float32], what: str) -> None:
    """Finite and not positive, but for rounding: 1.0 is the marker of tokens that were not sampled."""
    wrong = np.flatnonzero(~(np.isfinite(values) & (values <= 1e-3)))
    if len(wrong):
        raise BatchError(f"{what} holds {values[wrong[0]]} on a sampled token; log-probabilities are finite and at most 0")
