"""All procedural tasks of reasoning-gym, selected by name and mixed by weight.

    python environments/reasoning_gym_server.py                                            all tasks alike
    python environments/reasoning_gym_server.py serve --env.tasks "chain_sum=3,leg_counting"    3 sums to 1 leg count
    python environments/reasoning_gym_server.py process --env.tasks basic_arithmetic --env.total_steps 4

`task_options` (in a --config file) are passed to a task's own configuration, e.g. {chain_sum: {min_terms: 2,
max_terms: 3}}. Tasks are made and scored by reasoning-gym itself in child processes that are killed when they are
late; a group with an answer that could not be scored is dropped. The answer is read from the last <answer> tags.

Nine tasks evaluate the answer (`evaluated_answers.py`): code in it scores 0 and is counted in `answers_rejected`.
Without a sandbox for the child processes, these tasks are skipped, or refused if `tasks` names them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from pydantic import Field, field_validator

from atroposlib.child_processes.evaluated_answers import EVALUATED
from atroposlib.child_processes.pool import ChildFailed, ChildPool, SandboxReport
from atroposlib.envs.errors import DataError
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig
from atroposlib.envs.run.environment import ServerConfigs
from atroposlib.extras import install, need
from atroposlib.flags import nearest
from atroposlib.grading import extract_tagged
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages

log = get_logger(__name__)

CHILD = "atroposlib.child_processes.reasoning_gym_child"
START_LIMIT_S = 120.0
MAKE_TRIES = 3
OTHER_ENTRIES, ENTRIES_APART = 20, 400_000  # tried where entries are held-out ones; their indices stay below 10 million
SANDBOX_REMEDY = (
    "install libseccomp and bubblewrap (or use a kernel with Landlock, 5.13 or newer), or pass "
    "--env.allow_unsandboxed_scorers, which trusts the model not to run code with your permissions"
)
SYSTEM_PROMPT = (
    "Think step by step about the problem you are given, then write your answer inside <answer> </answer> tags: the"
    " answer alone, exactly in the form that the problem asks for."
)


@dataclass(frozen=True, slots=True)
class Task:
    """One entry of one task."""

    name: str
    index: int
    question: str
    answer: str | None = None


class ReasoningGymConfig(QuestionEnvConfig):
    """Settings of the reasoning-gym environment, besides those of every question environment."""

    tasks: str = Field(default="all", description="'all', or names with optional weights: chain_sum=3,leg_counting.")
    task_options: dict[str, dict[str, Any]] = Field(
        default={}, description="Settings of single tasks, by name (--config file)."
    )
    scorer_processes: int = Field(default=1, ge=1, le=64, description="Processes that make and score tasks.")
    scorer_timeout: float = Field(default=10.0, gt=0, description="Seconds to make or score one entry.")
    allow_unsandboxed_scorers: bool = Field(
        default=False, description="Use tasks whose scorer evaluates answers even if the machine has no sandbox."
    )

    @field_validator("tasks")
    @classmethod
    def _readable(cls, tasks: str) -> str:
        weights_by_name(tasks)
        return tasks


class ReasoningGymEnv(QuestionEnv):
    """See the module's head."""

    name = "reasoning_gym"
    env_config_cls = ReasoningGymConfig

    def __init__(
        self, config: ReasoningGymConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.pool = ChildPool(
            CHILD,
            count=config.scorer_processes,
            time_limit_s=config.scorer_timeout,
            start_limit_s=START_LIMIT_S,
        )
        self.weights: dict[str, float] = {}
        self._env_run.counts["answers_rejected"] = 0

    @classmethod
    def _check_installed(cls) -> None:
        need("environments", "this environment", "reasoning_gym")

    async def setup(self) -> None:
        """Learn the names of the tasks, check those that are configured, and hold entries out."""
        config: ReasoningGymConfig = self.config
        try:
            known = (await self.pool.ask({"tasks": True}))["tasks"]
            sandbox = await self.pool.sandbox_report()
        except ChildFailed as error:
            raise DataError(f"reasoning-gym does not start ({error}); {install('environments')}") from error
        self.weights = weights_by_name(config.tasks) or dict.fromkeys(known, 1.0)
        for name in [*self.weights, *config.task_options]:
            if name not in known:
                raise DataError(f"reasoning-gym has no task '{name}'{nearest(name, known)}")
        if not sandbox.holds and not config.allow_unsandboxed_scorers:
            self._leave_out_evaluated_tasks(sandbox)
        self.held_out = [await self._task(f"held out {number}", number) for number in range(config.held_out_limit)]
        log.info("Tasks: %d, %d entries held out", len(self.weights), len(self.held_out))

    def _leave_out_evaluated_tasks(self, sandbox: SandboxReport) -> None:
        """Keep the tasks whose scorer runs no code. Raises DataError if others were asked for by name."""
        evaluated = sorted(self.weights.keys() & EVALUATED.keys())
        problem = (
            f"scorers that evaluate answers need a sandbox, which this machine does not provide ({sandbox}):"
            f" {', '.join(evaluated)}"
        )
        if evaluated and self.config.tasks != "all":
            raise DataError(f"{problem}; drop these tasks, {SANDBOX_REMEDY}")
        log.warning("Left out %d tasks: %s. To ask them, %s", len(evaluated), problem, SANDBOX_REMEDY)
        for name in evaluated:
            del self.weights[name]

    async def training_item(self, number: int) -> Task:
        """Entry `number`; none that asks what a held-out one does, unless its task has hardly any others."""
        asked = {held_out.question for held_out in self.held_out}
        index = self.config.held_out_limit + number  # not among those held out
        for more in range(OTHER_ENTRIES):
            task = await self._task(str(number), index + more * ENTRIES_APART)
            if task.question not in asked:
                break
        return task

    async def _task(self, key: str, index: int) -> Task:
        name = Random(f"{self.config.seed} {key}").choices(list(self.weights), list(self.weights.values()))[0]
        reply = await self._made(self._entry(name, index), f"entry {index} of '{name}'")
        if "error" in reply:
            raise DataError(
                f"reasoning-gym cannot make entry {index} of '{name}': {reply['error']}; correct its task_options, "
                "or drop the task"
            )
        return Task(name, index, reply["question"], reply.get("answer"))

    def prompt(self, item: Task) -> Messages:
        """The entry's question, and where to put the answer."""
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": item.question}]

    def reference_answer(self, item: Task) -> str | None:
        """The answer that reasoning-gym has; of some tasks there are others."""
        return item.answer

    async def _made(self, entry: Mapping[str, object], what: str) -> dict[str, Any]:
        """Have the child make an entry, or say why it cannot. Raises DataError if it fails MAKE_TRIES times."""
        for number in range(MAKE_TRIES):
            try:
                return await self.pool.ask(entry)
            except ChildFailed as error:  # late on a busy machine, or killed
                log.warning("reasoning-gym did not make %s (%d of %d tries): %s", what, number + 1, MAKE_TRIES, error)
                failed = error
        limit = f"--env.scorer_timeout ({self.config.scorer_timeout:g} s)"
        raise DataError(f"reasoning-gym does not make {what}: {failed}; raise {limit}, or drop the task")

    async def score(self, item: Task, answer: str) -> float | None:
        """The task's own score (0 to 1), or None when scoring failed or took too long; no answer is 0."""
        given = extract_tagged(answer)
        if given is None:
            return 0.0
        try:
            reply = await self.pool.ask(self._entry(item.name, item.index) | {"answer": given})
        except ChildFailed as error:
            reply = {"error": str(error)}
        score = reply.get("score")
        if not (isinstance(score, float) and 0.0 <= score <= 1.0):
            log.warning(
                "Scoring %r for entry %d of '%s' failed: %s",
                given[:200],
                item.index,
                item.name,
                reply.get("error", f"{score} is not a score from 0 to 1"),
            )
            return None
        if reply["rejected"]:
            self._env_run.counts["answers_rejected"] += 1
            log.info("Rejected %r for entry %d of '%s': %s", given[:200], item.index, item.name, reply["rejected"])
        return score

    def _entry(self, name: str, index: int) -> dict[str, object]:
        return {
            "task": name,
            "options": self.config.task_options.get(name, {}),
            "seed": self.config.seed,
            "index": index,
        }

    async def close(self) -> None:
        """End the child processes."""
        await self.pool.close()


def weights_by_name(tasks: str) -> dict[str, float]:
    """The weight of each task in `tasks`; empty for 'all'. Raises ValueError."""
    if tasks == "all":
        return {}
    weights = {}
    for part in tasks.split(","):
        name, _, weight = part.strip().partition("=")
        weights[name] = float(weight or 1)
        if not name or not 0 < weights[name] < float("inf"):
            raise ValueError(
                f"'{part.strip()}' is not a task with a weight above 0; write e.g. chain_sum=3,leg_counting"
            )
    return weights


if __name__ == "__main__":
    ReasoningGymEnv.cli(default_command="serve")
