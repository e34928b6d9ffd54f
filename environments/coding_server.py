"""Programs with tests: the model writes a Python function, which runs in a sandbox, and may correct it once.

    python environments/coding_server.py                                     API on 8000, vLLM on 9001
    python environments/coding_server.py serve --env.tasks_path tasks.jsonl --env.max_turns 3

    user: Write solve(numbers) ...     ─▶ ```python ... ```    the examples run: solve([1, 2]) gave 3, expected 2
    user: solve([1, 2]) gave 3 ...     ─▶ ```python ... ```    hidden tests run: their share that passes is the score

A line of the file is a task: {"question": ..., "function": "solve", "examples": [[[1, 2], 3]], "tests": [[[4, 5], 9]]},
a test being the arguments and the result, as JSON. Without a file, tasks on lists of numbers are generated. The program
sees the arguments of tests and never their results, so it cannot pass a test but by computing it.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pydantic import Field

from atroposlib.child_processes.pool import ChildFailed, ChildPool, ProgramFailed
from atroposlib.config import InputPathText
from atroposlib.envs.data.dataset import held_apart, numbered_lines
from atroposlib.envs.errors import DataError
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout, with_reply
from atroposlib.envs.server_handling.dispatching.dispatch import Split, gather_or_cancel
from atroposlib.envs.tools import as_text
from atroposlib.errors import reading
from atroposlib.grading import after_thoughts
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages

log = get_logger(__name__)

CHILD = "atroposlib.child_processes.code_child"
START_LIMIT_S = 60.0
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
TOLERANCE = 1e-9  # of numbers, relative
NOTHING = 1e-12  # what rounding may leave of numbers that cancel out
LARGEST = 1e300  # that is compared with a tolerance
FEEDBACK_CHARS = 500
TRAINED, HELD_OUT = (2, 3, 5, 6, 8, 9), (4, 7)  # numbers in generated tasks: no question is on both sides
Test = tuple[list[Any], Any]  # arguments, result


@dataclass(frozen=True, slots=True)
class Task:
    """A function to write, tests that the model sees, and tests that it does not."""

    question: str
    function: str
    examples: list[Test]
    tests: list[Test]


class CodingConfig(QuestionEnvConfig):
    """Settings of the coding environment, besides those of every question environment."""

    max_new_tokens: int = Field(default=512, ge=1, description="Most tokens of one turn.")
    max_turns: int = Field(default=2, ge=1, description="Most programs in one conversation; 1: no correction.")
    tasks_path: InputPathText | None = Field(default=None, description="JSONL file of tasks; default: generated ones.")
    programs_at_once: int = Field(default=2, ge=1, description="Sandboxes, each of which runs one program at a time.")
    cpu_limit_s: float = Field(default=2.0, gt=0, description="CPU seconds of one program over all tests.")
    program_limit_s: float = Field(
        default=20.0, gt=0, description="Seconds after which a program that does not end is killed, and passes nothing."
    )


class CodingEnv(QuestionEnv):
    """See the module's head."""

    name = "coding"
    env_config_cls = CodingConfig

    def __init__(self, config: CodingConfig, *others: Any, **named: Any) -> None:
        super().__init__(config, *others, **named)
        self._pools: asyncio.Queue[ChildPool] = asyncio.Queue()
        for _ in range(config.programs_at_once):
            self._pools.put_nowait(
                ChildPool(CHILD, count=1, time_limit_s=config.program_limit_s, start_limit_s=START_LIMIT_S)
            )
        self.tasks: list[Task] = []

    async def setup(self) -> None:
        """Read the tasks, or generate them, and hold some out."""
        config = self.config
        if config.tasks_path is None:
            self.held_out = [
                make_task(Random(f"{config.seed} held out {n}"), HELD_OUT) for n in range(config.held_out_limit)
            ]
            return
        tasks = read_tasks(Path(config.tasks_path))
        self.held_out, self.tasks = held_apart(tasks, config.held_out_limit, config.seed, config.tasks_path)

    async def training_item(self, number: int) -> Task:
        """The tasks of the file again and again, or generated ones, none of which asks what a held-out one does."""
        if self.tasks:
            return self.tasks[number % len(self.tasks)]
        return make_task(Random(f"{self.config.seed} {number}"), TRAINED)

    def prompt(self, item: Task) -> Messages:
        """The task, its examples, and the form of the answer."""
        examples = "\n".join(f"{_call(item.function, arguments)} == {result!r}" for arguments, result in item.examples)
        return [
            {
                "role": "user",
                "content": f"{item.question}\n\n{examples}\n\nAnswer with the function in one ```python block.",
            }
        ]

    async def rollouts(self, item: Task, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        """`n` conversations, each with the faults of its own programs."""
        return await gather_or_cancel([self._converse(item, split, temperature, top_p) for _ in range(n)])

    async def _converse(self, item: Task, split: Split, temperature: float, top_p: float) -> Rollout:
        messages, text = self.conversation(item), ""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(self.config.max_turns):
                reply = await managed.chat_completion(
                    messages=messages,
                    max_tokens=self.config.max_new_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    split=split,
                )
                text = reply.choices[0].message.content or ""
                messages = with_reply(messages, text)
                if turn + 1 == self.config.max_turns:
                    break
                try:
                    _, faults = await self.tried(item.function, program_of(text), item.examples)
                except ChildFailed as error:
                    raise RolloutFailed(str(error), "scorer") from error
                if not faults:
                    break
                said = as_text("\n".join(faults))[:FEEDBACK_CHARS]
                messages.append({"role": "user", "content": f"{said}\n\nCorrect the function."})
            sequences = managed.get_state()["nodes"]
        return Rollout(text, messages, sequences)

    async def score(self, item: Task, answer: str) -> float | None:
        """The share of tests that the last program passes; None if the sandbox failed, which is not its fault."""
        try:
            passed, _ = await self.tried(item.function, program_of(answer), item.tests)
        except ChildFailed as error:
            log.warning("A program has no score: %s", error)
            return None
        return passed / len(item.tests)

    async def tried(self, function: str, program: str, tests: Sequence[Test]) -> tuple[int, list[str]]:
        """How many of `tests` the program passes, and what is wrong where it does not. One that ends its process or is
        killed for what it does passes none: it must not do better than one that is wrong. Raises ChildFailed where the
        sandbox or the machine is to blame.
        """
        asked = {
            "program": program,
            "function": function,
            "calls": [arguments for arguments, _ in tests],
            "cpu_s": self.config.cpu_limit_s,
        }
        async with self._sandbox() as pool:
            try:
                reply: dict[str, Any] = dict(await pool.ask(asked))
            except ProgramFailed as error:
                return 0, [f"The program failed: {error}"]
        outcomes = reply.get("outcomes")
        if not isinstance(outcomes, list) or len(outcomes) != len(tests):  # a program may write what it likes
            return 0, [f"The program failed: {reply.get('error') or 'it gave no results'}"]
        faults = []
        for (arguments, result), outcome in zip(tests, outcomes, strict=True):
            if not isinstance(outcome, dict) or "value" not in outcome:
                said = outcome.get("error") if isinstance(outcome, dict) else outcome
                faults.append(f"{_call(function, arguments)} failed: {said}")
            elif not same(outcome["value"], result):
                faults.append(f"{_call(function, arguments)} gave {outcome['value']!r:.100}, expected {result!r}")
        return len(tests) - len(faults), faults

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[ChildPool]:
        """A child that has run no other program, and runs none after."""
        pool = await self._pools.get()
        try:
            yield pool
        finally:
            await pool.close()
            self._pools.put_nowait(pool)

    async def close(self) -> None:
        """End the sandboxes that are idle; those in use end with their program."""
        while not self._pools.empty():
            await self._pools.get_nowait().close()


def program_of(text: str) -> str:
    """The last block of code after the thoughts, or all of it where there is none."""
    said = after_thoughts(text) or ""
    blocks = BLOCK.findall(said)
    return blocks[-1] if blocks else said


def same(found: object, expected: object) -> bool:
    """Whether `found` is the expected value, numbers up to rounding. It looks as deep as what is expected."""
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(same(one, other) for one, other in zip(found, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[key], value) for key, value in expected.items())
        )
    if isinstance(expected, (int, float)) and not isinstance(expected, bool):
        if not isinstance(found, (int, float)) or isinstance(found, bool):
            return False
        if isinstance(found, int) and isinstance(expected, int):
            return found == expected
        comparable = abs(found) < LARGEST and abs(expected) < LARGEST
        near = comparable and abs(found - expected) <= (TOLERANCE * abs(expected) or NOTHING)
        return found == expected or near
    return type(found) is type(expected) and found == expected


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file. Raises DataError, which names the line."""
    tasks = []
    with reading(f"cannot read --env.tasks_path {path}", DataError):
        lines = numbered_lines(path)
    for number, line in lines:
        try:
            row = json.loads(line)
            tests, examples = ([(list(args), result) for args, result in row[key]] for key in ("tests", "examples"))
            task = Task(str(row["question"]), str(row["function"]), examples, tests)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number} is no task ({type(error).__name__}: {error}): write question, function, examples and"
                " tests, each test as [[argument, ...], result]"
            ) from error
        if not tests:
            raise DataError(f"{path}:{number} has no tests: nothing could be scored")
        tasks.append(task)
    if len(tasks) < 2:
        raise DataError(f"{path} has {len(tasks)} tasks: at least 2 are needed, one of them to be held out")
    return tasks


def make_task(generator: Random, limits: Sequence[int]) -> Task:
    """One of a few functions on a list of numbers, with one of the `limits`."""
    limit = generator.choice(limits)
    what, compute = generator.choice(
        [
            (f"the sum of the numbers above {limit}", lambda numbers: sum(n for n in numbers if n > limit)),
            (f"how many of the numbers {limit} divides", lambda numbers: sum(n % limit == 0 for n in numbers)),
            (f"the numbers below {limit}, in their order", lambda numbers: [n for n in numbers if n < limit]),
            (f"the numbers in ascending order, each times {limit}", lambda numbers: sorted(n * limit for n in numbers)),
            (f"every number that comes before the first {limit}", lambda numbers: _before(numbers, limit)),
        ]
    )
    lists = [[generator.randint(0, 12) for _ in range(generator.randint(0, 6))] for _ in range(8)]
    tests: list[Test] = [([numbers], compute(numbers)) for numbers in lists]
    return Task(f"Write a Python function solve(numbers) that returns {what}.", "solve", tests[:2], tests[2:])


def _before(numbers: list[int], limit: int) -> list[int]:
    return numbers[: numbers.index(limit)] if limit in numbers else numbers


def _call(function: str, arguments: Sequence[object]) -> str:
    return f"{function}({', '.join(map(repr, arguments))})"


if __name__ == "__main__":
    CodingEnv.cli(default_command="serve")
