r"""The process in which math-verify runs, for `grader.Grader`; see `loop.py` for its protocol and limits.

{"id": 3, "gold": "18", "answer": "\\frac{36}{2}", "time_limit_s": 5.0}  ──▶  {"id": 3, "verdict": "right"}
"""

import re
from typing import Any

from atroposlib.child_processes.loop import answer_requests

WORDS = r"\\(?:text[a-z]*|mathrm|mbox)\s*\{[^{}]*"
CHOICE = re.compile(rf"\\(?:lor|vee)(?![A-Za-z])|\\text\s*\{{\s*not\b|{WORDS}\bor\b")
WORDS_OR_UNIT = re.compile(WORDS + r"\}(?:\s*\^\s*\{?\s*-?\d+\s*\}?)?")  # with its exponent: \text{cm}^2


def judge(gold_text: str, answer_text: str) -> dict[str, Any]:
    """The verdict on `answer_text`: right, wrong, unparseable, or grader_failed with a reason."""
    from math_verify import LatexExtractionConfig, parse, verify

    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str, mode: str) -> list[Any]:
        found = parse(f"\\boxed{{{text}}}", extraction_config=extraction, extraction_mode=mode, parsing_timeout=None)
        # The texts that math-verify adds to the expressions would match by spelling alone.
        return [expression for expression in found if not isinstance(expression, str)]

    gold = read(gold_text, "any_match")
    if not gold:
        return {"verdict": "grader_failed", "reason": f"the known answer {gold_text!r} is not mathematics"}
    # All of the answer or nothing: "any_match" takes the last fraction out of a text that cannot be read as a whole.
    answer = read(answer_text, "first_match")
    if not answer:
        return {"verdict": "unparseable"}
    equal = verify(gold, answer, timeout_seconds=None, raise_on_error=True)
    if not equal or (_offers_choice(answer_text) and not _offers_choice(gold_text)):
        return {"verdict": "wrong"}
    if _equations(gold):
        return {"verdict": "right"}
    # Of a chain math-verify compares the last part alone, and drops what follows an "about" sign.
    chain = answer_text.replace(r"\approx", "=").replace("≈", "=")
    equations = _equations(answer if chain == answer_text else read(chain, "first_match"))
    return {"verdict": "right" if all(_is_consistent(each.lhs, each.rhs, verify) for each in equations) else "wrong"}


def _offers_choice(text: str) -> bool:
    """Whether `text` gives one variable two values, connects two answers, or has numbers before and after a word."""
    names = re.findall(r"([A-Za-z])\s*(?:=|≈|\\approx)", text)
    numbered = [part for part in WORDS_OR_UNIT.split(text) if re.search(r"\d", part)]
    return len(names) > len(set(names)) or CHOICE.search(text) is not None or len(numbered) > 1


def _equations(statements: list[Any]) -> list[Any]:
    from sympy import Basic, Eq

    return [each for statement in statements if isinstance(statement, Basic) for each in statement.find(Eq)]


def _is_consistent(left: Any, right: Any, verify: Any) -> bool:
    """Whether `left = right` can state `right`: y = 18 and 17 + 1 = 18 can; 17 = 18, 2x = 18 and x^2 = x^3 cannot."""
    from sympy import Expr, Mul
    from sympy.core.function import AppliedUndef

    if not isinstance(left, Expr) or not isinstance(right, Expr) or isinstance(left, AppliedUndef) or left.is_Symbol:
        return True
    if not left.free_symbols and not right.free_symbols:
        first, second = complex(left.evalf()), complex(right.evalf())
        return abs(first - second) <= 0.01 * max(abs(first), abs(second))
    if left.free_symbols <= right.free_symbols:
        return bool(verify(left, right, timeout_seconds=None, raise_on_error=True))
    return not (isinstance(left, Mul) and any(factor.is_number for factor in left.args))


def answer(request: dict[str, Any]) -> dict[str, Any]:
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
