r"""Mathematics with results of any form: fractions, roots, sets, expressions; compared by math-verify.

    python environments/math_server.py                                                       generated problems
    python environments/math_server.py serve --env.dataset HuggingFaceH4/MATH-500 --env.question_field problem
    python environments/math_server.py serve --env.dataset_path problems.jsonl --env.answer_field solution

A record's result is what follows `####` in its answer, else the last \boxed{}, else the whole answer. The model's is
the last \boxed{} of its reply. Both go to math-verify in a child process that is killed when it is late; an answer on
which it fails has no score. A generated problem equals its result, so there the result must also be worked out: one
number, a polynomial without brackets, or one root.
"""

import re
from fractions import Fraction
from pathlib import Path
from random import Random

from pydantic import Field

from atroposlib.config import InputPathText
from atroposlib.envs.data.dataset import OVERLAP, Overlap
from atroposlib.envs.data.known_answers import gradable
from atroposlib.envs.data.problems import (
    Fields,
    Problem,
    ProblemSet,
    ProblemStream,
    hub_problem_set,
    read_problem_set,
    split,
)
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig
from atroposlib.envs.run.environment import ServerConfigs
from atroposlib.grading import Grader, GraderSettings, Outcome, extract_boxed
from atroposlib.grading.at_once import mathematics
from atroposlib.grading.normal_form import normal_form
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages

log = get_logger(__name__)

GENERATED = "generated"
GENERATED_PROBLEMS = 4000
SYSTEM_PROMPT = r"Solve the problem step by step, then write the final result inside \boxed{}."

# The forms that generated problems ask for, without blanks.
DIGITS = r"(?:\d+(?:[.,]\d*)?|[.,]\d+)"
SIGNED = rf"[-+]?\(?[-+]?{DIGITS}\)?"
PART = rf"(?:\{{{SIGNED}\}}|\d)"
ONE_NUMBER = rf"{SIGNED}(?:(?:/|\\over){SIGNED})?(?:\\%)?|[-+]?\(?\\frac{PART}{PART}\)?"
TIMES = r"(?:\\cdot|\\times|\*)?"
TERM = rf"(?:(?:{DIGITS}{TIMES})?x(?:\^(?:\d|\{{\d\}}))?|{DIGITS})"
ROOT = rf"\\sqrt(?:\{{{DIGITS}\}}|\d)"
NUMBER = re.compile(ONE_NUMBER)
EXPANDED = re.compile(rf"[-+]?{TERM}(?:[-+]{TERM})*")
ONE_ROOT = re.compile(rf"[-+]?(?:{DIGITS}{TIMES})?{ROOT}|[-+]?{ROOT}{TIMES}{DIGITS}|{ONE_NUMBER}")
NAME = re.compile(r"\A\s*[A-Za-z]?\s*\\(?:approx|in)(?![A-Za-z])")
BRACKETS = re.compile(r"(?:\\\{|[(\[{])(.*?)(?:\\\}|[)\]}])")


class MathConfig(QuestionEnvConfig):
    """Settings of the MATH environment, besides those of every question environment."""

    dataset: str = Field(default=GENERATED, description="'generated', or the name of a hub dataset.")
    dataset_config: str = Field(default="default", description="Configuration of the hub dataset.")
    dataset_path: InputPathText | None = Field(
        default=None,
        description="File (.jsonl, .json, .csv, .parquet) or directory of train, test; replaces dataset.",
    )
    dataset_test_path: InputPathText | None = Field(
        default=None, description="File to evaluate with; otherwise part of dataset_path is held out."
    )
    question_field: str = Field(default="question", description="Field of a record that holds the question.")
    answer_field: str = Field(default="answer", description="Field of a record that holds the answer.")
    hub_timeout: float = Field(default=60.0, gt=0, description="Seconds to wait for the hub.")
    overlap: Overlap = Field(default="refuse", description=OVERLAP)
    grader_processes: int = Field(default=1, ge=1, le=64, description="Number of grading processes.")
    grader_timeout: float = Field(default=5.0, gt=0, description="Seconds to grade one answer.")


