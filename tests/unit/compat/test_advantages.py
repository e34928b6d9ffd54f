import numpy as np
import pytest

from atroposlib.compat.advantages import (
    allclose_to_first,
    compute_discounted_returns,
    compute_grpo_process_supervision_advantages,
    compute_stats,
)


def test_entries_are_compared_with_the_first() -> None:
    assert allclose_to_first([[1.0, 2.0], [1.0, 2.0 + 1e-9]]) is True
    found = allclose_to_first([[1.0], [2.0], [1.0]], return_vector=True)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [True, False, True]


def test_statistics_of_jagged_lists() -> None:
    assert compute_stats([1, [2, [3]], 4, 5]) == {"mean": 3.0, "var": 2.0}
    with pytest.raises(ValueError, match="no numbers"):
        compute_stats([[], []])


def test_returns_are_discounted_and_advantages_normalised() -> None:
    assert compute_discounted_returns([1.0, 2.0, 3.0], 0.5).tolist() == [2.75, 3.5, 3.0]
    advantages = compute_grpo_process_supervision_advantages([[1.0, 3.0], [1.0]])
    deviation = np.sqrt(8 / 9)
    assert np.allclose(advantages[0], [(1 - 5 / 3 + 3 - 5 / 3) / deviation, (3 - 5 / 3) / deviation])
    with pytest.raises(ValueError, match="std_tol"):
        compute_grpo_process_supervision_advantages([[1.0], [1.0]])
