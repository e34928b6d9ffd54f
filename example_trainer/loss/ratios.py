"""Probability ratios of tokens and of whole sequences. Pure functions: values in, values out; tensors are [tokens]."""

from collections.abc import Sequence

import torch
from torch import Tensor

from example_trainer.settings.objectives import Ratio


class Sequences:
    """Records which tokens of a micro-batch belong together: sums over a sequence, told to each of its tokens."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        """`counts` are the tokens of each sequence, one after another."""
        self._of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)  # [tokens]
        self._number = len(counts)
        self.tokens = torch.tensor(counts, dtype=torch.float32, device=device)[self._of]  # of each token's sequence

    def sum(self, values: Tensor) -> Tensor:
        """Compute for each token the sum over its sequence."""
        sums = torch.zeros(self._number, dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self._of, values.double())[self._of].float()

    def mean(self, values: Tensor) -> Tensor:
        """Compute for each token the mean over its sequence."""
        return self.sum(values) / self.tokens


def of_sequences(differences: Tensor, sequences: Sequences, kind: Ratio) -> tuple[Tensor, Tensor]:
    """Compute for each token the log-ratio of its sequence, and that log-ratio's derivative by the token's own
    log-probability times the sequence's tokens, over which every token's loss repeats it. `differences` are
    log-probabilities less the old policy's.

        sequence_mean   (sum of differences) / T     GSPO (Zheng et al. 2025, arXiv 2507.18071, equation 7)
        sequence_sum    sum of differences           the ratio of the sequences' probabilities
    """
    if kind == "sequence_mean":
        return sequences.mean(differences), torch.ones_like(differences)
    return sequences.sum(differences), sequences.tokens


def log_ratios(logprobs: Tensor, old: Tensor, limit: float, of_sequence: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The log-ratio that an objective gets for each token, within ± `limit`: the token's own, or its sequence's.

    A sequence's has the gradient that passes through this token alone (GSPO-token, arXiv 2507.18071, equation 14), so
    that the tokens of one sequence may lie in several chunks.
    """
    if of_sequence is None:
        return (logprobs - old).clamp(-limit, limit)
    value, slope = of_sequence
    return (value + slope * (logprobs - logprobs.detach())).clamp(-limit, limit)
