"""`get_std_min_max_avg`: statistics of a list as metrics."""

from collections.abc import Sequence

import numpy as np


def get_std_min_max_avg(name: str, data: Sequence[float], metrics_dict: dict[str, object]) -> dict[str, object]:
    """`metrics_dict` itself, with `<name>_mean`, `_std` (of the population), `_max` and `_min` of `data` added.

    Without data there is nothing to add.
    """
    if len(data):
        values = np.asarray(data, dtype=float)
        for statistic in ("mean", "std", "max", "min"):
            metrics_dict[f"{name}_{statistic}"] = float(getattr(values, statistic)())
    return metrics_dict
