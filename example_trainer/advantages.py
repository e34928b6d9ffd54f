"""Group-relative advantages: how much better each answer did than its siblings. Pure functions on score arrays."""

import numpy as np
from numpy.typing import NDArray

STD_EPS = 1e-4


def group_advantages(scores: NDArray[np.float64], *, divide_by_std: bool) -> NDArray[np.float64]:
    """Score minus the group's mean, over its population standard deviation + 1e-4 if asked. `scores` and result:
    [rollouts].

    With the deviation this is GRPO's advantage (Shao et al. 2024, arXiv 2402.03300), without it that of Dr. GRPO (Liu
    et al. 2025, arXiv 2503.20783). A group of one has no siblings: its score is its advantage.
    """
    if len(scores) == 1:
        return scores.copy()
    centred: NDArray[np.float64] = scores - scores.mean()
    return centred / np.float64(scores.std() + STD_EPS) if divide_by_std else centred


def has_signal(scores: NDArray[np.float64]) -> bool:
    """Whether a group can teach anything: its scores differ, or it is a group of one with a score other than zero."""
    return bool(scores[0] != 0) if len(scores) == 1 else bool((scores != scores[0]).any())
