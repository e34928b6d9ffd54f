"""How much each sampled token counts in the mean that a step minimises. Pure functions on token counts.

A step minimises sum(weight x loss) / divisor over the sampled tokens of its batch. Weights are made with the batch, so
that micro-batches, chunks of the head and ranks add up shares of one mean, however the tokens are dealt to them. A
rollout is one sampled answer, of one sequence or several; groups of equal scores count in the divisor like all others.

    token       sum of all tokens / tokens                  DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.3)
    sequence    mean over rollouts of each one's own mean   GRPO (Shao et al. 2024, arXiv 2402.03300, equation 3)
    constant    sum of all tokens / (rollouts x constant)   Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2)
"""

import numpy as np
from numpy.typing import NDArray

from example_trainer.settings.objectives import LossMean


def token_weights(
    tokens: NDArray[np.int64], rollouts: NDArray[np.int64], mean: LossMean, constant: int
) -> tuple[NDArray[np.float64], int]:
    """The weight of a token of each sequence, [sequences], and the divisor. `tokens` [sequences] are the sampled ones
    of each sequence, and `rollouts` [sequences] says to which rollout each belongs.

    Divisors of groups add up to that of a batch, and weights do not depend on other groups.
    """
    of_rollout = np.bincount(rollouts, weights=tokens)
    if mean == "sequence":
        return 1 / np.maximum(of_rollout, 1)[rollouts], len(of_rollout)
    ones = np.ones(len(tokens))
    return ones, int(tokens.sum()) if mean == "token" else len(of_rollout) * constant
