"""Statistics and advantages of rewards, per step of a trajectory, by numpy alone."""

from collections.abc import Iterator, Sequence

import numpy as np


def allclose_to_first(
    values: object, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False, return_vector: bool = False
) -> bool | np.ndarray:
    """Return whether every entry of a rectangular `values` is close to its first.

    With `return_vector` there is one answer per entry.
    """
    array = np.asarray(values)
    close = np.isclose(array, array[0], rtol=rtol, atol=atol, equal_nan=equal_nan)
    each: np.ndarray = np.asarray(close.reshape(len(array), -1).all(axis=1))
    return each if return_vector else bool(each.all())


def compute_stats(data: Sequence[object]) -> dict[str, float]:
    """`mean` and population variance `var` of all numbers in a nested, possibly jagged list. Raises ValueError when
    there is none.
    """
    numbers = list(_numbers(data))
    if not numbers:
        raise ValueError("compute_stats got no numbers")
    return {"mean": float(np.mean(numbers)), "var": float(np.var(numbers))}


def compute_discounted_returns(rewards: object, gamma: float) -> np.ndarray:
    """The return at each step: its reward and `gamma` times the next step's return."""
    returns = np.asarray(rewards, dtype=np.float64).copy()
    for step in range(len(returns) - 2, -1, -1):
        returns[step] += gamma * returns[step + 1]
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[object]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[np.ndarray]:
    """The returns (discounted by `gamma`, if given) of rewards normalised over all steps of all trajectories.

    Raises ValueError when their standard deviation is below `std_tol`.
    """
    stats = compute_stats(rewards)
    deviation = stats["var"] ** 0.5
    if deviation < std_tol:
        raise ValueError(
            f"the rewards' standard deviation {deviation:g} is below std_tol {std_tol:g}: they do not differ enough"
        )
    return [
        compute_discounted_returns(
            (np.asarray(trajectory, dtype=np.float64) - stats["mean"]) / deviation, 1.0 if gamma is None else gamma
        )
        for trajectory in rewards
    ]


def _numbers(data: object) -> Iterator[float]:
    if isinstance(data, (int, float)):
        yield data
    elif isinstance(data, (list, tuple, np.ndarray)):
        for entry in data:
            yield from _numbers(entry)
    else:
        raise ValueError(f"expected numbers and lists of them, found {data!r}")
