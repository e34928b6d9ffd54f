"""How the attention of a packed row is cut into calls of torch's attention, so that neither masks nor calls waste what
shared prefixes save.

    segments  ├─ prompt ─┼ a ┼─ b ─┼ c ┤       blocks   prompt: causal, alone
              lengths and parents (prefixes.py)         a, b: keys are the prompt's and their own
                                                        c and its continuations: one call with a mask, if they are short

A subtree is one stretch of the row. It becomes one block under a mask, which computes scores that it discards, or a
block for its first segment and blocks for the subtrees behind; whatever costs less. packed_attention.py calls this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

# in scores (a query times a key), measured on a CPU with 9 heads of 64: 130 to 200 us a call, 0.08 to 0.15 us a score
CALL = 1000.0  # one call, forward and backward
COPIED = 6.0  # one key of a context, which is copied for the call
CAUSAL = 0.65  # a score of a square, half of which torch skips
MASKED_ON_GPU = 16.0  # a score under a mask, which FlashAttention does not take: an estimate, not measured
LARGEST_MASK = 1 << 26  # scores of a block that several segments share


@dataclass(frozen=True)
class Block:
    """Queries `start` to `end` of the row, which see the keys of the blocks `context`, all of them, and their own."""

    start: int
    end: int
    context: tuple[int, ...] = ()  # indices of blocks, the beginning of the sequence first
    mask: Tensor | None = None  # [queries, keys], 0 or -inf; None: causal, aligned at the ends
    is_square: bool = False  # the context's queries are computed again, so that there is no mask
    recomputed: bool = False  # in the backward pass, which then needs no copies of the context

    @property
    def size(self) -> int:
        """Queries of the block."""
        return self.end - self.start


@dataclass(frozen=True)
class _Part:
    """A stretch of the row and the cheapest blocks for it; all its segments continue `parent`."""

    start: int
    end: int
    parent: int
    cost: float
    blocks: list[tuple[int, int, int]] = field(default_factory=list)  # start, end, and the segment that it continues


@lru_cache(maxsize=2)  # each layer of a micro-batch asks for the same, or for one of two windows
def attention_blocks(
    lengths: tuple[int, ...], parents: tuple[int, ...], window: int | None, device: torch.device, dtype: torch.dtype
) -> tuple[Block, ...]:
    """The blocks of a row of segments, in the order of the row. Copies of contexts that are kept until the backward
    pass have at most as many keys as the row has tokens. `window` limits how far back a token sees. Masks have the
    queries' dtype, so that torch keeps one for all layers.
    """
    starts, depths = [0], list[int]()  # of each segment: its place, and the tokens before it in its sequence
    for length, parent in zip(lengths, parents, strict=True):
        depths.append(0 if parent < 0 else depths[parent] + lengths[parent])
        starts.append(starts[-1] + length)
    on_gpu = knows_causal_contexts(device)
    stretches = _cheapest(lengths, parents, depths, MASKED_ON_GPU if on_gpu else 1.0).blocks
    copied = sum(_depth(parent, lengths, depths) for _, _, parent in stretches)
    of_start = {start: index for index, (start, _, _) in enumerate(stretches)}
    blocks = []
    for start, end, parent in stretches:
        context = []
        while parent >= 0:
            context.append(of_start[starts[parent]])
            parent = parents[parent]
        inside = range(starts.index(start), starts.index(end))
        block = Block(start, end, tuple(context[::-1]), recomputed=bool(context) and copied > starts[-1])
        before = depths[inside[0]]
        if (
            len(inside) == 1
            and not on_gpu
            and _is_square(end - start, before)
            and _sees_all(end - start + before, window)
        ):
            blocks.append(replace(block, is_square=before > 0))
            continue
        seen = _mask(inside, lengths, parents, depths, window, device)
        if seen is not None:
            mask = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
            block = replace(block, mask=mask, recomputed=block.recomputed or (on_gpu and len(inside) > 1))
        blocks.append(block)
    return tuple(blocks)


def knows_causal_contexts(device: torch.device) -> bool:
    """Return whether torch computes queries behind a context without a mask: by FlashAttention, which then takes
    none.
    """
    return device.type == "cuda"


def _sees_all(tokens: int, window: int | None) -> bool:
    return window is None or tokens <= window


def _is_square(size: int, before: int) -> bool:
    """Return whether `size` queries behind a context cost less together with those of the context: on a CPU, where
    torch skips half of a square, and computes all of a mask.
    """
    return CAUSAL * (before + size) < size


def _depth(segment: int, lengths: Sequence[int], depths: Sequence[int]) -> int:
    """Tokens of the sequence up to the end of `segment`."""
    return 0 if segment < 0 else depths[segment] + lengths[segment]


def _cheapest(lengths: Sequence[int], parents: Sequence[int], depths: Sequence[int], masked: float) -> _Part:
    """The cheapest blocks of the whole row, from its last segment to its first, where a score under a mask costs
    `masked`.
    """

    def block(start: int, end: int, parent: int, several: bool) -> _Part:
        size, before = end - start, _depth(parent, lengths, depths)
        if several:
            scores = masked * size * (before + size)
        else:
            scores = min(1.0 * size, CAUSAL * (before + size)) * (before + size)
        if several and scores > LARGEST_MASK:
            scores = float("inf")
        return _Part(start, end, parent, CALL + scores + COPIED * before, [(start, end, parent)])

    def several(parts: list[_Part]) -> list[_Part]:
        """Neighbours in one block where that is cheaper."""
        ways: list[_Part] = []
        for part in parts:
            if ways:
                merged = block(ways[-1].start, part.end, part.parent, several=True)
                if merged.cost < ways[-1].cost + part.cost:
                    ways[-1] = merged
                    continue
            ways.append(part)
        return ways

    behind: dict[int, list[_Part]] = {}  # of each segment, the subtrees that continue it, the last one first
    end = sum(lengths)
    for segment in range(len(lengths) - 1, -1, -1):
        start, parent = end - lengths[segment], parents[segment]
        parts = [block(start, end, parent, several=False), *several(behind.pop(segment, [])[::-1])]
        apart = _Part(start, parts[-1].end, parent, sum(p.cost for p in parts), [b for p in parts for b in p.blocks])
        together = block(start, apart.end, parent, several=len(parts) > 1)
        behind.setdefault(parent, []).append(together if together.cost < apart.cost else apart)
        end = start
    roots = behind[-1][::-1]  # which share nothing, and stay apart
    return _Part(0, sum(lengths), -1, sum(p.cost for p in roots), [b for p in roots for b in p.blocks])


def _mask(
    inside: range,
    lengths: Sequence[int],
    parents: Sequence[int],
    depths: Sequence[int],
    window: int | None,
    device: torch.device,
) -> Tensor | None:
    """Mark which keys of its context and its own each query of the segments `inside` sees: those of its sequence, up
    to itself, within the window. None where torch knows it: a causal square, and on a GPU one behind a context.
    """
    longest = max(_depth(segment, lengths, depths) for segment in inside)
    before = depths[inside[0]]
    known = not before or knows_causal_contexts(device)
    if len(inside) == 1 and known and _sees_all(longest, window):
        return None
    sees = torch.eye(len(inside), dtype=torch.bool)  # of each segment: itself and those that it continues
    for at, segment in enumerate(inside):
        if parents[segment] >= inside[0]:
            sees[at] |= sees[parents[segment] - inside[0]]
    sizes = torch.tensor([lengths[segment] for segment in inside])
    of = torch.arange(len(inside)).repeat_interleave(sizes)  # the segment of each token
    offsets = torch.tensor([depths[segment] for segment in inside]) - (sizes.cumsum(0) - sizes)
    positions = torch.arange(len(of)) + offsets[of]
    own = sees[of][:, of] & (positions[:, None] >= positions)
    mask = torch.cat([torch.ones(len(of), before, dtype=torch.bool), own], 1)
    if window is not None:
        mask &= positions[:, None] - torch.cat([torch.arange(before), positions]) < window
    return mask.to(device)
