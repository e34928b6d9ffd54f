"""Micro-batches by token budget: sequences are laid end to end in one row, so no padding is ever computed.

    sequences  [a b c d] [e f g]      micro-batch   a b c   e f      the last token predicts nothing: not fed
    trained        c d      f g       rows            1 2     3 4    positions that predict a trained token
                                      targets         c d     f g

Tokens after the last trained one cannot influence the loss and are not fed either. With `share`, what sequences of one
micro-batch begin with is in the row once (prefixes.py): budgets then count distinct tokens.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from example_trainer.data.batching import Sequence
from example_trainer.data.prefixes import Row, cut, distinct_tokens, lay_out, tree_order
from example_trainer.data.routing_replay import UNKNOWN


@dataclass(frozen=True)
class MicroBatch:
    """One packed row of T tokens with R trained ones. Tensors live on the trainer's device."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], of each token in its sequence
    lengths: tuple[int, ...]  # tokens fed of each sequence, or segment; their sum is T
    rows: Tensor  # [R], positions in the row whose next token is trained; of several sequences where they share it
    targets: Tensor  # [R], that token
    sampler_logprobs: Tensor  # [R], NaN where the environment gave none
    old_logprobs: Tensor  # [R], what ratios are against: the sampler's, or recomputed before the batch's first update
    advantages: Tensor  # [R]
    weights: Tensor  # [R], what each token counts in the mean (loss_weights.py)
    temperatures: Tensor  # [R]
    reference_logprobs: Tensor  # [R], NaN where the environment gave none
    truncation: tuple[Tensor, Tensor] | None = (
        None  # the sampler's top-k and top-p, [R] each; None where it kept every token
    )
    compared: Tensor | None = None  # [R], whether the sampler's log-probability is known; None where all are
    routing: Tensor | None = (
        None  # [T, layers, top_k], the sampler's experts (routing_replay.py); None where none are known
    )
    recomputed: bool = False  # whether `old_logprobs` are the trainer's own
    counted: bool = True  # False: another rank's, computed again so that every rank makes as many passes
    parents: tuple[int, ...] | None = None  # the segment that each one continues, or -1; None: all are whole sequences
    counts: tuple[int, ...] = ()  # trained tokens of each sequence; their sum is R
    teacher_logprobs: Tensor | None = None  # [R], of each target; None where there is no teacher
    teacher_named: tuple[Tensor, Tensor] | None = None  # ids and log-probabilities, [R, k] each, where it names others


