"""Rows of prompts that are alike are computed once per pass.

vLLM's prefix cache shares whole blocks alone, of 32 tokens or more on CPUs. The answers to one question begin in the
same pass, and each would compute the question, or what of it comes after the last whole block, again.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_ROWS = 8  # of a request in a pass; a few rows more cost little

Numbers = NDArray[np.integer]


@dataclass(frozen=True)
class SharedRows:
    """`distinct` names the rows of a pass that are computed, [distinct rows]; `place` says where among them the result
    of each row stands, [rows].
    """

    distinct: NDArray[np.int64]
    place: NDArray[np.int64]


def shared_rows(tokens: Numbers, starts: Numbers, computed: Numbers, blocks: Numbers, block: int) -> SharedRows | None:
    """Find the rows of a pass that repeat those of a request before; None if there are none.

    `tokens` [rows] are those of the requests one after the other: rows starts[i] to starts[i + 1] belong to request i,
    [requests + 1]. Keys and values of the computed[i] tokens before them, [requests], are in the cache's blocks
    blocks[i], [requests, blocks of the longest], of `block` tokens each. Two rows are alike where the tokens before
    them are: those in the same blocks, or computed in this pass.
    """
    place = np.arange(len(tokens))
    leaders: dict[tuple[int, bytes], list[int]] = {}  # by where their rows end, and with which tokens
    for request, (first, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        if end - first < LEAST_ROWS:
            continue
        before = int(computed[request])
        cached = blocks[request, : -(-before // block)]
        same_end = leaders.setdefault((before + end - first, tokens[end - LEAST_ROWS : end].tobytes()), [])
        for leader in same_end:
            begin = int(starts[leader]) + before - int(computed[leader])  # the leader's row of the same position
            if begin < starts[leader] or not np.array_equal(blocks[leader, : len(cached)], cached):
                continue
            if np.array_equal(tokens[begin : starts[leader + 1]], tokens[first:end]):
                place[first:end] = np.arange(begin, starts[leader + 1])
                break
        else:
            same_end.append(request)
    distinct = np.flatnonzero(place == np.arange(len(tokens)))
    return SharedRows(distinct, np.searchsorted(distinct, place)) if len(distinct) < len(tokens) else None
