"""From the API's batch items to the arrays that are trained on; every group is checked before a gradient depends on
it.

An item is one group: parallel lists `tokens`, `masks` (-100 where a token was not sampled, else its id), `scores`
and `inference_logprobs` (the sampler's log-probabilities, 1.0 where not sampled), and optional fields that may be
null. `inference_logprobs` may be null, too, where the old log-probabilities are recomputed. `rollouts` numbers
the rollout of each sequence; without it each is one. Advantages are relative to the group's rollouts, whose scores
count once each, and a rollout's advantage is that of all its sequences.

A group without a signal (equal scores, or given advantages that are all zero) is counted. Its sampled tokens stay
in the loss's denominator; they are computed only where the loss has a KL or entropy term. A sequence above `seq_len`
keeps its first `seq_len` tokens and is counted. A first token cannot be trained, since nothing predicts it. A group
that fails the check of `atroposlib/groups.py` counts as if it had not come and is named with the reason; what passes it
can be converted.
"""

import itertools
import math
from collections.abc import Iterable
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atroposlib.groups import Untrainable, check, failed_rollouts, rollouts_of
from atroposlib.routing import unpack
from atroposlib.wire.batching import CUT, NOT_TRAINED, GroupRequirements, ScoredData
from example_trainer.data.advantages import group_advantages, has_signal
from example_trainer.data.loss_weights import token_weights
from example_trainer.data.said_by_teacher import said_by_teacher
from example_trainer.data.staleness import sampled_staleness, staleness_weights
from example_trainer.settings.loss import LossSettings
from example_trainer.settings.objectives import Advantage

PLAIN = LossSettings()
TRAINABLE = GroupRequirements(trainable_only=True)
Item = ScoredData | Untrainable  # a group of a batch, or why it cannot be read


