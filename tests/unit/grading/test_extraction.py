import pytest

from atroposlib.grading import after_thoughts, extract_boxed, extract_tagged, last_number, last_number_is


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12.", "12"),
        ("6 + 1,234 = 1,240.", "1240"),
        ("3 - 5 = -2", "-2"),
        ("3-4", "4"),
        ("from 3 to -4", "-4"),
        ("0.50", "0.50"),
        (".5", "0.5"),
        ("It costs $.50.", "0.50"),
        ("-.5", "-0.5"),
        ("-$.50", "-0.50"),
        ("3 - .5 = **2.5** or (.5)", "0.5"),
        ("**.5**", "0.5"),
        ("x=.25", "0.25"),
        ("3-.5", "0.5"),
        ("at the end.5 apples", "5"),
        ("(see above).5 apples", "5"),
        ("he said “no”.5 apples", "5"),
        ('{"answer":".5"}', "0.5"),
        ("answer:.5", "0.5"),
        ("(1,.5)", "0.5"),
        ("wait...5", "5"),
        ("so 3.5", "3.5"),
        ("1/.5", None),
        ("2^.5", None),
        ("2^-.5", None),
        (".5.5", None),
        (".\u0665", None),
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


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>5</answer> so </answer>", "5"),
        ("<answer>4</answer> no <answer>5</answer></answer></answer>", "5"),
        ("<answer>4</answer> no <answer>5", "4"),
        ("<answer>4 or <answer>5</answer>", "5"),
        ("</answer><answer>5</answer>", "5"),
        ("<answer></answer> 5</answer>", None),
        ("<answer>5", None),
        ("5</answer>", None),
    ],
)
def test_extract_tagged(text: str, content: str | None) -> None:
    assert extract_tagged(text) == content


@pytest.mark.parametrize(
    ("text", "known", "equal"),
    [
        ("It costs 5 + 7.50 = $12.50.", "12.5", True),
        ("240.00", "240", True),
        ("240", "240.0", True),
        ("1,234", "1234", True),
        ("18", "18 km", True),
        ("12.51", "12.5", False),
        ("4, or 5", "4", False),
        ("1e5", "5", False),
        ("Paris", "Paris", False),
        ("4", "Paris", False),
    ],
)
def test_the_last_number_is_compared_by_its_value(text: str, known: str, equal: bool) -> None:
    assert last_number_is(text, known) is equal
