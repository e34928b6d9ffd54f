"""Held-out accuracy by policy version: before training, at its best, and at the end."""

from collections.abc import Sequence
from typing import NamedTuple

from atroposlib.view.run_data.metric_rows import finite_number

Row = dict[str, object]


class Evaluated(NamedTuple):
    """A policy version and its accuracy, 0 to 1."""

    version: int
    accuracy: float


def by_version(rows: Sequence[Row]) -> list[Evaluated]:
    """Return the versions in their order; several environments count as their mean, as in metrics.jsonl."""
    found: dict[int, list[float]] = {}
    for row in rows:
        accuracy, version = finite_number(row.get("accuracy")), finite_number(row.get("policy_version"))
        if accuracy is not None and version is not None:
            found.setdefault(int(version), []).append(float(accuracy))
    return [Evaluated(version, sum(each) / len(each)) for version, each in sorted(found.items())]


def by_environment(rows: Sequence[Row]) -> dict[str, list[Evaluated]]:
    """Return the versions of each environment, by its name."""
    names = sorted({str(row.get("env") or "") for row in rows})
    found = {name: by_version([row for row in rows if str(row.get("env") or "") == name]) for name in names}
    return {name: versions for name, versions in found.items() if versions}


def best_of(rows: Sequence[Row]) -> dict[str, object]:
    """Return the best of the trained policies; of equal ones the first."""
    trained = [each for each in by_version(rows) if each.version > 0]
    return max(trained, key=lambda each: each.accuracy)._asdict() if trained else {"accuracy": None, "version": None}
