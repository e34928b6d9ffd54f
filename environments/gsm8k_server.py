"""Grade-school mathematics: questions, sampled answers, and reward 1 for the right result.

    python environments/gsm8k_server.py                           the servers of the guide: API on 8000, vLLM on 9001
    python environments/gsm8k_server.py serve --env.group_size 8 --openai.base_url http://localhost:9001/v1
    python environments/gsm8k_server.py serve --env.dataset_path problems.jsonl

Problems come from the hub (openai/gsm8k), from local files, or are generated (145 sums and products that a small
model learns in minutes). An answer is graded by math-verify. A group in which the grader failed is dropped and
counted: to score that sample as wrong would teach the model from the grader's fault.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.errors import DataError
from atroposlib.envs.problems import (
    Problem,
    ProblemSet,
    ProblemStream,
    arithmetic_problems,
    hub_problem_set,
    read_problem_set,
)
from atroposlib.envs.server_handling.dispatch import Split
from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.grading import Grader, GraderSettings, Outcome, extract_boxed, last_number
from atroposlib.logs import get_logger

log = get_logger(__name__)

HUB_DATASET = ("openai/gsm8k", "main")
BOXED_PROMPT = (
    "You solve grade-school mathematics. Work through the problem in short steps, then write the final result, a number"
    " without its unit, inside \\boxed{}."
)


class GSM8kEnvConfig(BaseEnvConfig):
    """What this environment can be told beside the fields of every environment."""

    dataset: Literal["auto", "gsm8k", "arithmetic"] = Field(
        default="auto",
        description="Problems: the hub's GSM8K, generated ones, or 'auto': the hub's if it can be reached.",
    )
    dataset_path: str | None = Field(
        default=None, description="JSONL file, or folder with train.jsonl and test.jsonl; replaces dataset."
    )
    dataset_test_path: str | None = Field(
        default=None, description="JSONL file to measure with; else part of dataset_path is held out."
    )
    hub_timeout: float = Field(default=60.0, gt=0, description="Seconds the hub may take.")
    heldout_size: int = Field(default=64, ge=1, description="Problems to measure with, at most.")
    seed: int = Field(default=0, description="Order of the problems and choice of the held-out ones.")
    prompt_style: Literal["auto", "boxed", "plain"] = Field(
        default="auto",
        description=(
            "boxed: instructions, result in \\boxed{}; plain: the question alone, last number counts; auto: plain for"
            " arithmetic."
        ),
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of an answer; if unset 24 for plain prompts, 512 for boxed."
    )
    temperature: float = Field(default=1.0, gt=0, description="Temperature of training samples; evaluation is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus of training samples; the trainer is told.")
    grader_processes: int = Field(default=1, ge=1, le=64, description="Processes that grade.")
    grader_timeout: float = Field(default=5.0, gt=0, description="Seconds to grade one answer.")


class GSM8kEnv(BaseEnv):
    """See the module's head."""

    name = "gsm8k"
    env_config_cls = GSM8kEnvConfig

    def __init__(self, config: GSM8kEnvConfig, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.grader = Grader(GraderSettings(processes=config.grader_processes, time_limit_s=config.grader_timeout))
        self.outcomes: Counter[Outcome] = Counter()
        self.problems = ProblemSet([], [])
        self.stream = ProblemStream([], config.seed)
        self.boxed = config.prompt_style == "boxed"

    @classmethod
    def config_init(cls) -> tuple[GSM8kEnvConfig, APIServerConfig]:
        """The guide's setting: one vLLM on port 9001, whose model names itself and its tokenizer."""
        server = APIServerConfig(model_name="default", base_url="http://localhost:9001/v1", server_type="vllm")
        return GSM8kEnvConfig(tokenizer_name="default"), server

    # --- problems -------------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Load the problems."""
        self.problems, source = await self._load()
        if self.config.prompt_style == "auto":
            self.boxed = source != "arithmetic"
        self.stream = ProblemStream(self.problems.train, self.config.seed)
        log.info(
            "Problems: %s, %d to train on, %d held out; prompt %s, at most %d new tokens",
            source,
            len(self.problems.train),
            len(self.problems.held_out),
            "boxed" if self.boxed else "plain",
            self.max_new_tokens,
        )

    async def _load(self) -> tuple[ProblemSet, str]:
        config: GSM8kEnvConfig = self.config
        if config.dataset_path is not None:
            test_path = Path(config.dataset_test_path) if config.dataset_test_path else None
            return (
                read_problem_set(Path(config.dataset_path), test_path, config.heldout_size, config.seed),
                config.dataset_path,
            )
        if config.dataset == "arithmetic":
            return arithmetic_problems(config.heldout_size), "arithmetic"
        try:
            return await hub_problem_set(*HUB_DATASET, config.heldout_size, config.seed, config.hub_timeout), "gsm8k"
        except DataError as error:
            if config.dataset == "gsm8k":
                raise
            log.warning("Using the built-in arithmetic problems instead of GSM8K: %s", error)
            return arithmetic_problems(config.heldout_size), "arithmetic"

    async def get_next_item(self) -> Problem:
        """The next problem, without end."""
        return self.stream.take()

    # --- rollouts -------------------------------------------------------------------------------------------------

    @property
    def max_new_tokens(self) -> int:
        """Tokens that an answer may have."""
        return self.config.max_new_tokens or (512 if self.boxed else 24)

    def prompt(self, problem: Problem) -> list[dict[str, str]]:
        """The messages that ask `problem`."""
        question = {"role": "user", "content": problem.question}
        return [{"role": "system", "content": BOXED_PROMPT}, question] if self.boxed else [question]

    async def sample(
        self, problem: Problem, n: int, split: Split, temperature: float, top_p: float = 1.0
    ) -> tuple[list[str], list[SequenceNode]]:
        """Texts and tokens of `n` answers."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=self.prompt(problem),
                n=n,
                max_tokens=self.max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                split=split,
            )
            return [choice.message.content or "" for choice in reply.choices], managed.get_state()["nodes"]

    async def grade(self, problem: Problem, answer: str) -> Outcome:
        """Whether `answer` gives the result of `problem`."""
        given = extract_boxed(answer) if self.boxed else last_number(answer)
        return await self.grader.grade(given, problem.result)

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup | None, list[Problem]]:
        """A group of graded samples; None when the grader failed on one of them."""
        texts, nodes = await self.sample(
            item, self.config.group_size, "train", self.config.temperature, self.config.top_p
        )
        outcomes = await asyncio.gather(*(self.grade(item, text) for text in texts))
        self.outcomes.update(outcomes)
        if Outcome.GRADER_FAILED in outcomes:
            failed = outcomes.count(Outcome.GRADER_FAILED)
            reason = f"the grader failed on {failed} of its answers to {item.question!r}"
            self.note_unscored(reason, "groups_dropped_by_grader")
            return None, []
        return self.group(item, texts, nodes, outcomes), []

    def group(
        self, problem: Problem, texts: Sequence[str], nodes: Sequence[SequenceNode], outcomes: Sequence[Outcome]
    ) -> ScoredDataGroup:
        """The samples as they were sampled: ids, log-probabilities and policy versions, never text tokenised again."""
        versions: list[Any] = [node.metadata.get("policy_versions") for node in nodes]
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(outcome is Outcome.RIGHT) for outcome in outcomes],
            messages=[[*self.prompt(problem), {"role": "assistant", "content": text}] for text in texts],  # type: ignore[list-item]
            generation_params={"temperature": self.config.temperature, "top_p": self.config.top_p},
            policy_versions=versions if all(versions) else None,
        )

    # --- evaluation -----------------------------------------------------------------------------------------------

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Greedy accuracy on the held-out problems; an answer on which the grader failed is left out of it, and
        counted.
        """
        graded = await asyncio.gather(*(self._evaluate_one(problem) for problem in self.problems.held_out))
        outcomes = Counter(outcome for _, _, outcome in graded)
        total = len(graded) - outcomes[Outcome.GRADER_FAILED]
        metrics = {
            **({"accuracy": outcomes[Outcome.RIGHT] / total} if total else {}),
            "correct": outcomes[Outcome.RIGHT],
            "total": total,
            "temperature": 0.0,
            **{str(outcome): outcomes[outcome] for outcome in Outcome},
        }
        if self.config.data_dir_to_save_evals is not None:
            fields = ("question", "known", "answer", "outcome")
            samples = [
                dict(zip(fields, (each.question, each.result, text, outcome), strict=True))
                for each, text, outcome in graded
            ]
            await self.evaluate_log(metrics, samples=samples, verbose=False)
        return metrics

    async def _evaluate_one(self, problem: Problem) -> tuple[Problem, str, Outcome]:
        texts, _ = await self.sample(problem, 1, "eval", temperature=0.0)
        return problem, texts[0], await self.grade(problem, texts[0])

    # --- figures --------------------------------------------------------------------------------------------------

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add what became of the answers since the last call."""
        outcomes, self.outcomes = self.outcomes, Counter()
        metrics = dict(wandb_metrics or {})
        if outcomes:
            shares = ", ".join(f"{outcomes[outcome]} {outcome.replace('_', ' ')}" for outcome in Outcome)
            log.info("Step %d: %d answers, %s", self.curr_step, outcomes.total(), shares)
            metrics |= {f"train/answers_{outcome}": outcomes[outcome] for outcome in Outcome}
            metrics["train/percent_correct"] = outcomes[Outcome.RIGHT] / outcomes.total()
        await super().wandb_log(metrics)

    async def close(self) -> None:
        """End the grader, then everything else."""
        await self.grader.close()
        await super().close()


if __name__ == "__main__":
    GSM8kEnv.cli(default_command="serve")
