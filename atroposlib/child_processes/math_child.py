r"""The process in which math-verify runs, for `grader.Grader`; see `loop.py` for its protocol and limits.

{"id": 3, "gold": "18", "answer": "\\frac{36}{2}", "time_limit_s": 5.0}  ──▶  {"id": 3, "verdict": "right"}

math-verify reads both texts and decides whether they are equal. Around it stand two things. `solutions` makes one form
of what it keeps apart: inequalities and intervals, "x = 1 or x = 2" and "1, 2". `numbers_agree` looks again at what it
calls equal, since it takes differences below 1e-15 for nothing.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from atroposlib.child_processes.loop import answer_requests

WORDS = r"\\(?:text[a-z]*|mathrm|mbox)\s*\{[^{}]*"
CHOICE = re.compile(
    rf"\\(?:lor|vee)(?![A-Za-z])|\\text\s*\{{\s*not\b|{WORDS}\bor\b|(?<![A-Za-z\\])(?:or|not)(?![A-Za-z])"
)
WORDS_OR_UNIT = re.compile(WORDS + r"\}(?:\s*\^\s*\{?\s*-?\d+\s*\}?)?")  # with its exponent: \text{cm}^2
UNION = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])")
INTERSECTION = re.compile(r"(?<![A-Za-z\\])and(?![A-Za-z])")
EXACT_APART = 1e-12  # relative, of values without decimals; sympy evaluates them to 30 digits
DECIMALS_APART = 5e-7  # of values with decimals, and of tiny ones at most this part of them:
TINY_APART = 1e-3


def judge(gold_text: str, answer_text: str) -> dict[str, object]:
    """The verdict on `answer_text`: right, wrong, unparseable, or grader_failed with a reason."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # units=False: `at_once` has taken them away, and math-verify would take the t of 18t for one
    spellings = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    extraction = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=spellings)]

    def read(text: str, mode: str) -> list[Any]:
        parsed = parse(f"\\boxed{{{text}}}", extraction_config=extraction, extraction_mode=mode, parsing_timeout=None)
        # The texts that math-verify adds to the expressions would match by spelling alone.
        return [_with_real_symbols(expression) for expression in parsed if not isinstance(expression, str)]

    gold = read(gold_text, "any_match")
    if not gold:
        return {"verdict": "grader_failed", "reason": f"the known answer {gold_text!r} is not mathematics"}
    # All of the answer or nothing: "any_match" takes the last fraction out of a text that cannot be read as a whole.
    answer = read(answer_text, "first_match")
    if not answer:
        return {"verdict": "unparseable"}
    known, given = _member_of(gold[0]), _member_of(answer[0])
    known, given = solutions(known, gold_text, given), solutions(given, answer_text, known)
    if _is_range_and_list(known, given) or _is_range_and_list(given, known):
        return {"verdict": "wrong"}
    if known is not gold[0] or given is not answer[0]:
        gold, answer = [known, *gold], [given]
    equal = verify(gold, answer, timeout_seconds=None, raise_on_error=True)
    several = _is_set(given) and any(_is_set(each) for each in gold)
    if not equal or (not several and _offers_choice(answer_text) and not _offers_choice(gold_text)):
        return {"verdict": "wrong"}
    if not any(numbers_agree(each, given) for each in gold):
        return {"verdict": "wrong"}
    if _equations(gold) or several:
        return {"verdict": "right"}
    # Of a chain math-verify compares the last part alone, and drops what follows an "about" sign.
    chain = answer_text.replace(r"\approx", "=").replace("≈", "=")
    equations = _equations(answer if chain == answer_text else read(chain, "first_match"))
    return {"verdict": "right" if all(_is_consistent(each.lhs, each.rhs, verify) for each in equations) else "wrong"}


def _with_real_symbols(statement: Any) -> Any:
    """Return `statement` with real variables: math-verify has others where an i stands alone, as in 3 + 2 i, and then
    it is not 3 + 2i.
    """
    from sympy import Symbol

    others = [symbol for symbol in getattr(statement, "free_symbols", ()) if symbol.is_real is False]
    return statement.xreplace({symbol: Symbol(symbol.name, real=True) for symbol in others}) if others else statement


