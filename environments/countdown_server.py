"""Countdown: combine the given numbers by + - * / into one equation that equals the target.

    python environments/countdown_server.py                                    API on 8000, vLLM on 9001
    python environments/countdown_server.py serve --env.max_numbers 3 --env.largest_number 20
    python environments/countdown_server.py process --env.dataset_path puzzles.jsonl

A line of the file is {"nums": [1, 2, 3], "target": 9}.
The equation is read from the last <answer> tags, computed exactly by a parser (`atroposlib.grading.arithmetic`), and
may use each number once. Puzzles are generated, each from the seed and its own number, or come from a file.
"""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random

from pydantic import Field, model_validator

from atroposlib.config import InputPathText
from atroposlib.envs.data.dataset import held_apart, not_held_out, numbered_lines
from atroposlib.envs.errors import DataError
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig
from atroposlib.errors import reading
from atroposlib.grading import extract_tagged
from atroposlib.grading.arithmetic import ExpressionError, compute
from atroposlib.type_definitions import Messages

SYSTEM_PROMPT = (
    "You are a helpful assistant. You first think about the reasoning process in the mind and then provide the user "
    "with the answer."
)
PREFILL = "Let me solve this step by step.\n<think>"


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Numbers to combine, and what they must come to."""

    numbers: tuple[int, ...]
    target: int


class CountdownConfig(QuestionEnvConfig):
    """Settings of the countdown environment, besides those of every question environment."""

    min_numbers: int = Field(default=3, ge=2, le=8, description="Fewest numbers in a puzzle.")
    max_numbers: int = Field(default=4, ge=2, le=8, description="Most numbers in a puzzle.")
    largest_number: int = Field(default=99, ge=2, description="Largest number in a puzzle.")
    largest_target: int = Field(default=99, ge=2, description="Largest target.")
    use_all_numbers: bool = Field(
        default=False, description="Require every number to be used exactly once; otherwise at most once."
    )
    format_score: float = Field(default=0.0, ge=0, lt=1, description="Score of a valid equation with another result.")
    prefill: bool = Field(default=True, description="Begin the answer for the model with its opening <think>.")
    dataset_path: InputPathText | None = Field(
        default=None, description="JSONL file of puzzles; replaces the generated ones."
    )

    @model_validator(mode="after")
    def _ordered(self) -> "CountdownConfig":
        if self.min_numbers > self.max_numbers:
            raise ValueError(f"min_numbers {self.min_numbers} is above max_numbers {self.max_numbers}")
        return self


class CountdownEnv(QuestionEnv):
    """See the module's head."""

    name = "countdown"
    env_config_cls = CountdownConfig

    async def setup(self) -> None:
        """Hold puzzles out, and read the file if there is one."""
        config: CountdownConfig = self.config
        self.puzzles = read_puzzles(Path(config.dataset_path)) if config.dataset_path is not None else []
        if self.puzzles:
            source = str(config.dataset_path)
            self.held_out, self.puzzles = held_apart(self.puzzles, config.held_out_limit, config.seed, source)
        else:
            self.held_out = [
                make_puzzle(Random(f"{config.seed} held out {number}"), config)
                for number in range(config.held_out_limit)
            ]

    async def training_item(self, number: int) -> Puzzle:
        """Puzzle `number`, none of those held out."""
        if self.puzzles:
            return self.puzzles[number % len(self.puzzles)]
        generator = Random(f"{self.config.seed} {number}")
        return not_held_out(lambda: make_puzzle(generator, self.config), self.held_out)

    def prompt(self, item: Puzzle) -> Messages:
        """The seed's wording: thoughts in <think>, the equation in <answer>."""
        rule = "must be used exactly" if self.config.use_all_numbers else "can only be used"
        question = (
            f"Using the numbers {list(item.numbers)}, create an equation that equals {item.target}. You can use basic "
            f"arithmetic operations (+, -, *, /) and each number {rule} once. Show your work in <think> </think> tags. "
            "And return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
        )
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        return [*messages, {"role": "assistant", "content": PREFILL}] if self.config.prefill else messages

    def reference_answer(self, item: Puzzle) -> str:
        """Return what an equation must come to; there are many that do."""
        return str(item.target)

    async def score(self, item: Puzzle, answer: str) -> float:
        """1 for an equation that reaches the target, `format_score` for a valid one that does not, else 0."""
        value = equation_value(extract_tagged(answer) or "", item, self.config.use_all_numbers)
        if value is None:
            return 0.0
        return 1.0 if value == item.target else self.config.format_score


def equation_value(equation: str, puzzle: Puzzle, use_all: bool) -> Fraction | None:
    """Compute what `equation` comes to; None when it is none, or does not use the puzzle's numbers as allowed.

    "= 12" may follow the expression if that is its value.
    """
    left, equals, right = equation.partition("=")
    with suppress(ExpressionError):
        computed = compute(left)
        used, given = Counter(computed.numbers), Counter(Fraction(number) for number in puzzle.numbers)
        allowed = used == given if use_all else used <= given
        if allowed and (not equals or compute(right).value == computed.value):
            return computed.value
    return None


def make_puzzle(generator: Random, config: CountdownConfig) -> Puzzle:
    """A puzzle that has a solution with all its numbers: random operations on random numbers that come to a possible
    target.
    """
    while True:
        numbers = [
            generator.randint(1, config.largest_number)
            for _ in range(generator.randint(config.min_numbers, config.max_numbers))
        ]
        value = _combine(generator, [Fraction(number) for number in numbers])
        if (
            value is not None
            and value.denominator == 1
            and 1 <= value <= config.largest_target
            and value not in numbers
        ):
            return Puzzle(tuple(numbers), int(value))


def _combine(generator: Random, values: list[Fraction]) -> Fraction | None:
    """`values` put together pair by pair; None after a division by zero."""
    while len(values) > 1:
        generator.shuffle(values)
        right, left = values.pop(), values.pop()
        operator = generator.choice("+-*/")
        if operator == "/" and right == 0:
            return None
        values.append(
            {"+": left + right, "-": left - right, "*": left * right}[operator] if operator != "/" else left / right
        )
    return values[0]


def read_puzzles(path: Path) -> list[Puzzle]:
    """The puzzles of a JSONL file. Raises DataError naming file and line."""
    with reading(f"cannot read puzzles from {path}", DataError):
        lines = numbered_lines(path)
    return [_puzzle(line, f"{path}:{number}") for number, line in lines]


def _puzzle(line: bytes, where: str) -> Puzzle:
    with reading(
        f"{where} is not a puzzle",
        DataError,
        remedy=f'expected {{"nums": [1, 2, 3], "target": 9}}, found {line[:120].decode(errors="replace")}',
        also=(KeyError, TypeError),
    ):
        record = json.loads(line)
        return Puzzle(tuple(int(number) for number in record["nums"]), int(record["target"]))


if __name__ == "__main__":
    CountdownEnv.cli(default_command="serve")
