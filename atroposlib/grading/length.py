"""Rewards for an answer's length, to add to the reward for its content."""


def soft_overlong_punishment(tokens: int, limit: int, buffer: int) -> float:
    """0 for an answer of at most `limit - buffer` tokens, from there falling evenly to -1 at `limit`, where it is cut.
    So a model learns to end in time, not only that it was cut.

    Equation 13 of DAPO (Yu et al. 2025, arXiv 2503.14476), where `limit` is L_max and `buffer` is L_cache. Raises
    ValueError unless 0 < buffer <= limit.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"a buffer of {buffer} tokens does not fit a limit of {limit}: choose 1 to the limit")
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))
