"""Held-out accuracy: the mean over environments, and its standard error."""

import math

import pytest

from atroposlib.wire.held_out import HeldOut, held_out, standard_error

Result = tuple[float | None, dict[str, float]]


@pytest.mark.parametrize(("right", "questions"), [(64, 64), (0, 64), (32, 64), (63, 64), (1, 1), (700, 1319)])
def test_the_standard_error_is_half_of_wilsons_interval(right: int, questions: int) -> None:
    """The interval's ends are where a true share p is one standard deviation from what was seen."""
    share = right / questions
    error = standard_error(share, questions)
    centre = (right + 0.5) / (questions + 1)
    for end in (centre - error, centre + error):
        assert (share - end) ** 2 == pytest.approx(end * (1 - end) / questions, abs=1e-12)
    assert error > 0


def result(accuracy: float | None, **metrics: float) -> Result:
    return accuracy, metrics


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([], None),
        ([result(None, total=64.0)], None),
        ([result(0.75)], HeldOut(0.75)),  # of an environment that counts nothing
        ([result(0.5, total=64.0)], HeldOut(0.5, standard_error(0.5, 64), 64)),
        ([result(0.5, total=64.0), result(1.0)], HeldOut(0.75)),
        # of environments whose accuracy is no share of right answers: percent, a mean score, a count of no use
        ([result(75.0, total=64.0)], HeldOut(75.0)),
        ([result(-0.25, total=8.0), result(0.75, total=8.0)], HeldOut(0.25)),
        ([result(0.5, total=-1.0)], HeldOut(0.5)),
        # numbers whose sum is not finite: each could be posted, and together they ended the trainer
        ([result(1.7e308), result(1.7e308), result(0.5)], HeldOut(0.5)),
        ([result(0.5, final_accuracy=1.7e308), result(1.0, final_accuracy=1.7e308)], HeldOut(0.75)),
        (
            [result(0.5, final_accuracy=0.75, final_total=256.0), result(1.0)],
            HeldOut(0.75, final=HeldOut(0.75, standard_error(0.75, 256), 256)),
        ),
        (
            [result(0.5, total=64.0), result(1.0, total=16.0), result(None, total=8.0)],
            HeldOut(0.75, math.hypot(standard_error(0.5, 64), standard_error(1.0, 16)) / 2, 80),
        ),
    ],
)
def test_the_results_of_environments_are_averaged_with_their_errors(
    results: list[Result], expected: HeldOut | None
) -> None:
    found = held_out(results)
    assert (found and (found.accuracy, found.questions)) == (expected and (expected.accuracy, expected.questions))
    assert (found and found.stderr) == pytest.approx(expected and expected.stderr)
    assert (found and found.final) == (expected and expected.final)
