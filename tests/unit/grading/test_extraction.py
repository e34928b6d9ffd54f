import pytest

from atroposlib.grading import after_thoughts, extract_boxed, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12.", "12"),
        ("6 + 1,234 = 1,240.", "1240"),
        ("3 - 5 = -2", "-2"),
        ("3-4", "4"),
        ("from 3 to -4", "-4"),
        ("0.50", "0.50"),
        ("1,2", "2"),
        ("12,3456", "3456"),
        ("(2)-1", "1"),
        ("1\u20445", None),
        ("1\u22155", None),
        ("2**3", None),
        ("2**{-3", None),
        ("1'000", None),
        ("1\u2009000", None),
        ("3 4", "4"),
        ("", None),
        ("no digits, only - and .", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{3} and \boxed{cut of", "3"),
        (r"\boxed{cut of", None),
        (r"\boxed{}", None),
        ("5", None),
    ],
)
def test_extract_boxed(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("7", "7"),
        ("<think>8</think> 7", " 7"),
        ("8</think>7", "7"),  # the template opened them
        ("<think>7", None),
        ("<think>8</think>7<think>9", None),
        ("<think>8</think><think>9</think>7", "7"),
        ("", ""),
    ],
)
def test_after_thoughts(text: str, said: str | None) -> None:
    assert after_thoughts(text) == said
