"""Question and answer records: from files, from the hub, or generated. A record of GSM8K is {"question": str,
"answer": "... #### 12"}.

The hub is read by a child process (`hub_download.py`) that is killed at its deadline: the hub's client retries for
minutes, and no thread can be stopped.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from atroposlib.envs.errors import DataError
from atroposlib.errors import reading
from atroposlib.grading.extraction import extract_boxed
from atroposlib.logs import get_logger

log = get_logger(__name__)

ANSWER_MARK = "####"
ARITHMETIC_SEED = 0
HUB_CHILD = Path(__file__).with_name("hub_download.py")


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


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """Problems to train on and, disjoint from them, to measure with."""

    train: list[Problem]
    held_out: list[Problem]


def arithmetic_problems(held_out: int, seed: int = ARITHMETIC_SEED) -> ProblemSet:
    """The 145 questions a + b (1..9) and a * b (2..9), shuffled by `seed`, the first `held_out` of them held out."""
    sums = [_arithmetic_problem(a, "+", b, a + b) for a in range(1, 10) for b in range(1, 10)]
    products = [_arithmetic_problem(a, "*", b, a * b) for a in range(2, 10) for b in range(2, 10)]
    return split([*sums, *products], held_out, seed, "the arithmetic set")


def split(problems: Sequence[Problem], held_out: int, seed: int, source: str) -> ProblemSet:
    """`problems` shuffled by `seed`, the first `held_out` of them held out. Raises DataError when none is left to
    train on.
    """
    if held_out >= len(problems):
        raise DataError(
            f"{source} has {len(problems)} problems, and heldout_size {held_out} leaves none to train on; lower it"
        )
    shuffled = random.Random(seed).sample(list(problems), len(problems))
    return ProblemSet(train=shuffled[held_out:], held_out=shuffled[:held_out])


def read_problems(path: Path, fields: Fields = GSM8K_FIELDS) -> list[Problem]:
    """The records of a JSONL file. Raises DataError naming file and line."""
    with reading(f"cannot read problems from {path}", DataError):
        lines = path.read_bytes().splitlines()
    problems = [
        _problem(line, f"{path}:{number}", fields) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not problems:
        raise DataError(f"{path} contains no problems; write one {fields.shape} per line")
    return problems


def read_problem_set(
    path: Path, test_path: Path | None, held_out: int, seed: int, fields: Fields = GSM8K_FIELDS
) -> ProblemSet:
    """A directory with train.jsonl and test.jsonl, a file with another to measure with, or one file of which part is
    held out.

    At most `held_out` problems of a test file are taken, by `seed`.
    """
    if path.is_dir():
        path, test_path = path / "train.jsonl", test_path or path / "test.jsonl"
    train = read_problems(path, fields)
    if test_path is None:
        return split(train, held_out, seed, str(path))
    test = read_problems(test_path, fields)
    return ProblemSet(train, random.Random(seed).sample(test, min(held_out, len(test))))


async def hub_problem_set(
    dataset: str, name: str, held_out: int, seed: int, deadline_s: float, fields: Fields = GSM8K_FIELDS
) -> ProblemSet:
    """The train and test records of a hub dataset; of one with one split part is held out.

    Raises DataError when the hub does not give them within `deadline_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="atropos-hub-") as folder:
        log.info("Loading %s (%s) from the Hugging Face hub, at most %.0f s", dataset, name, deadline_s)
        start = time.monotonic()
        await _run_hub_child([dataset, name, folder], deadline_s)
        problems = read_problem_set(_downloaded(Path(folder)), None, held_out, seed, fields)
        log.info("Loaded %d problems from %s in %.1f s", len(problems.train), dataset, time.monotonic() - start)
        return problems


def _downloaded(folder: Path) -> Path:
    """The one split that the hub gave, or the directory of several."""
    splits = sorted(folder.glob("*.jsonl"))
    return splits[0] if len(splits) == 1 else folder


async def _run_hub_child(arguments: list[str], deadline_s: float) -> None:
    remedy = (
        "check the network, or pass --env.dataset arithmetic or generated, or --env.dataset_path with local jsonl files"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(HUB_CHILD), *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await child.communicate()
    except TimeoutError:
        raise DataError(
            f"the hub did not deliver {arguments[0]} within {deadline_s:.0f} s (--env.hub_timeout); {remedy}"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode != 0:
        reason = next(
            (line for line in reversed(said.decode(errors="replace").splitlines()) if line.strip()), "no reason given"
        )
        raise DataError(f"the hub did not deliver {arguments[0]}: {reason.strip()[:300]}; {remedy}")


class ProblemStream:
    """Problems without end: the training set again and again, each time in another order that `seed` fixes."""

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self._problems = problems
        self._generator = random.Random(seed)
        self._epochs: list[list[Problem]] = []

    def __getitem__(self, number: int) -> Problem:
        """Problem `number`: 0, 1, 2, ..."""
        epoch, place = divmod(number, len(self._problems))
        while len(self._epochs) <= epoch:
            self._epochs.append(self._generator.sample(self._problems, len(self._problems)))
        return self._epochs[epoch][place]


def _arithmetic_problem(a: int, operator: str, b: int, result: int) -> Problem:
    return Problem(f"What is {a} {operator} {b}?", f"{a} {operator} {b} = {result}\n{ANSWER_MARK} {result}")


def _problem(line: bytes, where: str, fields: Fields) -> Problem:
    with reading(f"{where} is not JSON", DataError, remedy=f"expected {fields.shape}"):
        record: Any = orjson.loads(line)
    record = record if isinstance(record, dict) else {}
    question, answer = record.get(fields.question), record.get(fields.answer)
    if not isinstance(question, str) or not isinstance(answer, str) or (fields.marked and ANSWER_MARK not in answer):
        raise DataError(
            f"{where} is not a problem: expected {fields.shape}, found {line[:120].decode(errors='replace')}"
        )
    return Problem(question, answer)
