r"""The process in which math-verify runs, for `grader.Grader`; see `loop.py` for its protocol and limits.

{"id": 3, "gold": "18", "answer": "\\frac{36}{2}", "time_limit_s": 5.0}  ──▶  {"id": 3, "verdict": "right"}
"""

from typing import Any

from atroposlib.child_processes.loop import answer_requests


def judge(gold_text: str, answer_text: str) -> dict[str, Any]:
    """The verdict on `answer_text`: right, wrong, unparseable, or grader_failed with a reason."""
    from math_verify import LatexExtractionConfig, parse, verify

    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    gold = _parsed(parse(f"\\boxed{{{gold_text}}}", extraction_config=extraction, parsing_timeout=None))
    if not gold:
        return {"verdict": "grader_failed", "reason": f"the known answer {gold_text!r} is not mathematics"}
    answer = _parsed(parse(f"\\boxed{{{answer_text}}}", extraction_config=extraction, parsing_timeout=None))
    if not answer:
        return {"verdict": "unparseable"}
    return {"verdict": "right" if verify(gold, answer, timeout_seconds=None, raise_on_error=True) else "wrong"}


def _parsed(found: list[Any]) -> list[Any]:
    """The expressions that were understood; the texts that math-verify adds to them would match by spelling alone."""
    return [expression for expression in found if not isinstance(expression, str)]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The verdict; whatever math-verify raises is that answer's `grader_failed`, and the next one is judged as usual."""
    try:
        return judge(request["gold"], request["answer"])
    except Exception as error:
        return {"verdict": "grader_failed", "reason": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    judge("1", "1")  # compiles math-verify's patterns before the first clock runs
    answer_requests(answer)
