"""A checksum of a tensor's raw words, the same on every device: it compares what vLLM computes with to what the trainer
sent.

Integer sums wrap around, so their order does not matter, and a GPU gives the number that a CPU gives. A word's weight
is odd and depends on its place: one changed word always changes the sum, and words that change places are seen.
"""

import torch

WORDS = {2: torch.int16, 4: torch.int32}  # by the bytes of a number
CHUNK = 1 << 18  # words at a time: 8 bytes of each are held twice
MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 divided by the golden ratio, as a signed number


def digest(values: torch.Tensor) -> int:
    """The checksum of `values`, of any shape, in row-major order; -2^63 to 2^63 - 1."""
    words = values.detach().contiguous().view(-1).view(WORDS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK].long().add_(1)
        weights = torch.arange(start, start + len(part), device=values.device).mul_(MIX).bitwise_or_(1)
        total += part.mul_(weights).sum()
    return int(total)