class MathEnv(QuestionEnv):
    """See the module's head."""

    name = "math"
    env_config_cls = MathConfig

    def __init__(
        self, config: MathConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.grader = Grader(GraderSettings(processes=config.grader_processes, time_limit_s=config.grader_timeout))
        self.stream = ProblemStream([], config.seed)
        self.generated = config.dataset_path is None and config.dataset == GENERATED

    async def setup(self) -> None:
        """Load the problems."""
        problems = await self._load()
        if not self.generated:
            problems = await gradable(problems, self.grader)
        self.stream, self.held_out = ProblemStream(problems.train, self.config.seed), problems.held_out
        log.info("Problems: %d to train on, %d held out", len(problems.train), len(self.held_out))

    async def _load(self) -> ProblemSet:
        config: MathConfig = self.config
        fields = Fields(config.question_field, config.answer_field, marked=False)
        if config.dataset_path is not None:
            return read_problem_set(
                Path(config.dataset_path),
                Path(config.dataset_test_path) if config.dataset_test_path else None,
                config.held_out_limit,
                config.seed,
                fields,
                config.overlap,
            )
        if not self.generated:
            return await hub_problem_set(
                config.dataset,
                config.dataset_config,
                config.held_out_limit,
                config.seed,
                config.hub_timeout,
                fields,
                config.overlap,
            )
        made = dict.fromkeys(make_problem(Random(f"{config.seed} {number}")) for number in range(GENERATED_PROBLEMS))
        return split(list(made), config.held_out_limit, config.seed, "the generated set")

    async def training_item(self, number: int) -> Problem:
        """The training set again and again, each time in another order."""
        return self.stream[number]

    def prompt(self, item: Problem) -> Messages:
        """The problem, and where to put the result."""
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": item.question}]

    async def score(self, item: Problem, answer: str) -> float | None:
        """1 for the right result, None when the grader failed."""
        outcome = await self.grader.grade(extract_boxed(answer), item.result)
        if outcome is Outcome.RIGHT and self.generated:
            return float(is_worked_out(extract_boxed(answer) or "", item.result))
        return None if outcome is Outcome.GRADER_FAILED else float(outcome is Outcome.RIGHT)

    async def close(self) -> None:
        """End the grader."""
        await self.grader.close()


def make_problem(generator: Random) -> Problem:
    """A linear equation, a sum of fractions, a product of binomials, or a root to simplify."""
    a, b, c, d = (generator.randint(2, 12) for _ in range(4))
    kind = generator.randrange(4)
    if kind == 0:
        return Problem(f"Solve ${a}x + {b} = {c}$ for $x$.", latex(Fraction(c - b, a)))
    if kind == 1:
        return Problem(rf"Compute $\frac{{{a}}}{{{b}}} + \frac{{{c}}}{{{d}}}$.", latex(Fraction(a, b) + Fraction(c, d)))
    if kind == 2:
        return Problem(f"Expand $({a}x + {b})({c}x + {d})$.", f"{a * c}x^2 + {a * d + b * c}x + {b * d}")
    return Problem(rf"Simplify $\sqrt{{{a * a * b}}} + {c}\sqrt{{{b}}}$.", rf"{a + c}\sqrt{{{b}}}")


def is_worked_out(answer: str, result: str) -> bool:
    """Whether an answer that equals a generated problem's result has its form, too: the problem's own terms have not.
    Of a chain of equations the last value counts, as it does for the grader.
    """
    said = NAME.sub("", normal_form(answer)).partition(r"\approx")[0].rpartition("=")[2].strip()
    if match := BRACKETS.fullmatch(said):
        said = match[1]
    form = ONE_ROOT if r"\sqrt" in result else EXPANDED if "x" in result else NUMBER
    return form.fullmatch("".join(mathematics(said).split())) is not None


def latex(value: Fraction) -> str:
    """`value` as LaTeX."""
    sign = "-" if value < 0 else ""
    return str(value) if value.denominator == 1 else rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


if __name__ == "__main__":
    MathEnv.cli(default_command="serve")
