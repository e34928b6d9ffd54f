"""Group-relative advantages: how much better each answer did than its siblings. Pure functions on score arrays."""

import numpy as np
from numpy.typing import NDArray

from atroposlib.groups import scores_differ
from example_trainer.settings.objectives import Advantage

STD_EPS = 1e-4


def group_advantages(scores: NDArray[np.float64], how: Advantage) -> NDArray[np.float64]:
    """Compute how much better than its siblings each answer is. `scores` and result: [rollouts].

        group_std    score less the mean, over the population standard deviation + 1e-4: GRPO (Shao et al. 2024, arXiv
                     2402.03300, section 4.1.2)
        group_mean   score less the mean: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2)
        rloo         score less the mean of the others, n / (n - 1) times as much: RLOO (Ahmadian et al. 2024, arXiv
                     2402.14740)

    A group of one has no siblings: its score is its advantage.
    """
    if len(scores) == 1:
        return scores.copy()
    centred: NDArray[np.float64] = scores - scores.mean()
    if how == "rloo":
        return centred * (len(scores) / (len(scores) - 1))
    return centred / np.float64(scores.std() + STD_EPS) if how == "group_std" else centred


def has_signal(scores: NDArray[np.float64]) -> bool:
    """Return whether a group can teach anything: its scores differ, or it is a group of one with a score other than
    zero.
    """
    return bool(scores[0] != 0) if len(scores) == 1 else scores_differ(scores.tolist())
