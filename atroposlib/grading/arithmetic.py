"""Arithmetic on numbers as people write it: parsed and computed exactly, never handed to `eval`.

expression = term (("+" | "-") term)*
term       = factor (("*" | "/") factor)*
factor     = number | "-" factor | "(" expression ")"
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 500
MAX_DEPTH = 50
TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?)|(?P<symbol>[-+*/()]))")
SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*", "[": "(", "]": ")"})


class ExpressionError(ValueError):
    """The text is not arithmetic expression, or has no value."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The value of an expression, and the numbers that stand in it, in order."""

    value: Fraction
    numbers: tuple[Fraction, ...]


def compute(text: str) -> Computed:
    """The exact value of `text`. Raises ExpressionError for anything but numbers, + - * / and brackets, and for a
    division by zero.
    """
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"{len(text)} characters; at most {MAX_CHARS} are read")
    parser = _Parser(_tokens(text.translate(SPELLINGS)))
    value = parser.expression(0)
    if parser.next is not None:
        raise ExpressionError(f"{parser.next!r} is not expected here")
    return Computed(value, tuple(parser.numbers))


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    text = text.rstrip()
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"{text[position:].strip()[:20]!r} is not arithmetic")
        tokens.append(match["number"] or match["symbol"])
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._rest = tokens[::-1]
        self.numbers: list[Fraction] = []

    @property
    def next(self) -> str | None:
        return self._rest[-1] if self._rest else None

    def expression(self, depth: int) -> Fraction:
        value = self._term(depth)
        while self.next in ("+", "-"):
            value += self._term(depth) if self._rest.pop() == "+" else -self._term(depth)
        return value

    def _term(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.next in ("*", "/"):
            if self._rest.pop() == "*":
                value *= self._factor(depth)
                continue
            divisor = self._factor(depth)
            if divisor == 0:
                raise ExpressionError("division by zero")
            value /= divisor
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"more than {MAX_DEPTH} nested brackets or signs")
        token = self._rest.pop() if self._rest else "the end"
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self.expression(depth + 1)
            if not self._rest or self._rest.pop() != ")":
                raise ExpressionError("a bracket is not closed")
            return value
        if not token[0].isdecimal():
            raise ExpressionError(f"a number is missing before {token!r}")
        self.numbers.append(Fraction(token))
        return self.numbers[-1]
