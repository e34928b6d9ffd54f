"""Grade-school mathematics: questions, sampled answers, and reward 1 for the right result.

    python environments/gsm8k_server.py                           the servers of the guide: API on 8000, vLLM on 9001
    python environments/gsm8k_server.py serve --env.group_size 8 --openai.base_url http://localhost:9001/v1
    python environments/gsm8k_server.py serve --env.dataset_path problems.jsonl

Problems come from the hub (openai/gsm8k), from local files, or are generated (sums and products of one-digit numbers
that a small model learns in minutes). An answer is graded by math-verify. If the grader fails, the answer has no score
and is counted: a score of 0 would train the model on the grader's failure.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from atroposlib.config import InputPathText
from atroposlib.envs.data.dataset import OVERLAP, Overlap
from atroposlib.envs.data.known_answers import gradable
from atroposlib.envs.data.problems import (
    Problem,
    ProblemSet,
    ProblemStream,
    arithmetic_problems,
    hub_problem_set,
    read_problem_set,
)
from atroposlib.envs.errors import DataError
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout, Scored
from atroposlib.envs.run.environment import ServerConfigs
from atroposlib.grading import Grader, GraderSettings, Outcome, extract_boxed, last_number
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages

log = get_logger(__name__)

HUB_DATASET = ("openai/gsm8k", "main")
BOXED_PROMPT = (
    "You solve grade-school mathematics. Work through the problem in short steps, then write the final result, a number"
    " without its unit, inside \\boxed{}."
)


class GSM8kEnvConfig(QuestionEnvConfig):
    """Settings of the GSM8K environment, besides those of every question environment."""

    dataset: Literal["auto", "gsm8k", "arithmetic"] = Field(
        default="auto",
        description="Problems: the hub's GSM8K, generated ones, or 'auto': the hub's if it is reachable.",
    )
    dataset_path: InputPathText | None = Field(
        default=None,
        description="File (.jsonl, .json, .csv, .parquet) or directory of train, test; replaces dataset.",
    )
    dataset_test_path: InputPathText | None = Field(
        default=None, description="File to evaluate with; otherwise part of dataset_path is held out."
    )
    hub_timeout: float = Field(default=60.0, gt=0, description="Seconds to wait for the hub.")
    overlap: Overlap = Field(default="refuse", description=OVERLAP)
    prompt_style: Literal["auto", "boxed", "plain"] = Field(
        default="auto",
        description=(
            "boxed: instructions, result in \\boxed{}; plain: only the question, the last number counts; auto: plain "
            "for arithmetic."
        ),
    )
    max_new_tokens: int | None = Field(  # type: ignore[assignment]  # settled by `setup`
        default=None, ge=1, description="Limit of tokens of an answer; default 24 for plain prompts, 512 for boxed."
    )
    max_eval_workers: int = Field(default=64, ge=1, description="Held-out problems to ask in parallel.")
    grader_processes: int = Field(default=1, ge=1, le=64, description="Number of grading processes.")
    grader_timeout: float = Field(default=5.0, gt=0, description="Seconds to grade one answer.")


class GSM8kEnv(QuestionEnv):
    """See the module's head."""

    name = "gsm8k"
    env_config_cls = GSM8kEnvConfig
    outcomes = tuple(map(str, Outcome))
    unscored_count = "groups_dropped_by_grader"

    def __init__(
        self, config: GSM8kEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.grader = Grader(GraderSettings(processes=config.grader_processes, time_limit_s=config.grader_timeout))
        self.problems = ProblemSet([], [])
        self.stream = ProblemStream([], config.seed)
        self.boxed = config.prompt_style == "boxed"

    async def setup(self) -> None:
        """Load the problems."""
        problems, source = await self._load()
        self.problems = await gradable(problems, self.grader)
        self.stream, self.held_out = ProblemStream(self.problems.train, self.config.seed), self.problems.held_out
        if self.config.prompt_style == "auto":
            self.boxed = source != "arithmetic"
        self.config.max_new_tokens = self.config.max_new_tokens or (512 if self.boxed else 24)
        log.info(
            "Problems: %s, %d to train on, %d held out; prompt %s, at most %d new tokens",
            source,
            len(self.problems.train),
            len(self.held_out),
            "boxed" if self.boxed else "plain",
            self.config.max_new_tokens,
        )

    async def _load(self) -> tuple[ProblemSet, str]:
        config: GSM8kEnvConfig = self.config
        if config.dataset_path is not None:
            return (
                read_problem_set(
                    Path(config.dataset_path),
                    Path(config.dataset_test_path) if config.dataset_test_path else None,
                    config.held_out_limit,
                    config.seed,
                    overlap=config.overlap,
                ),
                config.dataset_path,
            )
        if config.dataset != "arithmetic":
            try:
                return (
                    await hub_problem_set(
                        *HUB_DATASET, config.held_out_limit, config.seed, config.hub_timeout, overlap=config.overlap
                    ),
                    "gsm8k",
                )
            except DataError as error:
                if config.dataset == "gsm8k":
                    raise
                log.warning("Using the built-in arithmetic problems instead of GSM8K: %s", error)
        return arithmetic_problems(config.held_out_limit), "arithmetic"

    async def training_item(self, number: int) -> Problem:
        """The training set again and again, each time in another order."""
        return self.stream[number]

    def prompt(self, item: Problem) -> Messages:
        """The question, under `boxed` with the request to write the result in a box."""
        question = {"role": "user", "content": item.question}
        return [{"role": "system", "content": BOXED_PROMPT}, question] if self.boxed else [question]

    async def score(self, item: Problem, answer: str) -> Scored:
        """1 for the right result; no score when the grader failed."""
        outcome = await self.grader.grade(extract_boxed(answer) if self.boxed else last_number(answer), item.result)
        return Scored(None if outcome is Outcome.GRADER_FAILED else float(outcome is Outcome.RIGHT), str(outcome))

    def sample_record(self, item: Problem, rollout: Rollout, scored: Scored) -> dict[str, object]:
        """The question with its known result and the answer."""
        return {
            "question": item.question,
            "known": item.result,
            "answer": rollout.text,
            "outcome": scored.outcome,
        }

    async def close(self) -> None:
        """End the grader."""
        await self.grader.close()


if __name__ == "__main__":
    GSM8kEnv.cli(default_command="serve")
