"""Rows that are alike are computed once per pass.

vLLM's prefix cache shares whole blocks alone, of 32 tokens or more on CPUs. The answers to one question begin in the
same pass, and each would compute the question, or what of it comes after the last whole block, again. While they have
drawn the same tokens, each would compute the same rows again in every pass; late in training, most do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_ROWS = 8  # fewer cost little more

Numbers = NDArray[np.integer]


@dataclass(frozen=True)
class SharedRows:
    """`distinct` names the rows of a pass that are computed, [distinct rows]; `place` says where among them the result
    of each row stands, [rows].
    """

    distinct: NDArray[np.int64]
    place: NDArray[np.int64]


class _History(NamedTuple):
    """The first `tokens` of a request; `number` is that of all requests whose keys and values of them are the same."""

    tokens: int
    number: int


class RowSharing:
    """Finds the rows of each pass that repeat those of a request before. Two rows are alike where the tokens before
    them are: those in the same blocks, computed in this pass, or computed alike in the passes before.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._histories: dict[str, _History] = {}  # of the last pass's requests

    def of_pass(
        self, requests: Sequence[str], tokens: Numbers, starts: Numbers, computed: Numbers, blocks: Numbers, block: int
    ) -> SharedRows | None:
        """Find the distinct rows; None if less than LEAST_ROWS are others.

        `tokens` [rows] are those of `requests`, which are named, one after the other: rows starts[i] to starts[i + 1]
        belong to request i, [requests + 1]. Keys and values of the computed[i] tokens before them, [requests], are in
        the cache's blocks blocks[i], [requests, blocks of the longest], of `block` tokens each.
        """
        place = np.arange(len(tokens))
        leaders: dict[tuple[int, int | bytes, bytes], int] = {}  # by the tokens before their rows, and of them
        longer: dict[tuple[int, bytes], list[int]] = {}  # by where their rows end, and with which tokens
        histories: list[_History] = []
        bounds, cached_tokens = starts.tolist(), computed.tolist()
        for request, name in enumerate(requests):
            first, end, before = bounds[request], bounds[request + 1], cached_tokens[request]
            cached = blocks[request, : -(-before // block)]
            known = self._histories.get(name)
            number = known.number if known and known.tokens == before else cached.tobytes()
            leader = leaders.setdefault((before, number, tokens[first:end].tobytes()), request)
            begin = bounds[leader]
            if leader == request and end - first >= LEAST_ROWS:
                same_end = longer.setdefault((before + end - first, tokens[end - LEAST_ROWS : end].tobytes()), [])
                for each in same_end:
                    begin = bounds[each] + before - cached_tokens[each]  # the leader's row of the same position
                    if begin < bounds[each] or not np.array_equal(blocks[each, : len(cached)], cached):
                        continue
                    if np.array_equal(tokens[begin : bounds[each + 1]], tokens[first:end]):
                        leader = each
                        break
                else:
                    same_end.append(request)
            if leader == request:
                histories.append(_History(before + end - first, next(self._numbers)))
            else:
                place[first:end] = place[begin : bounds[leader + 1]]
                histories.append(histories[leader])
        self._histories = dict(zip(requests, histories, strict=True))
        return _shared(place)


def equal_rows(states: torch.Tensor) -> SharedRows | None:
    """Find the distinct rows of `states` [rows, values]; None if less than LEAST_ROWS are others."""
    first_of: dict[bytes, int] = {}
    rows = states.contiguous().view(torch.uint8).numpy()
    return _shared(np.array([first_of.setdefault(each.tobytes(), row) for row, each in enumerate(rows)]))


def _shared(place: NDArray[np.int64]) -> SharedRows | None:
    """`place` [rows] says of each row which one before has its result, or is it itself."""
    distinct = np.flatnonzero(place == np.arange(len(place)))
    if len(place) - len(distinct) < LEAST_ROWS:
        return None
    return SharedRows(distinct, np.searchsorted(distinct, place))
