"""The best of several alternatives by one score, ties decided by another."""

from collections.abc import Sequence


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """Index of the best primary score; among equals that of the best secondary score; among equals the first.

    Raises ValueError when there is nothing to choose from or the lengths differ.
    """
    if not primary_scores:
        raise ValueError("select_best_index got no scores; it needs at least one alternative")
    if len(primary_scores) != len(secondary_scores):
        raise ValueError(
            f"{len(primary_scores)} primary and {len(secondary_scores)} secondary scores; need one of each per"
            " alternative"
        )

    def rank(index: int) -> tuple[float, float]:
        primary, secondary = primary_scores[index], secondary_scores[index]
        return primary if primary_higher_is_better else -primary, -secondary if secondary_lower_is_better else secondary

    return max(range(len(primary_scores)), key=rank)
