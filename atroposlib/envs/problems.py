"""Question and answer records: from files, from the hub, or generated. A record of GSM8K is {"question": str,
"answer": "... #### 12"}. `dataset.py` reads them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from atroposlib.envs.dataset import ItemSet, ItemStream, Row, Tables, hub_tables, local_tables, read_rows
from atroposlib.envs.dataset import split as split
from atroposlib.envs.errors import DataError
from atroposlib.grading.extraction import extract_boxed

ANSWER_MARK = "####"
ARITHMETIC_SEED = 0
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
        r"""The result alone: what follows the last `####` (without thousands separators), else the last \boxed{}, else
        the answer.
        """
        _, mark, marked = self.answer.rpartition(ANSWER_MARK)
        return marked.strip().replace(",", "") if mark else extract_boxed(self.answer) or self.answer.strip()


@dataclass(frozen=True, slots=True)
class Fields:
    """The names that question and answer have in a record, and whether the answer must have its result after `####`."""

    question: str = "question"
    answer: str = "answer"
    marked: bool = True

    @property
    def shape(self) -> str:
        """What a record looks like, for those who wrote another."""
        return f'{{"{self.question}": ..., "{self.answer}": "...{" #### 12" if self.marked else ""}"}}'


GSM8K_FIELDS = Fields()


ProblemSet = ItemSet[Problem]
ProblemStream = ItemStream[Problem]


def arithmetic_problems(held_out: int, seed: int = ARITHMETIC_SEED) -> ProblemSet:
    """The 145 questions a + b (1..9) and a * b (2..9), shuffled by `seed`, the first `held_out` of them held out."""
    sums = [_arithmetic_problem(a, "+", b, a + b) for a in range(1, 10) for b in range(1, 10)]
    products = [_arithmetic_problem(a, "*", b, a * b) for a in range(2, 10) for b in range(2, 10)]
    return split([*sums, *products], held_out, seed, "the arithmetic set")


def read_problems(path: Path, fields: Fields = GSM8K_FIELDS) -> list[Problem]:
    """The records of a file. Raises DataError naming file and line."""
    return [_problem(row, fields) for row in read_rows(path)]


def read_problem_set(
    path: Path, test_path: Path | None, held_out: int, seed: int, fields: Fields = GSM8K_FIELDS
) -> ProblemSet:
    """A directory with train.jsonl and test.jsonl, a file with another to measure with, or one file of which part is
    held out.

    At most `held_out` problems of a test file are taken, by `seed`.
    """
    return _problem_set(local_tables(path, test_path), held_out, seed, fields)


async def hub_problem_set(
    dataset: str, name: str, held_out: int, seed: int, deadline_s: float, fields: Fields = GSM8K_FIELDS
) -> ProblemSet:
    """The train and test records of a hub dataset; of one with one split part is held out.

    Raises DataError when the hub does not give them within `deadline_s` seconds.
    """
    return _problem_set(await hub_tables(dataset, name, deadline_s, HUB_REMEDY), held_out, seed, fields)


def _arithmetic_problem(a: int, operator: str, b: int, result: int) -> Problem:
    return Problem(f"What is {a} {operator} {b}?", f"{a} {operator} {b} = {result}\n{ANSWER_MARK} {result}")


def _problem_set(tables: Tables, held_out: int, seed: int, fields: Fields) -> ProblemSet:
    return tables.items(lambda row: _problem(row, fields), held_out, seed)


def _problem(row: Row, fields: Fields) -> Problem:
    question, answer = row.value(fields.question), row.value(fields.answer)
    if not isinstance(question, str) or not isinstance(answer, str) or (fields.marked and ANSWER_MARK not in answer):
        found = json.dumps(row.values, ensure_ascii=False, default=str)[:SHOWN_CHARS]
        raise DataError(f"{row.where} is not a problem: expected {fields.shape}, found {found}")
    return Problem(question, answer)
