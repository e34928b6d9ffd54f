"""What of an answer is evaluated as Python, once it has been read as mathematics."""

import ast

import pytest

from atroposlib.child_processes.evaluated_answers import forbidden_syntax

NAMES = frozenset({"Symbol", "sqrt"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sqrt(2) + 1", None),
        ("Symbol('x')", "a call of Symbol is not part of this task's mathematics"),
        ("sqrt(Symbol('x'))", "a call of Symbol is not part of this task's mathematics"),
        ("exp(2)", "a call of exp is not part of this task's mathematics"),
        ("sqrt(x=2)", "a call of sqrt is not part of this task's mathematics"),
        ("sqrt.real", "Attribute is not mathematics"),
        ("(lambda: 1)", "Lambda is not mathematics"),
    ],
)
def test_only_the_task_s_own_functions_are_called(text: str, reason: str | None) -> None:
    assert forbidden_syntax(ast.walk(ast.parse(text, mode="eval")), NAMES) == reason
