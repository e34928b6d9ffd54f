"""A metric knows how it adds up: over chunks of tokens, ranks, parts of a batch and the updates of a step."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.loss.base import as_metrics
from example_trainer.loss.metric import Metric, Metrics, added, divided, of_updates, over_ranks, values
from example_trainer.ranks.ranks import ALONE

FLOATS = st.integers(-1000, 1000).map(lambda number: number / 8)  # which add up exactly
Tokens = list[tuple[float, bool]]  # of each its value, and whether that is known
COLUMNS = st.lists(st.tuples(FLOATS, st.booleans()), min_size=1, max_size=12)
UNKNOWN = Metric("mean", 0.0, weight=0.0)


def measured(tokens: Tokens) -> Metrics:
    """Each kind of metric, of these tokens."""
    column, known = torch.tensor([value for value, _ in tokens]), torch.tensor([known for _, known in tokens])
    return {
        "sum": Metric.sum(column),
        "mean": Metric.mean(column),
        "max": Metric.max(column),
        "known_mean": Metric.mean(column, known, over_updates="first"),
        "known_max": Metric.max(column, known, over_updates="first"),
    }


@given(COLUMNS, st.data())
def test_the_figures_are_those_of_all_tokens_however_they_are_cut(tokens: Tokens, data: Any) -> None:
    cut = data.draw(st.integers(1, len(tokens)))
    whole = values(over_ranks(measured(tokens), ALONE))
    parts = [measured(part) for part in (tokens[:cut], tokens[cut:]) if part]
    assert values(over_ranks(added(parts), ALONE)) == whole  # chunks, on the device
    assert values(added(over_ranks(part, ALONE) for part in parts)) == whole  # parts of a batch, as numbers
    known = [value for value, is_known in tokens if is_known]
    assert whole == {
        "sum": sum(value for value, _ in tokens),
        "mean": sum(value for value, _ in tokens) / len(tokens),
        "max": max(value for value, _ in tokens),
        "known_mean": sum(known) / len(known) if known else None,
        "known_max": max(known) if known else None,
    }


@given(COLUMNS, COLUMNS)
def test_what_does_not_count_changes_nothing(tokens: Tokens, others: Tokens) -> None:
    """A rank that has no sequence left repeats one, whose numbers may be anything."""
    nothing = {name: metric.nothing() for name, metric in measured([*others, (float("nan"), True)]).items()}
    whole = values(over_ranks(measured(tokens), ALONE))
    for order in ([nothing, measured(tokens)], [measured(tokens), nothing]):
        assert values(over_ranks(added(order), ALONE)) == whole


def test_only_sums_are_divided_by_the_divisor_of_the_losses() -> None:
    metrics = over_ranks(measured([(1.0, True), (3.0, True)]), ALONE)
    expected = {"sum": 1.0, "mean": 2.0, "max": 3.0, "known_mean": 2.0, "known_max": 3.0}
    assert values(divided(metrics, 4.0)) == expected


def test_a_step_of_several_updates_has_means_the_largest_or_the_first_figure() -> None:
    first = {
        "loss": Metric("sum", 1.0),
        "entropy": Metric("mean", 8.0, weight=4.0),
        "ratio_max": Metric("max", 3.0, over_updates="max"),
        "sampler_kl": Metric("mean", 0.2, over_updates="first"),
        "kl": UNKNOWN,
        "late": UNKNOWN,
        "late_max": Metric("max", 9.0, weight=0.0, over_updates="max"),
        "first_known": Metric("mean", 0.0, weight=0.0, over_updates="first"),
    }
    later = {
        "loss": Metric("sum", 2.0),
        "entropy": Metric("mean", 6.0, weight=1.0),  # of fewer tokens, and yet as much
        "ratio_max": Metric("max", 2.0, over_updates="max"),
        "sampler_kl": Metric("mean", 0.4, over_updates="first"),
        "kl": UNKNOWN,
        "late": Metric("mean", 5.0),
        "late_max": Metric("max", -5.0, over_updates="max"),
        "first_known": Metric("mean", 7.0, over_updates="first"),
    }
    expected = {"loss": 1.5, "entropy": 4.0, "ratio_max": 3.0, "sampler_kl": 0.2, "kl": None}
    assert values(of_updates([first, later])) == expected | {"late": 5.0, "late_max": -5.0, "first_known": 7.0}
    assert values(of_updates([first])) == values(first)
    assert of_updates([]) == {}


def test_two_kinds_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="a mean and a max do not add up"):
        Metric("mean", 1.0) + Metric("max", 1.0)
    with pytest.raises(ValueError, match="do not add up"):
        Metric("mean", 1.0) + Metric("mean", 1.0, over_updates="first")


def test_the_name_of_an_objectives_own_tensor_says_how_it_adds_up_and_a_metric_has_its_own_reducer() -> None:
    column = torch.tensor([1.0, 2.0, 6.0])
    own: dict[str, Metric | torch.Tensor] = {
        "drift": column,
        "drift_max": column,
        "gap_max": Metric.mean(column),
        "clipped": column > 1,
    }
    assert values(as_metrics(own)) == {"drift": 3.0, "drift_max": 6.0, "gap_max": 3.0, "clipped": pytest.approx(2 / 3)}


def test_a_metric_keeps_no_graph() -> None:
    column = torch.ones(2, requires_grad=True)
    for metric in (Metric.sum(column), Metric.mean(column), Metric.max(column, column > 0)):
        assert isinstance(metric.total, torch.Tensor)
        assert not metric.total.requires_grad
