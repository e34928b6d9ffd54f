"""Prefixes that several sequences begin with, found so that each is computed once: the prompt of a group, the turns
before of a conversation.

    sequences   a b c d     in tree order    a b c d     row    a b │ c d │ e │ f g
                f g                          a b e              0     1     2   3      segments: lengths 2, 2, 1, 2
                a b e                        f g                                       parents -1, 0, 0, -1

A hidden state depends on the tokens before it and on nothing else, so sequences with equal beginnings share it whatever
groups they are of. Pure functions of token arrays; packing.py decides with them what a micro-batch holds.
"""

from collections.abc import Sequence as PySequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
PASS = 64  # tokens that a further micro-batch counts as: what a pass costs beside its tokens, an estimate


@dataclass(frozen=True)
class Row:
    """Distinct tokens in one row, T of them: a parent's segment comes before those of its children."""

    places: list[NDArray[np.int64]]  # of each sequence, where in the row each of its tokens is
    lengths: tuple[int, ...]  # tokens of each segment; their sum is T
    parents: tuple[int, ...]  # the segment that each one continues, -1 where a sequence begins

    def gather(self, tokens: PySequence[Tokens]) -> Tokens:
        """The row [T] of what each sequence has, which is equal where they share a place."""
        row = np.zeros(sum(self.lengths), np.int64)
        for place, values in zip(self.places, tokens, strict=True):
            row[place] = values
        return row


def tree_order(tokens: PySequence[Tokens]) -> tuple[list[int], list[int]]:
    """The sequences in the order of their tokens, and how many leading tokens each shares with its predecessor
    (0 for the first), which is the most that it shares with any earlier one.
    """
    order = sorted(range(len(tokens)), key=lambda index: tokens[index].tolist())
    common = [0] * len(order)
    for at in range(1, len(order)):
        before, here = tokens[order[at - 1]], tokens[order[at]]
        shorter = min(len(before), len(here))
        differ = np.flatnonzero(before[:shorter] != here[:shorter])
        common[at] = int(differ[0]) if len(differ) else shorter
    return order, common


def most_tokens(budget: int, longest: int) -> int:
    """The most distinct tokens, and the most trained ones, of a micro-batch whose longest sequence has `longest`: else
    sequences that are almost as long as the budget would share no prefix.
    """
    return max(budget, longest + longest // 4)


def cut(lengths: PySequence[int], common: PySequence[int], trained: PySequence[int], budget: int) -> list[range]:
    """Choose where to cut sequences in tree order into micro-batches of at most `most_tokens`. Of such cuts, take
    the one that computes the fewest tokens twice (a pass counts as PASS).
    """
    size, shared, trains = (np.asarray(values, np.int64) for values in (lengths, common, trained))
    new, learned = (size - shared).cumsum(), trains.cumsum()  # distinct tokens and trained ones, up to each sequence
    largest = most_tokens(budget, int(size.max(initial=0)))
    least = np.zeros(len(size) + 1, np.int64)  # cost of the first n sequences
    begins: list[int] = []  # of the micro-batch with the n-th
    for last in range(len(size)):
        start = int(max(values.searchsorted(values[last] - largest) for values in (new, learned)))
        part = slice(start, last + 1)  # where the micro-batch may begin; further ahead it is too large
        used = np.maximum(size[part] + new[last] - new[part], trains[part] + learned[last] - learned[part])
        longest = np.maximum.accumulate(size[part][::-1])[::-1]
        fits = used <= np.maximum(budget, longest + longest // 4)  # most_tokens of each
        fits[-1] = True  # a sequence goes alone, however long
        costs = np.where(fits, least[part] + shared[part] + PASS, np.iinfo(np.int64).max)
        begins.append(start + int(costs.argmin()))
        least[last + 1] = costs.min()
    rows, end = [], len(lengths)
    while end:
        rows.append(range(begins[end - 1], end))
        end = begins[end - 1]
    return rows[::-1]


def distinct_tokens(lengths: PySequence[int], common: PySequence[int], part: range) -> int:
    """Tokens of a micro-batch of the sequences `part`, each counted once."""
    return sum(lengths[at] - (common[at] if at > part.start else 0) for at in part)


def lay_out(tokens: PySequence[Tokens]) -> Row:
    """One row of these sequences, none of which is empty."""
    order, common = tree_order(tokens)
    places = [np.empty(0, np.int64)] * len(tokens)
    path, end = places[0], 0
    for index, shared in zip(order, common, strict=True):
        new = len(tokens[index]) - shared
        places[index] = path = np.concatenate([path[:shared], np.arange(end, end + new)])
        end += new
    before = np.full(end, -1)  # the place of the token before each
    for path in places:
        before[path[1:]] = path[:-1]
    followers = np.bincount(before[before >= 0], minlength=end)
    begins = (before < 0) | (before != np.arange(end) - 1) | (followers[before] > 1)
    first = np.flatnonzero(begins)
    segment = begins.cumsum() - 1
    parents = np.where(before[first] < 0, -1, segment[before[first]])
    return Row(places, tuple(np.diff(np.append(first, end)).tolist()), tuple(parents.tolist()))