def solutions(statement: Any, text: str, other: object) -> object:
    """The set that `statement` describes, where it is compared with another way to write one; else itself.

    x < 3 is (-oo, 3), and "x = -1 or x = 5" and "x_1 = -1, x_2 = 5" are {-1, 5}.
    """
    from sympy import Basic, Eq, FiniteSet, Set, Symbol

    parts = list(statement.args) if isinstance(statement, FiniteSet) else [statement]
    if len(parts) > 1 and all(isinstance(part, Eq) and isinstance(part.lhs, Symbol) for part in parts):
        if len({part.lhs.name.split("_")[0] for part in parts}) == 1 and not _has_type(other, Eq):
            return FiniteSet(*(part.rhs for part in parts))
        return statement
    ranges = [found for part in parts if (found := _range(part)) is not None]
    if len(ranges) < len(parts) or len({name for name, _ in ranges}) != 1:
        return statement
    name = ranges[0][0]
    both = _range(other) if isinstance(other, Basic) and not isinstance(other, FiniteSet) else None
    if (not isinstance(other, Set) or isinstance(other, FiniteSet)) and (both is None or both[0] != name):
        return statement
    return _joined([found for _, found in ranges], text)


def _member_of(statement: Any) -> object:
    """The set in "x in [2, 5]" and "x = 1, 2", which math-verify reads as equations; else `statement` itself."""
    from sympy import Eq, Symbol

    named = isinstance(statement, Eq) and isinstance(statement.lhs, Symbol) and _is_set(statement.rhs)
    return statement.rhs if named else statement


def numbers_agree(first: object, second: object) -> bool:
    """Return whether each number of one statement is near one of the other.

    Near is relative to its size: 1/20! is not 1/21!.
    """
    ours, theirs = _numbers(first), _numbers(second)
    if ours is None or theirs is None:
        return True
    return all(any(_near(one, two) for two in theirs) for one in ours) and all(
        any(_near(one, two) for one in ours) for two in theirs
    )


def _numbers(statement: object) -> list[object] | None:
    """The values that `statement` consists of; None where it has variables or percent signs."""
    from sympy import Eq, Expr, FiniteSet, Interval, MatrixBase, Symbol, Tuple, UnevaluatedExpr

    if isinstance(statement, (FiniteSet, Tuple)):
        parts = list(statement.args)
    elif isinstance(statement, Interval):
        parts = [statement.start, statement.end]
    elif isinstance(statement, MatrixBase):
        parts = list(statement)
    elif isinstance(statement, Eq) and isinstance(statement.lhs, Symbol):
        parts = [statement.rhs]
    elif isinstance(statement, Expr) and not statement.free_symbols and not statement.has(UnevaluatedExpr):
        return [statement]
    else:
        return None
    numbers = [_numbers(part) for part in parts]
    return None if any(each is None for each in numbers) else [value for each in numbers for value in each or ()]


def _near(first: Any, second: Any) -> bool:
    from sympy import Float

    if first == second:
        return True
    one, two = first.evalf(30), second.evalf(30)
    if not (one.is_number and two.is_number) or one.is_finite is False or two.is_finite is False:
        return bool(one == two)
    apart, larger = abs(one - two), max(abs(one), abs(two))
    if first.is_zero or second.is_zero or not one or not two:
        return (second if first.is_zero or not one else first).equals(0) is not False
    if first.has(Float) or second.has(Float):
        return bool(apart <= DECIMALS_APART + EXACT_APART * larger and apart <= TINY_APART * larger)
    return bool(apart <= EXACT_APART * larger)