@dataclass(frozen=True)
class Sequence:
    """One sampled sequence, prompt and answer. Arrays are [length]."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    sampler_logprobs: NDArray[np.float32] | None  # None where the environment sent none
    advantages: NDArray[np.float32]
    reference_logprobs: NDArray[np.float32] | None
    temperature: float
    top_p: float = 1.0  # of the sampler; 1 keeps all
    top_k: int = 0  # of the sampler; 0 keeps all
    rollout: int = 0  # place in the batch of the rollout that it belongs to
    old_logprobs: NDArray[np.float32] | None = None  # under the policy before this batch's first update, if recomputed
    routed_experts: NDArray[np.uint16] | None = None  # the sampler's, [length - 1, layers, top_k]; None if unknown
    weight: float = 1.0  # of each trained token in the mean that the step minimises (loss_weights.py)
    teacher_ids: NDArray[np.int64] | None = None  # that a teacher names, the token itself first, [length, k]
    teacher_logprobs: NDArray[np.float32] | None = None  # of them by the teacher
    identity: int = field(default_factory=itertools.count().__next__, repr=False)  # its own; `replace` keeps it

    @property
    def trained_tokens(self) -> int:
        """Tokens of this sequence that enter the loss."""
        return int(self.trained.sum())


@dataclass(frozen=True)
class GroupRecord:
    """The outcome of one group of a batch: the advantages of its sequences ([length] or [1] each), their places among
    the batch's `sequences` (None for one that is not computed), and why it is not trained on, if it is not.
    """

    tokens: PySequence[PySequence[int]]
    masks: PySequence[PySequence[int]]
    advantages: list[NDArray[np.float32]] | None
    places: list[int | None]
    left_out: str | None


@dataclass(frozen=True)
class Batch:
    """Holds what one optimizer step trains on, and statistics of everything that was sampled for it.

    The statistics count all groups that can be trained on, whether or not they are among the `sequences`;
    `truncated_sequences` are those above `seq_len`, and `zero_variance_groups` the groups without a signal.
    `cut_answers` counts sequences whose answer reached its limit of tokens, as far as groups say (None: no group does).
    Rewards are those of rollouts, without those that failed. `rejected` holds the places of the items that cannot be
    trained on, with the reasons; nothing else counts them. `records` has the outcome of each item. `shown` is
    the first group that can be trained on, for people to look at.
    """

    sequences: list[Sequence]
    groups: int
    zero_variance_groups: int
    rollouts: int
    sampled_sequences: int
    truncated_sequences: int
    cut_answers: int | None
    failed_rollouts: int
    completion_tokens: int
    loss_divisor: int
    reward_mean: float
    reward_std: float
    staleness_mean: float | None  # policy versions, over sampled tokens whose version is known
    staleness_max: int | None
    rejected: dict[int, str] = field(default_factory=dict)
    records: list[GroupRecord] = field(default_factory=list)
    shown: ScoredData | None = None

    @property
    def trained_tokens(self) -> int:
        """Tokens that enter the loss."""
        return sum(sequence.trained_tokens for sequence in self.sequences)

    @property
    def signal_share(self) -> float:
        """Return the share of the groups, 0 to 1, whose advantages are not all zero; 1 without groups."""
        return 1.0 - self.zero_variance_groups / self.groups if self.groups else 1.0


def make_batch(
    items: Iterable[Item],
    *,
    seq_len: int,
    policy_version: int,
    loss: LossSettings = PLAIN,
    needs: GroupRequirements = TRAINABLE,
) -> Batch:
    """Check and convert a batch; `policy_version` is the one being trained, against which staleness counts, and `needs`
    are what the trainer registered.

    Groups without a signal give sequences only where the loss has a teacher, a KL or entropy term; their advantages
    are 0.
    """
    trainable: list[ScoredData] = []
    rejected: dict[int, str] = {}
    records: list[GroupRecord] = []
    for place, item in enumerate(items):
        try:
            if isinstance(item, Untrainable):
                raise item
            check(item, needs)
            trainable.append(item)
        except Untrainable as error:
            rejected[place] = str(error)
            records.append(GroupRecord([] if isinstance(item, Untrainable) else item.tokens, [], None, [], str(error)))
    sequences: list[Sequence] = []
    completions: list[int] = []
    scores: list[float] = []  # of rollouts
    staleness: list[NDArray[np.int64]] = []
    zero_variance = truncated = divisor = failed = 0
    reasons: list[str] = []
    for group in trainable:
        first_rollout = len(scores)
        failed += failed_rollouts(group)
        ends = group.finish_reasons if isinstance(group.finish_reasons, list) else []
        reasons += ends
        scores += _rollout_scores(group)
        tokens = np.array([(np.asarray(mask) != NOT_TRAINED).sum() for mask in group.masks], np.int64)
        completions += tokens.tolist()
        truncated += sum(len(tokens) > seq_len for tokens in group.tokens)
        rollouts = np.array(rollouts_of(group))
        weights, share = token_weights(tokens, rollouts, loss.loss_mean, loss.loss_constant or seq_len)
        divisor += share
        staleness += sampled_staleness(group, policy_version)
        advantages = _advantages(group, loss.advantage, policy_version)
        signal = any(row.any() for row in advantages)
        zero_variance += not signal
        advantages = [np.float32(loss.reward_coef) * row for row in advantages]
        places: list[int | None] = [None] * len(group.tokens)
        computed = signal or loss.has_penalties
        if computed:
            for index, (rollout, each, weight) in enumerate(zip(rollouts, advantages, weights, strict=True)):
                if loss.mask_truncated and ends and ends[index] == CUT:
                    continue
                sequence = _sequence(group, index, each, seq_len, first_rollout + int(rollout), float(weight))
                sequence = _with_what_is_needed(sequence, group, index, seq_len, needs)
                if sequence.trained_tokens:
                    places[index] = len(sequences)
                    sequences.append(sequence)
        left_out = None if any(place is not None for place in places) else _why_left_out(group, computed)
        records.append(GroupRecord(group.tokens, group.masks, advantages, places, left_out))
    stale = np.concatenate(staleness or [np.empty(0, np.int64)])
    return Batch(
        sequences=sequences,
        groups=len(trainable),
        zero_variance_groups=zero_variance,
        rollouts=len(scores),
        sampled_sequences=len(completions),
        truncated_sequences=truncated,
        cut_answers=reasons.count(CUT) if reasons else None,
        failed_rollouts=failed,
        completion_tokens=sum(completions),
        loss_divisor=divisor,
        reward_mean=float(np.mean(scores)) if scores else math.nan,
        reward_std=float(np.std(scores)) if scores else math.nan,
        staleness_mean=float(stale.mean()) if len(stale) else None,
        staleness_max=int(stale.max()) if len(stale) else None,
        rejected=rejected,
        records=records,
        shown=trainable[0] if trainable else None,
    )


def _advantages(item: ScoredData, how: Advantage, policy_version: int) -> list[NDArray[np.float32]]:
    """Advantages of each sequence, [length] or [1]: the environment's where given, else its rollout's."""
    scores = np.asarray(_rollout_scores(item))
    if given := item.advantages:  # environments send [] for "none"
        rows = [np.asarray(row, dtype=np.float32) for row in given]
    elif has_signal(scores):
        of_rollouts = group_advantages(scores, how)
        rows = [np.asarray([of_rollouts[rollout]], dtype=np.float32) for rollout in rollouts_of(item)]
    else:
        rows = [np.zeros(1, dtype=np.float32) for _ in item.scores]
    for index, override in enumerate(item.overrides or []):
        if override and override.get("set_advantage_to_zero"):
            rows[index] = np.zeros_like(rows[index])
    return [row * weight for row, weight in zip(rows, staleness_weights(item, policy_version), strict=True)]


def _why_left_out(item: ScoredData, computed: bool) -> str:
    """Explain why no sequence of a group is trained on."""
    if computed:
        return "no token of it is trained on: its answers were cut (--mask-truncated), or lie beyond --seq-len"
    if item.advantages or has_signal(np.asarray(_rollout_scores(item))):
        return "its advantages are all 0"
    return f"all scores are {item.scores[0]:g}"


def _rollout_scores(item: ScoredData) -> list[float]:
    by_rollout = dict(zip(rollouts_of(item), item.scores, strict=True))  # checked: one score each
    return [float(score) for score in by_rollout.values()]


def _sequence(
    item: ScoredData, index: int, advantages: NDArray[np.float32], seq_len: int, rollout: int, weight: float
) -> Sequence:
    tokens = np.asarray(item.tokens[index][:seq_len], dtype=np.int64)
    trained = np.asarray(item.masks[index][:seq_len], dtype=np.int64) != NOT_TRAINED
    trained[:1] = False
    sampler, reference = item.inference_logprobs, item.ref_logprobs  # environments send [] for "none"
    temperature = float(setting if (setting := sampling_setting(item, index, "temperature")) is not None else 1.0)
    greedy = temperature == 0  # its log-probabilities are those of temperature 1, without top-p and top-k
    return Sequence(
        tokens=tokens,
        trained=trained,
        sampler_logprobs=np.asarray(sampler[index][:seq_len], dtype=np.float32) if sampler else None,
        advantages=np.repeat(advantages, len(tokens)) if len(advantages) == 1 else advantages[:seq_len],
        reference_logprobs=np.asarray(reference[index][:seq_len], dtype=np.float32) if reference else None,
        temperature=1.0 if greedy else temperature,
        top_p=1.0 if greedy else float(sampling_setting(item, index, "top_p") or 1.0),
        top_k=0 if greedy else max(0, int(sampling_setting(item, index, "top_k") or 0)),
        rollout=rollout,
        weight=weight,
    )


def _with_what_is_needed(
    sequence: Sequence, item: ScoredData, index: int, seq_len: int, needs: GroupRequirements
) -> Sequence:
    """The sequence with what its teacher said, and its experts, where the trainer reads them."""
    if needs.teacher_top_k is not None:
        ids, logprobs = said_by_teacher(item, index, seq_len, needs.teacher_top_k)
        sequence = replace(sequence, teacher_ids=ids, teacher_logprobs=logprobs)
    if needs.routing is not None:
        sequence = replace(sequence, routed_experts=_routed_experts(item, index, seq_len))
    return sequence


def _routed_experts(item: ScoredData, index: int, seq_len: int) -> NDArray[np.uint16] | None:
    given = item.routed_experts  # checked; environments send [] for "none"
    return unpack(given[index])[:seq_len].astype(np.uint16) if isinstance(given, list) and given else None


def sampling_setting(item: ScoredData, index: int, name: str) -> Any:
    """One sampling parameter of one sequence: its override, else the group's parameters, else None."""
    for source in (item.overrides[index] if item.overrides else None, item.generation_params, item.group_overrides):
        if source and source.get(name) is not None:
            return source[name]
    return None
