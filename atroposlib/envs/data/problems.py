"""Question and answer records: from files, from the hub, or generated. A record of GSM8K is {"question": str,
"answer": "... #### 12"}. `dataset.py` reads them.
"""

import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from atroposlib.envs.data.dataset import (
    Flaw,
    ItemSet,
    ItemStream,
    Overlap,
    Row,
    Tables,
    hub_tables,
    local_tables,
    read_rows,
)
from atroposlib.envs.data.dataset import split as split
from atroposlib.envs.errors import DataError
from atroposlib.grading.extraction import extract_boxed

ANSWER_MARK = "####"
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
NO_BRACKET = r"[^\d,.()\[\]{}]*"  # a sign, a currency, a unit
THOUSANDS = re.compile(rf"{NO_BRACKET}[1-9]\d{{0,2}}(,\d{{3}})+(\.\d+)?\.?{NO_BRACKET}")
ARITHMETIC_SEED = 0
WORDINGS = ("What is {}?", "How much is {}?", "Calculate {}.", "{} = ?")
HELD_OUT_FACTS = 64
HUB_REMEDY = (
    "check the network, or pass --env.dataset arithmetic or generated, or --env.dataset_path with local jsonl files"
)
SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its worked answer."""

    question: str
    answer: str

    @property
    def result(self) -> str:
        r"""The result alone: what follows the last `####` (a number without thousands separators), else the last
        \boxed{}, else the answer.
        """
        _, mark, marked = self.answer.rpartition(ANSWER_MARK)
        if not mark:
            return extract_boxed(self.answer) or self.answer.strip()
        marked = marked.strip()
        return marked.replace(",", "") if THOUSANDS.fullmatch(marked) else marked  # of (1, 2) they part the two


@dataclass(frozen=True, slots=True)
class Fields:
    """The names that question and answer have in a record, and whether an answer that is no number must have its result
    after `####`.
    """

    question: str = "question"
    answer: str = "answer"
    marked: bool = True

    @property
    def shape(self) -> str:
        """Show what a record looks like, for people who wrote another."""
        mark, more = (" #### 12", " (without #### a number alone; for other answers take the environment math)")
        shape = f'{{"{self.question}": ..., "{self.answer}": "...{mark if self.marked else ""}"}}'
        return f"{shape}{more}" if self.marked else shape


GSM8K_FIELDS = Fields()


ProblemSet = ItemSet[Problem]
ProblemStream = ItemStream[Problem]


def arithmetic_problems(held_out: int, seed: int = ARITHMETIC_SEED) -> ProblemSet:
    """The 145 sums a + b (1..9) and products a * b (2..9), each asked in the four ways of `WORDINGS`: 580 questions.

    At most 64 of the 145, chosen by `seed`, are held out in every wording, so that none is trained on. The first 64
    held-out questions are these in the first wording. Raises DataError for more than 256.
    """
    sums = [(a, "+", b, a + b) for a in range(1, 10) for b in range(1, 10)]
    products = [(a, "*", b, a * b) for a in range(2, 10) for b in range(2, 10)]
    most = HELD_OUT_FACTS * len(WORDINGS)
    if held_out > most:
        raise DataError(f"the arithmetic set has at most {most} questions to hold out, not {held_out}; lower it")
    facts = split([*sums, *products], min(held_out, HELD_OUT_FACTS), seed, "the arithmetic set")
    train, tested = (
        [_arithmetic_problem(wording, *fact) for wording in WORDINGS for fact in each]
        for each in (facts.train, facts.held_out)
    )
    assert facts.report is not None
    facts.report.records, facts.report.train, facts.report.held_out = len(train) + len(tested), len(train), held_out
    return ProblemSet(train, tested[:held_out], facts.report)


def read_problems(path: Path, fields: Fields = GSM8K_FIELDS) -> list[Problem]:
    """The records of a file. Raises DataError naming file and line."""
    return [found for row in read_rows(path) if isinstance(found := _problem(row, fields), Problem)]


def read_problem_set(
    path: Path,
    test_path: Path | None,
    held_out: int,
    seed: int,
    fields: Fields = GSM8K_FIELDS,
    overlap: Overlap = "refuse",
) -> ProblemSet:
    """A directory with train.jsonl and test.jsonl, a file with another to measure with, or one file of which part is
    held out.

    At most `held_out` problems of a test file are taken, by `seed`.
    """
    return _problem_set(local_tables(path, test_path), held_out, seed, fields, overlap)


async def hub_problem_set(
    dataset: str,
    name: str,
    held_out: int,
    seed: int,
    deadline_s: float,
    fields: Fields = GSM8K_FIELDS,
    overlap: Overlap = "refuse",
) -> ProblemSet:
    """The train and test records of a hub dataset; of one with one split part is held out.

    Raises DataError when the hub does not give them within `deadline_s` seconds.
    """
    return _problem_set(await hub_tables(dataset, name, deadline_s, HUB_REMEDY), held_out, seed, fields, overlap)


def _arithmetic_problem(wording: str, a: int, operator: str, b: int, result: int) -> Problem:
    task = f"{a} {operator} {b}"
    return Problem(wording.format(task), f"{task} = {result}\n{ANSWER_MARK} {result}")


def _problem_set(tables: Tables, held_out: int, seed: int, fields: Fields, overlap: Overlap) -> ProblemSet:
    return tables.items(lambda row: _problem(row, fields), held_out, seed, overlap)


def _problem(row: Row, fields: Fields) -> Problem | Flaw:
    """The problem of a row, or why it has none. Raises DataError for a row of another shape."""
    question, answer = _value(row, fields.question), _value(row, fields.answer)
    if isinstance(answer, (list, tuple)) and len(answer) == 1:  # as AIME's are
        answer = answer[0]
    if question is None or (isinstance(question, str) and not question.strip()):
        return Flaw("with an empty question")
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        return Flaw("with an empty answer")
    is_text = isinstance(answer, str)
    if not isinstance(question, str) or (is_text and fields.marked and not _has_result(answer)):
        raise DataError(f"{row.where} is not a problem: expected {fields.shape}, found {_found(row.values)}")
    problem = Problem(question, answer if is_text else _number(answer, row, fields))
    return problem if problem.result else Flaw("with an empty answer")


def _has_result(answer: str) -> bool:
    return ANSWER_MARK in answer or NUMBER.fullmatch(answer.strip()) is not None


def _value(row: Row, column: str) -> Any:
    """None where the column has nothing. Raises DataError where there is no such column."""
    return row.values[column] if column in row.values else row.value(column)


def _number(value: object, row: Row, fields: Fields) -> str:
    """A number as an answer's text. Raises DataError for any other kind of value."""
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value) if isinstance(value, int) else as_decimal(value)
    found = _found(row.values[fields.answer])
    raise DataError(f"{row.where} has the answer {found}: expected text, a finite number or a list of one")


def as_decimal(value: float | Decimal) -> str:
    """A number written out in digits: 16 for 16.0, and 0.0000001 for 1e-07."""
    text = format(Decimal(str(value)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _found(values: object) -> str:
    return json.dumps(values, ensure_ascii=False, default=str)[:SHOWN_CHARS]
