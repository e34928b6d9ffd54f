"""Known answers that the grader cannot read are left out when the data is loaded: nothing that is compared with them
could be scored, and their groups would be sampled and thrown away in every epoch.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from atroposlib.envs.data.data_report import DataReport
from atroposlib.envs.data.dataset import ItemSet
from atroposlib.envs.data.problems import Problem
from atroposlib.envs.server_handling.dispatching.dispatch import gather_or_cancel
from atroposlib.grading import Grader, Outcome
from atroposlib.logs import get_logger

log = get_logger(__name__)

# By count, not by time: which questions a run asks does not depend on the machine.
TRIES = 4000  # a few ms each
FAILURE = 100  # tries that one costs on which the grader fails, which may take twice its time limit
AT_ONCE = 16
PLAIN = re.compile(r"-?[0-9]+(\.[0-9]+)?(/[1-9][0-9]*)?")  # which every grader reads
KNOWN_TO_WORK = r"\sqrt{2}"  # which needs the child process
KIND = "with an answer that cannot be graded"
LOOKED_AT = "known answers"


async def gradable(problems: ItemSet[Problem], grader: Grader, tries: int = TRIES) -> ItemSet[Problem]:
    """`problems` without those whose known answer does not even equal itself. Plain numbers are taken as they are. At
    most `tries` of the others are tried; the report says how many.

    Raises DataError where more than half of all records would be left out.
    """
    every = [*problems.held_out, *problems.train]
    report = problems.report or DataReport("the problems", len(every))
    doubtful = list(dict.fromkeys(problem.result for problem in every if not PLAIN.fullmatch(problem.result)))
    if not doubtful:
        return problems
    log.info("Trying known answers that are not numbers with the grader: %d, at most %d", len(doubtful), tries)
    with _without_lines_of("atroposlib.grading.grader"):  # a line for each answer; the report has them all
        if await grader.grade(KNOWN_TO_WORK, KNOWN_TO_WORK) is not Outcome.RIGHT:
            report.looked_at[LOOKED_AT] = "not looked at, since the grader does not answer"
            return problems
        unreadable, tried = set[str](), 0
        while tried < len(doubtful) and tries > 0:
            batch = doubtful[tried : tried + AT_ONCE]
            outcomes = await gather_or_cancel([grader.grade(answer, answer) for answer in batch])
            for answer, outcome in zip(batch, outcomes, strict=True):
                if outcome is Outcome.GRADER_FAILED:  # perhaps only since the machine is busy
                    outcome = await grader.grade(answer, answer)
                    tries -= FAILURE
                if outcome is not Outcome.RIGHT:
                    unreadable.add(answer)
            tried += len(batch)
            tries -= len(batch)
    if tried < len(doubtful):
        report.looked_at[LOOKED_AT] = f"looked at {tried} of {len(doubtful)} that are not plain numbers"
    for problem in every:
        if problem.result in unreadable:
            report.add(KIND, "left out", f"{problem.result!r} to {problem.question}")
    report.check_left_out(sum(problem.result in unreadable for problem in every), "check the column of the answers")
    train = [problem for problem in problems.train if problem.result not in unreadable]
    held_out = [problem for problem in problems.held_out if problem.result not in unreadable]
    report.train, report.held_out = len(train), len(held_out)
    return replace(problems, train=train, held_out=held_out)


@contextmanager
def _without_lines_of(logger: str) -> Iterator[None]:
    def drop(record: logging.LogRecord) -> bool:
        return False

    logging.getLogger(logger).addFilter(drop)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(drop)
