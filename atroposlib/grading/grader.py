"""Compares an answer with the known result: numbers and words exactly, mathematics by math-verify in child processes
that are killed when they take too long.

    Grader.grade(answer, gold) ──normal form──▶ `at_once`: two quantities, words or numerals ──▶ right | wrong
                       └─ else one JSON line ──▶ math_child.py (math-verify, sympy) ──▶ right | wrong | unparseable
                                    └─ no reply in time: kill, restart on the next call ──▶ grader_failed

A failure of the grader is a separate outcome, never "wrong": it does not judge the answer.
"""

import asyncio
import re
import threading
from collections import Counter
from enum import StrEnum

from pydantic import Field

from atroposlib.child_processes.pool import ChildFailed, ChildPool
from atroposlib.config import Config
from atroposlib.grading.at_once import at_once, mathematics
from atroposlib.grading.extraction import is_balanced
from atroposlib.grading.normal_form import normal_form
from atroposlib.logs import get_logger

log = get_logger(__name__)

CHILD = "atroposlib.child_processes.math_child"
INTEGER = re.compile(r"-?[0-9]{1,18}")
OTHER_ANSWER = re.compile(r"(?<!\\)\$|\\fbox|\\boxed")
MAX_ANSWER_CHARS = 1000


class Outcome(StrEnum):
    """The verdict on one answer."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSEABLE = "unparseable"
    GRADER_FAILED = "grader_failed"


class GraderSettings(Config):
    """Limits of grading."""

    processes: int = Field(default=1, ge=1, le=64, description="Child processes that grade in parallel.")
    time_limit_s: float = Field(
        default=5.0, gt=0, description="Seconds to grade one answer before its process is killed."
    )
    start_limit_s: float = Field(
        default=60.0, gt=0, description="Seconds a child process may take to import math-verify."
    )


class Grader:
    """Grades for any number of tasks of one event loop; `outcomes` counts what it found. Close it when done."""

    def __init__(self, settings: GraderSettings | None = None) -> None:
        settings = settings or GraderSettings()
        self._pool = ChildPool(
            CHILD, count=settings.processes, time_limit_s=settings.time_limit_s, start_limit_s=settings.start_limit_s
        )
        self.outcomes: Counter[Outcome] = Counter()

    async def grade(self, answer: str | None, gold: str) -> Outcome:
        """Judge whether `answer` equals `gold`: numbers with or without units, words, or mathematics as LaTeX. None is
        unparseable.
        """
        outcome = await self._grade(answer, gold)
        self.outcomes[outcome] += 1
        return outcome

    async def close(self) -> None:
        """End the child processes."""
        await self._pool.close()

    async def _grade(self, answer: str | None, gold: str) -> Outcome:
        if answer is None or len(answer) > MAX_ANSWER_CHARS:
            return Outcome.UNPARSEABLE
        if len(gold) > MAX_ANSWER_CHARS:
            log.warning("The known answer has %d characters; at most %d are compared", len(gold), MAX_ANSWER_CHARS)
            return Outcome.GRADER_FAILED
        if INTEGER.fullmatch(answer) and INTEGER.fullmatch(gold):  # what most answers are
            return Outcome.RIGHT if int(answer) == int(gold) else Outcome.WRONG
        read, known = normal_form(answer), normal_form(gold)
        if (equal := at_once(known, read)) is not None:
            return Outcome.RIGHT if equal else Outcome.WRONG
        read, known = mathematics(read), mathematics(known)
        # math-verify would read another box, or 5$3 as 53
        if not read or not is_balanced(read) or OTHER_ANSWER.search(read):
            return Outcome.UNPARSEABLE
        try:
            reply = await self._pool.ask({"gold": known, "answer": read})
        except ChildFailed as error:
            log.warning("The grader failed on the answer %r (known: %r): %s; restarting it", answer, gold, error)
            return Outcome.GRADER_FAILED
        if reply["verdict"] == Outcome.GRADER_FAILED:
            log.warning("The grader failed on the answer %r (known: %r): %s", answer, gold, reply["reason"])
        return Outcome(reply["verdict"])


class BlockingGrader:
    """A `Grader` for code without an event loop: `grade` waits. Its child starts with the first answer."""

    def __init__(self, settings: GraderSettings | None = None) -> None:
        self._grader = Grader(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def grade(self, answer: str | None, gold: str) -> Outcome:
        """Grade as `Grader.grade` does.

        It may take the settings' time limit, and a few seconds more when the child starts.
        """
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="grader", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self._grader.grade(answer, gold), self._loop).result()
