"""The process in which math-verify runs: one JSON line in, one out, until stdin ends. Started by path by `grader.Grader`.

    {"id": 3, "gold": "18", "answer": "\\frac{36}{2}", "time_limit_s": 5.0}  ──▶  {"id": 3, "verdict": "right"}

A time limit cannot be enforced on sympy from inside, so none is tried: the kernel's alarm, left at its default action, ends the
whole process even while it runs C code, and the parent starts another. The alarm also ends it when the parent is gone.
Memory is bounded likewise. Imports nothing of this project, so that it starts wherever math-verify is installed.
"""

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, TextIO

MEMORY_LIMIT_BYTES = 4 * 2**30


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


def answer_requests(requests: TextIO, replies: TextIO) -> None:
    """Judge line by line. Whatever math-verify raises is that answer's `grader_failed`, and the next one is judged as usual."""
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["time_limit_s"])
        try:
            verdict = judge(request["gold"], request["answer"])
        except Exception as error:
            verdict = {"verdict": "grader_failed", "reason": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps({"id": request["id"], **verdict}) + "\n")
        replies.flush()


def main() -> None:
    """Serve stdin to stdout, which is kept clean: whatever a library prints goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, whose closing of stdin ends this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    logging.disable(logging.WARNING)
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        judge("1", "1")  # compiles math-verify's patterns before the first clock runs
        replies.write(json.dumps({"ready": True}) + "\n")
        replies.flush()
        answer_requests(sys.stdin, replies)


if __name__ == "__main__":
    main()
