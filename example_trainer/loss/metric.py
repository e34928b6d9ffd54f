"""What is measured while a batch is trained on: a value that knows how it adds up with others of its name.

    chunk ─┐
    chunk ─┼─▶ micro-batch ─▶ rank ─▶ part of the batch ─▶ update ─▶ step's row of metrics.jsonl
    chunk ─┘        everywhere by the same `added`                   (`of_updates`, then `values`)

A new metric is one line where it is computed: `"entropy": Metric.mean(entropy)`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from example_trainer.ranks.ranks import Ranks

Reducer = Literal["sum", "mean", "max", "first"]
Number = float | Tensor  # a tensor has one element, and stays on its device until `over_ranks`


@dataclass(frozen=True)
class Metric:
    """A measured value and its reducer. `total` is the sum of what was measured, or the largest or the first of it.
    `weight` is how much was measured, 0 for nothing; a mean divides by it.

    Over the updates of one step, the values of the updates are reduced as `over_updates` says.
    """

    reducer: Reducer
    total: Number
    weight: Number = 1.0
    over_updates: Reducer = "mean"

    @classmethod
    def sum(cls, values: Tensor) -> "Metric":
        """Sum weighted values of tokens: a share of the loss, which `divided` makes the batch's weighted mean."""
        return cls("sum", values.detach().sum().float(), len(values))

    @classmethod
    def mean(cls, values: Tensor, known: Tensor | None = None, *, over_updates: Reducer = "mean") -> "Metric":
        """Average over the tokens, or over those whose value is `known`."""
        values, weight = _known(values, known, 0.0)
        return cls("mean", values.sum().float(), weight, over_updates)

    @classmethod
    def max(cls, values: Tensor, known: Tensor | None = None, *, over_updates: Reducer = "max") -> "Metric":
        """Keep the largest value of the tokens, or of those whose value is `known`."""
        values, weight = _known(values, known, -torch.inf)
        return cls("max", values.max(), weight, over_updates)

    @property
    def value(self) -> float | None:
        """Return the number; None where nothing was measured."""
        if self.reducer == "sum":
            return float(self.total)
        if not self.weight:
            return None
        return float(self.total / self.weight if self.reducer == "mean" else self.total)

    def __add__(self, other: "Metric") -> "Metric":
        if (self.reducer, self.over_updates) != (other.reducer, other.over_updates):
            raise ValueError(f"a {self.reducer} and a {other.reducer} do not add up: {self}, {other}")
        if self.reducer == "first":
            return self if self.weight else other
        total = _larger(self.total, other.total) if self.reducer == "max" else self.total + other.total
        return Metric(self.reducer, total, self.weight + other.weight, self.over_updates)

    def nothing(self) -> "Metric":
        """Return the same metric of no token at all, which changes none that it is added to."""
        none = torch.full_like(torch.as_tensor(self.total), _nothing(self.reducer), dtype=torch.float32)
        return replace(self, total=none, weight=0.0)

    def of_update(self) -> "Metric":
        """Return the number as a step counts it, in which each update counts as much as any other."""
        if self.value is None:
            return Metric(self.over_updates, _nothing(self.over_updates), 0.0)
        return Metric(self.over_updates, self.value)


Metrics = Mapping[str, Metric]


def added(measured: Iterable[Metrics]) -> dict[str, Metric]:
    """Add up metrics by their names, in the order given. Of a name that some do not have, the others count."""
    sums: dict[str, Metric] = {}
    for metrics in measured:
        for name, metric in metrics.items():
            sums[name] = sums[name] + metric if name in sums else metric
    return sums


def over_ranks(mine: Metrics, ranks: Ranks) -> dict[str, Metric]:
    """Add up what the ranks measured of their shares of a batch, as numbers. All of them call this, with the same
    names; all get the result.
    """
    numbers = [number for metric in mine.values() for number in (metric.total, metric.weight)]
    device = next((number.device for number in numbers if isinstance(number, Tensor)), None)
    column = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
    of_ranks = ranks.rows(column).view(ranks.size, len(mine), 2).tolist()
    of_shares = of_ranks[:: ranks.size // ranks.shares]  # ranks along "tp" measure the same
    return added(
        {
            name: replace(metric, total=total, weight=weight)
            for (name, metric), (total, weight) in zip(mine.items(), pairs, strict=True)
        }
        for pairs in of_shares
    )


def divided(metrics: Metrics, divisor: float) -> dict[str, Metric]:
    """Divide the sums by the divisor of a batch's losses; the others have their own weights."""
    return {
        name: replace(metric, total=metric.total / divisor) if metric.reducer == "sum" else metric
        for name, metric in metrics.items()
    }


def of_updates(updates: Iterable[Metrics]) -> dict[str, Metric]:
    """Add up the metrics of a step's updates."""
    return added({name: metric.of_update() for name, metric in metrics.items()} for metrics in updates)


def values(metrics: Metrics) -> dict[str, float | None]:
    """Return the numbers, None where nothing was measured."""
    return {name: metric.value for name, metric in metrics.items()}


def _known(values: Tensor, known: Tensor | None, otherwise: float) -> tuple[Tensor, Number]:
    values = values.detach()
    return (values, len(values)) if known is None else (torch.where(known, values, otherwise), known.sum())


def _nothing(reducer: Reducer) -> float:
    return -torch.inf if reducer == "max" else 0.0


def _larger(one: Number, other: Number) -> Number:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.maximum(one, other)
    return max(float(one), float(other))