def _range(statement: Any) -> tuple[str, object] | None:
    """The variable and the real numbers that an inequality of one variable leaves it, such as 2 <= x < 5."""
    from sympy import And, Intersection, Interval, Ne, Symbol, oo
    from sympy.core.relational import Relational

    if isinstance(statement, And):
        parts = [found for part in statement.args if (found := _range(part)) is not None]
        if len(parts) < len(statement.args) or len({name for name, _ in parts}) != 1:
            return None
        return parts[0][0], Intersection(*(found for _, found in parts))
    if not isinstance(statement, Relational):
        return None
    if isinstance(statement.rhs, Symbol) and not statement.lhs.free_symbols:
        statement = statement.reversed
    if not isinstance(statement.lhs, Symbol) or statement.rhs.free_symbols or not statement.rhs.is_extended_real:
        return None
    name, bound = statement.lhs.name, statement.rhs
    if isinstance(statement, Ne):
        return name, Interval.open(-oo, bound).union(Interval.open(bound, oo))
    sides = {
        "<": Interval.open(-oo, bound),
        "<=": Interval(-oo, bound),
        ">": Interval.open(bound, oo),
        ">=": Interval(bound, oo),
    }
    return (name, sides[statement.rel_op]) if statement.rel_op in sides else None


def _is_range_and_list(one: object, other: object) -> bool:
    """Return whether these are 2 < x < 5 and {2, 5}, which math-verify calls equal, as (2, 5) may be a pair."""
    from sympy import FiniteSet

    return isinstance(other, FiniteSet) and _range(one) is not None


def _joined(ranges: Sequence[object], text: str) -> object:
    """Unite what "or" joins, and intersect what "and" joins; behind a comma, take the one that leaves something."""
    from sympy import EmptySet, Intersection, Union

    if UNION.search(text):
        return Union(*ranges)
    both = Intersection(*ranges)
    return Union(*ranges) if both == EmptySet and not INTERSECTION.search(text) else both


def _is_set(statement: object) -> bool:
    from sympy import Set

    return isinstance(statement, Set)


def _has_type(statement: object, kind: object) -> bool:
    from sympy import Basic

    return isinstance(statement, Basic) and statement.has(kind)


def _offers_choice(text: str) -> bool:
    """Return whether `text` gives one variable two values or connects two answers, or a word stands between numbers."""
    names = re.findall(r"([A-Za-z])\s*(?:=|≈|\\approx)", text)
    numbered = [part for part in WORDS_OR_UNIT.split(text) if re.search(r"\d", part)]
    return len(names) > len(set(names)) or CHOICE.search(text) is not None or len(numbered) > 1


def _equations(statements: Sequence[object]) -> list[Any]:
    from sympy import Basic, Eq

    return [each for statement in statements if isinstance(statement, Basic) for each in statement.find(Eq)]


def _is_consistent(left: object, right: object, verify: Callable[..., object]) -> bool:
    """Return whether `left = right` can state `right`.

    y = 18, x + y = 18 and 17 + 1 = 18 can; 17 = 18, x^2 = x^3 and 2x = 18, x + 1 = 18, x^2 = 18, which are to be
    solved, cannot.
    """
    from sympy import Add, Expr, Mul, Pow
    from sympy.core.function import AppliedUndef

    if not isinstance(left, Expr) or not isinstance(right, Expr) or isinstance(left, AppliedUndef) or left.is_Symbol:
        return True
    if not left.free_symbols and not right.free_symbols:
        with suppress(TypeError):  # of percent signs and matrices, which are compared below
            first, second = complex(left.evalf()), complex(right.evalf())
            return abs(first - second) <= 0.01 * max(abs(first), abs(second))
    if left.free_symbols <= right.free_symbols:
        return bool(verify(left, right, timeout_seconds=None, raise_on_error=True))
    return not (isinstance(left, (Add, Mul, Pow)) and any(part.is_number for part in left.args))


def answer(request: dict[str, Any]) -> dict[str, object]:
    """The verdict; whatever math-verify raises is that answer's `grader_failed`, and the next one is judged as
    usual.
    """
    try:
        return judge(request["gold"], request["answer"])
    except Exception as error:
        return {"verdict": "grader_failed", "reason": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    judge("1", "1")  # compiles math-verify's patterns before the first clock runs
    answer_requests(answer)