def pack(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch. Each sum is at most `budget`; a longer sequence goes alone.

    This is first-fit decreasing, which needs at most 11/9 times the fewest possible micro-batches plus 6/9 (Dósa
    2007). Every index appears once; the result depends on the lengths alone.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = next((b for b, free in enumerate(room) if lengths[index] <= free), None)
        if fit is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[fit].append(index)
            room[fit] -= lengths[index]
    return [sorted(members) for members in bins]


def deal(lengths: list[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """The sequences' indices by rank and micro-batch: every index once, as many micro-batches on each rank, each of at
    most `budget` tokens unless one sequence is longer. A micro-batch is empty only where each of the others has one
    sequence.

    First fit says how many are needed; the sequences then go, longest first, to the emptiest that has space, and the
    micro-batches, fullest first, to the rank with the fewest tokens, so that ranks wait little for each other.
    """
    rows = pack(lengths, budget)
    if ranks == 1:
        return [rows]
    passes = -(-len(rows) // ranks)
    bins = _spread(lengths, passes * ranks, budget) or _split(rows, passes * ranks, lengths)
    return _to_ranks(bins, [sum(lengths[i] for i in members) for members in bins], ranks)


def deal_shared(sequences: list[Sequence], ranks: int, budget: int) -> list[list[list[int]]]:
    """The same where equal prefixes are computed once: the budget is of distinct tokens, and of trained ones.

    Sequences stay in tree order, so that those with a long prefix in common are in one micro-batch. With several ranks
    the budget is the smallest for which as many micro-batches are enough.
    """
    fed = [sequence.tokens[: fed_length(sequence)] for sequence in sequences]
    order, common = tree_order(fed)
    lengths, trained = [len(fed[i]) for i in order], [sequences[i].trained_tokens for i in order]
    parts = cut(lengths, common, trained, budget)
    if ranks == 1:
        return [[sorted(order[at] for at in part) for part in parts]]
    count = -(-len(parts) // ranks) * ranks
    least = bisect_left(range(1, budget), True, key=lambda limit: len(cut(lengths, common, trained, limit)) <= count)
    parts = cut(lengths, common, trained, least + 1)
    sizes = {tuple(sorted(order[at] for at in part)): distinct_tokens(lengths, common, part) for part in parts}
    bins = _split([list(members) for members in sizes], count, [len(tokens) for tokens in fed])
    return _to_ranks(
        bins, [sizes.get(tuple(members), 0) or sum(len(fed[i]) for i in members) for members in bins], ranks
    )


def _to_ranks(bins: list[list[int]], sizes: list[int], ranks: int) -> list[list[list[int]]]:
    """Deal as many micro-batches to each rank, the largest first, to the rank with the fewest tokens."""
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for size, members in sorted(zip(sizes, bins, strict=True), key=lambda pair: (-pair[0], pair[1])):
        rank = min((r for r in range(ranks) if len(shares[r]) < len(bins) // ranks), key=lambda r: (tokens[r], r))
        shares[rank].append(members)
        tokens[rank] += size
    return shares


def _spread(lengths: list[int], count: int, budget: int) -> list[list[int]] | None:
    """`count` micro-batches of about equal size; None where some sequence then fits in none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = min(range(count), key=lambda b: (filled[b], b))
        if filled[emptiest] and filled[emptiest] + lengths[index] > budget:
            return None
        bins[emptiest].append(index)
        filled[emptiest] += lengths[index]
    return [sorted(members) for members in bins]


def _split(bins: list[list[int]], count: int, lengths: list[int]) -> list[list[int]]:
    """`bins`, and of the fullest ones a sequence each, until there are `count`; empty ones when no bin has two."""
    bins = list(bins)
    while len(bins) < count:
        several = [b for b in range(len(bins)) if len(bins[b]) > 1]
        if not several:
            bins.append([])
            continue
        fullest = max(several, key=lambda b: (sum(lengths[i] for i in bins[b]), -b))
        longest = max(bins[fullest], key=lambda i: (lengths[i], -i))
        bins[fullest] = [i for i in bins[fullest] if i != longest]
        bins.append([longest])
    return bins


def fed_length(sequence: Sequence) -> int:
    """Tokens the model must read to predict all trained ones: all before the last of them."""
    return int(np.flatnonzero(sequence.trained)[-1])


def micro_batches(
    sequences: list[Sequence], budget: int, device: torch.device, rank: int = 0, ranks: int = 1, share: bool = False
) -> list[MicroBatch]:
    """One rank's share of the sequences, each of which has a trained token, packed into rows of at most `budget`
    tokens. Every rank has as many rows. With `share`, each row has common prefixes once.
    """
    shortest, share = min(sequences, key=fed_length), share and _can_share(sequences)
    return [
        (
            _micro_batch([sequences[i] for i in members], device, share)
            if members
            else replace(_micro_batch([shortest], device, share), counted=False)
        )
        for members in _dealt(sequences, ranks, budget, share)[rank]
    ]


def _can_share(sequences: list[Sequence]) -> bool:
    """Return whether equal tokens are computed alike: sequences that bring their own experts may differ in them."""
    return all(sequence.routed_experts is None for sequence in sequences)


def _dealt(sequences: list[Sequence], ranks: int, budget: int, share: bool) -> list[list[list[int]]]:
    if share and _can_share(sequences):
        return deal_shared(sequences, ranks, budget)
    return deal([fed_length(sequence) for sequence in sequences], ranks, budget)


def with_old_logprobs(
    sequences: list[Sequence], column: NDArray[np.float32], budget: int, ranks: int = 1, share: bool = False
) -> list[Sequence]:
    """The sequences with their part of `column`."""
    completed = []
    for sequence, values in zip(sequences, of_sequences(sequences, column, budget, ranks, share), strict=True):
        old = np.full(len(sequence.tokens), np.nan, np.float32)
        old[sequence.trained] = values
        completed.append(replace(sequence, old_logprobs=old))
    return completed


def of_sequences(
    sequences: list[Sequence], column: NDArray[np.float32], budget: int, ranks: int = 1, share: bool = False
) -> list[NDArray[np.float32]]:
    """The part of `column` of each sequence, [its trained tokens]. The column has a value for each trained token, in
    the order in which the ranks' micro-batches have them.
    """
    order = [index for of_rank in _dealt(sequences, ranks, budget, share) for members in of_rank for index in members]
    parts, start = [column[:0]] * len(sequences), 0
    for index in order:
        parts[index] = column[start : start + sequences[index].trained_tokens]
        start += sequences[index].trained_tokens
    return parts


def _routing(sequences: list[Sequence], lengths: tuple[int, ...]) -> NDArray[np.int32] | None:
    """The experts of the tokens that are fed, [T, layers, top_k]."""
    shape = next((each.routed_experts.shape[1:] for each in sequences if each.routed_experts is not None), None)
    if shape is None:
        return None
    return np.concatenate(
        [
            np.full((length, *shape), UNKNOWN, np.int32)
            if sequence.routed_experts is None
            else sequence.routed_experts[:length].astype(np.int32)
            for sequence, length in zip(sequences, lengths, strict=True)
        ]
    )


def _micro_batch(sequences: list[Sequence], device: torch.device, share: bool) -> MicroBatch:
    fed = [sequence.tokens[: fed_length(sequence)] for sequence in sequences]
    row = lay_out(fed) if share else _end_to_end(fed)
    trained = [np.flatnonzero(sequence.trained) for sequence in sequences]  # positions within each sequence, from 1

    def tensor(parts: list[NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    def of_trained(arrays: list[NDArray[np.generic]]) -> Tensor:
        return tensor([array[positions] for array, positions in zip(arrays, trained, strict=True)])

    def of_sampler(values: Iterable[float], dtype: type[np.generic]) -> Tensor:
        return of_trained(
            [np.full(len(sequence.tokens), value, dtype) for sequence, value in zip(sequences, values, strict=True)]
        )

    def or_nan(arrays: Iterable[NDArray[np.float32] | None]) -> Tensor:
        return of_trained(
            [
                np.full(len(sequence.tokens), np.nan, np.float32) if array is None else array
                for sequence, array in zip(sequences, arrays, strict=True)
            ]
        )

    known = [sequence.sampler_logprobs is not None for sequence in sequences]
    of_teacher = _of_teacher(sequences, trained)
    routing = _routing(sequences, row.lengths)  # which then share nothing
    return MicroBatch(
        input_ids=tensor([row.gather(fed)])[None],
        position_ids=tensor([row.gather([np.arange(len(tokens)) for tokens in fed])])[None],
        lengths=row.lengths,
        parents=row.parents if share else None,
        rows=tensor([places[positions - 1] for places, positions in zip(row.places, trained, strict=True)]),
        counts=tuple(map(len, trained)),
        targets=of_trained([sequence.tokens for sequence in sequences]),
        sampler_logprobs=or_nan(sequence.sampler_logprobs for sequence in sequences),
        compared=None if all(known) else of_sampler(known, np.bool_),
        old_logprobs=or_nan(
            sequence.sampler_logprobs if sequence.old_logprobs is None else sequence.old_logprobs
            for sequence in sequences
        ),
        routing=None if routing is None else torch.from_numpy(routing).to(device),
        recomputed=any(sequence.old_logprobs is not None for sequence in sequences),
        advantages=of_trained([sequence.advantages for sequence in sequences]),
        weights=of_sampler([sequence.weight for sequence in sequences], np.float32),
        temperatures=of_sampler([sequence.temperature for sequence in sequences], np.float32),
        reference_logprobs=or_nan(sequence.reference_logprobs for sequence in sequences),
        truncation=(
            (
                of_sampler([sequence.top_k for sequence in sequences], np.int64),
                of_sampler([sequence.top_p for sequence in sequences], np.float32),
            )
            if any(sequence.top_k or sequence.top_p < 1 for sequence in sequences)
            else None
        ),
        teacher_logprobs=None if of_teacher is None else tensor([of_teacher[1][:, 0]]),
        teacher_named=(
            (tensor([of_teacher[0]]), tensor([of_teacher[1]]))
            if of_teacher is not None and of_teacher[0].shape[1] > 1
            else None
        ),
    )


def _of_teacher(
    sequences: list[Sequence], trained: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    """What the teacher said of the trained tokens, ids and log-probabilities [R, k]; None without one."""
    said = [
        (sequence.teacher_ids[positions], sequence.teacher_logprobs[positions])
        for sequence, positions in zip(sequences, trained, strict=True)
        if sequence.teacher_ids is not None and sequence.teacher_logprobs is not None
    ]
    if not said:
        return None
    ids, logprobs = zip(*said, strict=True)
    return np.concatenate(ids), np.concatenate(logprobs)


def _end_to_end(fed: list[NDArray[np.int64]]) -> Row:
    """One row in which no sequence shares anything."""
    lengths = tuple(map(len, fed))
    places = [start + np.arange(length) for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False)]
    return Row(places, lengths, (-1,) * len(fed))
