from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.grading.arithmetic import ExpressionError, compute


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("8 / 4 / 2", 1),
        ("1 - 2 - 3", -4),
        ("-(2 + 3) * -2", 10),
        ("1/3 + 1/6", Fraction(1, 2)),
        ("0.5 × 4 − 1", 1),
        ("6 ÷ 3", 2),
    ],
)
def test_value_is_exact(text: str, value: Fraction) -> None:
    assert compute(text).value == value


@pytest.mark.parametrize(
    "text",
    ["", "1 +", "(1", "1)", "1 2", "2 ** 3", "1 / 0", "a + 1", "1e9", "+1", "1" * 600, "(" * 200 + "1" + ")" * 200],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        compute(text)


def test_numbers_are_listed_in_order() -> None:
    assert list(map(int, compute("3 * (4 - 3)").numbers)) == [3, 4, 3]


@given(st.text(alphabet="0123456789+-*/(). ", max_size=30))
def test_whatever_is_written_is_a_value_or_an_expression_error(text: str) -> None:
    try:
        result = compute(text)
    except ExpressionError:
        return
    assert isinstance(result.value, Fraction)
    assert result.numbers
