"""`QuestionEnv`: an environment that asks a question and scores the answer. The author writes only the task.

    training_item(number) ──▶ prompt(item) ──▶ rollouts: `group_size` answers ──▶ score(item, answer) ──▶ group

In place of `score`, a class may have several rewards (`rewards.py`), or rollouts that bring their own score. Methods of
authors that are coroutines here may be plain functions, but for `rollouts`.

Items are numbered, and an item depends only on its number and the seed. So a resumed run continues where its checkpoint
was written, and two runs with the same seed ask the same questions. A multi-turn environment overrides `rollouts`.
"""

import asyncio
import functools
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from atroposlib.envs.authors import author_checks
from atroposlib.envs.authors.author_checks import settled
from atroposlib.envs.authors.author_errors import location, shown
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.data.data_report import LoadedData
from atroposlib.envs.data.dataset import question_of
from atroposlib.envs.data.problems import Problem
from atroposlib.envs.data.prompt_limits import leave_out_long
from atroposlib.envs.data.repeats import Repeats
from atroposlib.envs.errors import Unscored
from atroposlib.envs.evaluation.evaluation import Answered, Unanswered
from atroposlib.envs.evaluation.evaluation_metrics import is_right
from atroposlib.envs.evaluation.kept_answers import KeptAnswers, keep_answers
from atroposlib.envs.evaluation.sampled_evaluation import evaluate_samples
from atroposlib.envs.failures import Failure, attempt
from atroposlib.envs.metrics import Metrics
from atroposlib.envs.payloads import Item, ScoredDataGroup, with_failed
from atroposlib.envs.rewards import reward as reward  # authors import these from here
from atroposlib.envs.rewards import rewards_of
from atroposlib.envs.rollouts import Rollout as Rollout
from atroposlib.envs.rollouts import Scored as Scored
from atroposlib.envs.rollouts import rollout_group, said
from atroposlib.envs.run.environment import ServerConfigs
from atroposlib.envs.sampling.sampling_fields import SamplingFields
from atroposlib.envs.server_handling.dispatching.dispatch import Split as Split
from atroposlib.envs.server_handling.dispatching.dispatch import gather_or_cancel
from atroposlib.envs.server_handling.dispatching.request_seeds import for_sample
from atroposlib.grading.length import soft_overlong_punishment
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages
from atroposlib.wire.batching import NOT_TRAINED
from atroposlib.wire.held_out import FINAL

log = get_logger(__name__)

THINKING_PROMPT = "Think about the question first, inside <think> </think> tags. Then give your answer."
EVALUATED_EVERY_S = 5.0
SHORT_ANSWER_TOKENS = 1024
REWARD = "reward_"  # before the name of a reward in the metrics
CLOSE_S = 60.0  # in which `close` must return
OUTCOME_CHARS = 80  # of one that is not known
COUNTED = frozenset({"accuracy", "mean_score", "correct", "total", "unscored"})  # and no outcomes
REWARDS_TOLD = 4  # in the console's line, at most


@dataclass
class _Evaluated:
    """Tells the log every few seconds how far an evaluation is."""

    total: int
    _done: int = 0
    _told: float = field(default_factory=time.monotonic)

    def count(self) -> None:
        """One more answer is scored."""
        self._done += 1
        if time.monotonic() - self._told >= EVALUATED_EVERY_S:
            self._told = time.monotonic()
            log.info("Evaluated %d of %d", self._done, self.total)


class QuestionEnvConfig(BaseEnvConfig):
    """Settings of a `QuestionEnv`, besides those of every environment."""

    seed: int = Field(default=0, description="Seed that decides which questions are asked, and in what order.")
    heldout_size: int = Field(default=64, ge=1, description="Limit of held-out questions to evaluate with.")
    final_heldout_size: int = Field(
        default=0,
        ge=0,
        description=(
            "Held-out questions to ask the last policy, and the best one, at the end of a run; no more than those of "
            "every evaluation if it is not above heldout_size."
        ),
    )
    max_new_tokens: int = Field(default=512, ge=1, description="Most tokens of one answer.")
    temperature: float = Field(default=1.0, gt=0, description="Temperature of training samples; evaluation is greedy.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus (top-p) of training samples; reported to the trainer."
    )
    repeat_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "Share of the groups that ask a question again whose last answers had unequal scores: the largest variance "
            "first, then the oldest; 0 asks every question equally often."
        ),
    )
    max_unscored: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description=(
            "Share of held-out questions that an evaluation may leave out for want of a score; above it, or where none"
            " has a score, the evaluation has failed and has no accuracy."
        ),
    )
    overlong_buffer: int = Field(
        default=0,
        ge=0,
        description=(
            "Last tokens of max_new_tokens over which the reward of a training sample falls evenly by 1; 0: none."
        ),
    )

    @property
    def asks_more_at_the_end(self) -> bool:
        """Return whether the last evaluation has further questions."""
        return self.final_heldout_size > self.heldout_size

    @property
    def held_out_limit(self) -> int:
        """The limit of questions to hold out: those of every evaluation, and those of the last one after them."""
        return max(self.heldout_size, self.final_heldout_size)

    @model_validator(mode="after")
    def _buffer_is_part_of_the_answer(self) -> Self:
        limit: int | None = self.max_new_tokens  # a subclass may settle it later
        if limit is not None and self.overlong_buffer > limit:
            raise ValueError(f"overlong_buffer {self.overlong_buffer} is above max_new_tokens {limit}")
        return self

    @model_validator(mode="after")
    def _asks_by_number(self) -> Self:
        if self.repeat_share and self.deterministic:
            raise ValueError("deterministic: which questions repeat_share asks again is not known after a restart")
        return self


class QuestionEnv(BaseEnv):
    """Write `setup` (it sets `held_out`), `training_item`, `prompt` and `score`, or methods with `@reward`."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = QuestionEnvConfig
    outcomes: ClassVar[Sequence[str]] = ()  # those that `score` gives, in the order in which they are logged
    unscored_count: ClassVar[str] = "groups_unscored"  # the metric that counts groups lost for want of a score
    deterministic: ClassVar[bool] = True  # an environment whose rewards depend on the outside says False

    def __init__(
        self, config: QuestionEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        if config.overlong_buffer and not self._is_of_one_answer:
            raise ValueError("overlong_buffer is for one answer a rollout; lower the reward in `score` instead")
        if config.repeat_share and type(self).collect_trajectories is not QuestionEnv.collect_trajectories:
            raise ValueError(
                "repeat_share needs the scores that `collect_trajectories` of QuestionEnv sees; do not override it"
            )
        if isinstance(self.outcomes, str):
            raise ValueError(f'outcomes is the text {self.outcomes!r}: write a tuple, such as ("{self.outcomes}",)')
        if taken := sorted(COUNTED & {*self.outcomes}):
            raise ValueError(f"outcomes has {', '.join(taken)}, which every evaluation counts itself: rename it")
        self._rewards = rewards_of(self, QuestionEnv, brings_its_own=not self._is_of_one_answer)
        super().__init__(config, server_configs, slurm, testing)
        self.right_from = 1.0  # the score from which an answer counts as right in `accuracy`
        self.held_out: Sequence[Item] = []
        self.taken = 0
        self.scored: list[Scored] = []  # training answers since the last log
        self._judged_count = self._none_count = 0  # answers, and those of which `score` gave None
        self._repeats = Repeats(config.repeat_share)
        self._kept: KeptAnswers | None = None  # of the `evaluate` command
        self._eval_slots = asyncio.Semaphore(config.max_eval_workers)

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        """One vLLM on port 9001, whose model names itself and its tokenizer."""
        return cls.env_config_cls.model_construct(tokenizer_name="default"), APIServerConfig(
            model_name="default", base_url="http://localhost:9001/v1", server_type="vllm"
        )

    # --- what an author writes ------------------------------------------------------------------------------------

    @abstractmethod
    async def training_item(self, number: int) -> Item:
        """Question `number` (0, 1, ...); always the same for the same number and `config.seed`."""

    @abstractmethod
    def prompt(self, item: Item) -> Messages:
        """The messages that ask `item`; if the last one is the assistant's, the model continues with it."""

    def score(
        self, item: Item, answer: str, *args: Any, **kwargs: Any
    ) -> Awaitable[float | Scored | None] | float | Scored | None:
        """The reward of `answer`, 1 for a right one; None when it cannot be scored: the answer then counts as failed.
        As `Scored` with one of `outcomes`, for those who watch the run. An override may also take, by name, `messages`
        (the whole conversation) and `state` (that of the `Rollout`).

        A class that does not override it has methods with `@reward`, or rollouts with an `own_score`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no score of its own")

    def sample_record(self, item: Item, rollout: Rollout, scored: Scored) -> dict[str, object]:
        """Return the row that samples.jsonl keeps of an evaluated answer."""
        return {"messages": rollout.messages, "score": scored.reward} | named_rewards(scored)

    async def _evaluate_samples(self, asked: SamplingFields) -> None:
        """See `sampled_evaluation.py`."""
        await evaluate_samples(self, asked)

    @contextmanager
    def _keep_answers(self, output: Path | None) -> Iterator[None]:
        keeps = type(self).evaluate is QuestionEnv.evaluate
        with keep_answers(self, output) if keeps else super()._keep_answers(output) as self._kept:
            yield

    def _identity(self, item: Item) -> object:
        """Return what tells the held-out questions of one evaluation from those of another."""
        return self.conversation(item)

    def reference_answer(self, item: Item) -> str | None:
        """The right answer to `item`, for people who read the samples; None if there is none to show."""
        return item.result if isinstance(item, Problem) else None

    async def close(self) -> None:
        """End what this environment started; called when a command ends."""
        return

    # --- sampling -------------------------------------------------------------------------------------------------

    async def get_next_item(self) -> Item:
        """The next question, without end: a new one, or with `repeat_share` one of those to ask again."""
        number = self._repeats.next_number()
        if number is None:
            number, self.taken = self.taken, self.taken + 1
        item = await settled(self.training_item(number))
        if self.config.repeat_share:
            self._repeats.note_asked(question_of(item), number)
        return item

    async def _numbered_item(self, number: int) -> Item:
        return await settled(self.training_item(number))

    def conversation(self, item: Item) -> Messages:
        """`prompt(item)`, under `thinking_mode` with the request to think first."""
        messages: Messages = author_checks.messages(self.prompt, item)
        if not self.config.thinking_mode:
            return messages
        request = self.config.custom_thinking_prompt or THINKING_PROMPT
        if messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{request}\n\n{messages[0]['content']}"}, *messages[1:]]
        return [{"role": "system", "content": request}, *messages]

    async def rollouts(self, item: Item, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        """`n` answers to `item`. An override is called for one answer at a time, and each has its own time limit."""
        messages = self.conversation(item)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages,
                n=n,
                max_tokens=self.config.max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                split=split,
            )
            nodes = managed.get_state()["nodes"]
        texts = [choice.message.content or "" for choice in reply.choices]
        return [Rollout(text, with_reply(messages, text), [node]) for text, node in zip(texts, nodes, strict=True)]

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """A group of scored answers. Those that failed are counted in it, and the others continue."""
        left, failed = self._env_run.survivors(await self._judged_answers(item), item)
        rewards = [scored.reward for _, scored in left if scored.reward is not None]
        if self.config.repeat_share:
            self._repeats.note_scores(question_of(item), rewards)
        group = rollout_group([rollout for rollout, _ in left], rewards, [scored.rewards for _, scored in left])
        if not any(group.get(name) for name in ("generation_params", "overrides")) and not any(
            self._env_run.sampled_with(group)
        ):  # by a client of the author's own, which was given these
            group["generation_params"] = {"temperature": self.config.temperature, "top_p": self.config.top_p}
        return with_failed(group, failed), []

    async def _judged_answers(self, item: Item) -> list[tuple[Rollout, Scored] | Failure]:
        """`group_size` answers with their rewards, or why there is none."""
        n, limit_s = self.config.group_size, self.config.rollout_limit_s
        if not self._asks_at_once:
            return await gather_or_cancel([for_sample(number, self._judged_answer(item)) for number in range(n)])
        answers = await attempt(self._sampled(item, n), limit_s)
        if isinstance(answers, Failure):
            return [answers] * n
        return await gather_or_cancel([self._judged(item, answer) for answer in answers])

    @property
    def _asks_at_once(self) -> bool:
        """Return whether one request asks for all answers, which saves the server work. It returns when the longest is
        done, so it is for short ones; longer ones may fail, or be late, each by itself.
        """
        return self._is_of_one_answer and self.config.max_new_tokens <= SHORT_ANSWER_TOKENS

    @property
    def _is_of_one_answer(self) -> bool:
        return type(self).rollouts is QuestionEnv.rollouts

    async def _sampled(self, item: Item, n: int) -> Sequence[Rollout]:
        found = await self.rollouts(item, n, "train", self.config.temperature, self.config.top_p)
        return author_checks.answers(self.rollouts, found, n)

    async def _judged_answer(self, item: Item) -> tuple[Rollout, Scored] | Failure:
        answers = await attempt(self._sampled(item, 1), self.config.rollout_limit_s)
        return answers if isinstance(answers, Failure) else await self._judged(item, answers[0])

    async def _judged(self, item: Item, rollout: Rollout) -> tuple[Rollout, Scored] | Failure:
        """An answer with its reward, which is a number. A scorer that raises or hangs fails this answer alone."""
        scored = await attempt(self._score(item, rollout), self.config.rollout_limit_s, late="scorer", other="scorer")
        self.scored.append(Scored(None) if isinstance(scored, Failure) else scored)
        if isinstance(scored, Failure):
            return replace(scored, messages=rollout.messages)
        if scored.reward is None:
            return Failure("scorer", Unscored(self._why_none(), self.unscored_count), rollout.messages)
        return rollout, replace(scored, reward=scored.reward + self._length_reward(rollout))

    def _why_none(self) -> str:
        """How often the author's `score` gives None, and where it stands; empty where another scorer is to blame."""
        where = location(self.score)
        if not where or not self._none_count:
            return ""
        return (
            f"score has returned None for {self._none_count} of {self._judged_count} answers so far; return a number"
            f" for each that can be scored ({where})"
        )

    def _length_reward(self, rollout: Rollout) -> float:
        """Beside the score, which alone is measured."""
        limit: int = self.config.max_new_tokens
        buffer = min(self.config.overlong_buffer, limit)
        sampled = sum(value != NOT_TRAINED for node in rollout.sequences for value in node.masked_tokens)
        return soft_overlong_punishment(sampled, limit, buffer) if buffer else 0.0

    async def _score(self, item: Item, rollout: Rollout) -> Scored:
        # thoughts without an end answer nothing: to score them would teach not to answer
        answer = said(rollout, self.tokenizer) if self.config.thinking_mode else rollout.text
        try:
            scored = await self._rewards.scored(self, item, answer, rollout)
        except Unscored as error:
            log.warning("An answer could not be scored: %s", error)
            return Scored(None)
        self._judged_count += 1
        self._none_count += scored.reward is None
        if self.outcomes and scored.outcome and scored.outcome not in self.outcomes:
            self._env_run.errors.note_reason(
                "such an outcome",
                f"score gave the outcome {shown(scored.outcome, OUTCOME_CHARS)}, which no metric counts: name it in"
                f" outcomes, which has {', '.join(self.outcomes)} ({location(self.score)})",
            )
        return scored

    # --- evaluation and metrics -----------------------------------------------------------------------------------

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Greedy accuracy on the held-out questions. One that fails, or could not be scored, is left out and counted by
        its cause. At the end of a run the further questions of `final_heldout_size` are asked besides, and what is
        measured of all together has names that begin with `final_`. Raises EvaluationFailed where more are left out
        than `max_unscored` allows.
        """
        questions = self.held_out if self._env_run.is_last else self.asked_always
        started = time.time()
        counter = _Evaluated(len(questions))
        if not len(questions):  # of numpy, an array has no truth value
            log.warning("Nothing is evaluated: held_out is empty; set it in `setup` (%s)", location(self.setup))
        results = await gather_or_cancel([self._evaluate_one(*each, counter) for each in enumerate(questions)])
        usual = results[: len(self.asked_always)]
        unscored = Unanswered.of([result.failure for result in usual])
        metrics = self._summary([result.scored for result in usual]) | {"temperature": 0.0} | unscored.metrics
        if len(results) > len(usual):
            found = self._summary([result.scored for result in results])
            metrics |= {f"{FINAL}{name}": found[name] for name in ("accuracy", "correct", "total") if name in found}
        if self.config.data_dir_to_save_evals is not None:
            await self.evaluate_log(
                metrics,
                start_time=started,
                end_time=time.time(),
                generation_parameters={"temperature": 0.0, "top_p": 1.0, "max_new_tokens": self.config.max_new_tokens},
                samples=[self._sample_of(result) for result in results],
                verbose=False,
            )
        # in place of the samples of `evaluate_log`, which are the author's choice
        self._env_run.held_out = [self._held_out_row(index, result) for index, result in enumerate(results)]
        unscored.check(self.config.max_unscored, metrics)
        return metrics

    @property
    def asked_always(self) -> Sequence[Item]:
        """The held-out questions of every evaluation: all, unless the last one has further questions."""
        return self.held_out[: self.config.heldout_size] if self.config.asks_more_at_the_end else self.held_out

    async def _evaluate_one(self, index: int, item: Item, counter: "_Evaluated") -> Answered:
        if self._kept is not None and (kept := self._kept.find(index, item)) is not None:
            return kept
        async with self._eval_slots:
            result = await self._answered(item)
        counter.count()
        if self._kept is not None:
            self._kept.add(self._held_out_row(index, result), result.rollout.text, self._sample_of(result))
        if result.failure is not None:
            self._env_run.note_unanswered(result.failure)
        return result

    async def _answered(self, item: Item) -> Answered:
        """The answer to a held-out question, with its score or why there is none."""
        limit_s = self.config.rollout_limit_s
        rollouts = await attempt(self._asked_greedily(item), limit_s)
        if isinstance(rollouts, Failure):
            return Answered(item, Rollout("", self._env_run.samples.prompt(item) or [], []), Scored(None), rollouts)
        scored = await attempt(self._score(item, rollouts[0]), limit_s, late="scorer", other="scorer")
        if isinstance(scored, Failure):
            return Answered(item, rollouts[0], Scored(None), scored)
        failure = Failure("scorer", Unscored("it has no score")) if scored.reward is None else None
        return Answered(item, rollouts[0], scored, failure)

    async def _asked_greedily(self, item: Item) -> Sequence[Rollout]:
        return author_checks.answers(self.rollouts, await self.rollouts(item, 1, "eval", 0.0, 1.0), 1)

    def _sample_of(self, answered: Answered) -> dict[str, object]:
        """A line of samples.jsonl. The author's own record is of an answer that there is."""
        if answered.kept is not None:
            return dict(answered.kept["record"])
        record = None
        if answered.rollout.text or answered.failure is None:
            of_answer = functools.partial(self.sample_record, answered.item, answered.rollout, answered.scored)
            record = self._env_run.samples.ask("sample_record", of_answer)
        if record is not None:
            return record
        return {"messages": answered.rollout.messages, "score": answered.scored.reward, "error": answered.error}

    def _held_out_row(self, index: int, answered: Answered) -> dict[str, object]:
        rollout, scored = answered.rollout, answered.scored
        ends = [node.metadata.get("finish_reason") for node in rollout.sequences]
        if answered.kept is not None:
            ends = [answered.kept["finish_reason"]]
        return {
            "index": index,
            "messages": rollout.messages,
            "reference": self._env_run.samples.reference(answered.item),
            "score": scored.reward,
            "outcome": scored.outcome or None,
            "finish_reason": ends[-1] if ends else None,
            **named_rewards(scored),
            **({"error": answered.error} if answered.failure is not None else {}),
        }

    def _summary(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Shares of the answers that have a reward, means of the named ones, and counts of all, also by outcome."""
        rewards = [each.reward for each in scored if each.reward is not None]
        right, total = sum(is_right(reward, self.right_from) for reward in rewards), len(rewards)
        shares = {"accuracy": right / total, "mean_score": sum(rewards) / total} if total else {}
        counts = Counter(each.outcome for each in scored)
        shares |= {"correct": right, "total": total, "unscored": len(scored) - total}
        return shares | {outcome: counts[outcome] for outcome in self.outcomes} | mean_rewards(scored)

    async def wandb_log(self, wandb_metrics: Metrics | None = None) -> None:
        """Add the scores since the last call."""
        scored, self.scored = self.scored, []
        metrics = dict(wandb_metrics or {})
        if scored:
            found = self._summary(scored)
            words = ", ".join(f"{found[outcome]} {outcome.replace('_', ' ')}" for outcome in self.outcomes)
            words = words or f"{found['correct']} right, mean score {found.get('mean_score', 0.0):.3f}"
            named = {key: value for key, value in found.items() if key.startswith(REWARD)}
            if len(named) <= REWARDS_TOLD:
                words += "".join(f", {key.removeprefix(REWARD)} {value:.3f}" for key, value in named.items())
            log.info("Step %d: %d answers, %s", self.curr_step, len(scored), words)
            names = {"accuracy": "train/percent_correct", "mean_score": "train/mean_score"}
            names |= {outcome: f"train/answers_{outcome}" for outcome in self.outcomes}
            names |= {key: f"train/{key}" for key in named}
            metrics |= {name: found[key] for key, name in names.items() if key in found}
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Keep how many questions were taken, so that a resumed run continues with the next one, and which ones are to
        be asked again.
        """
        super().save_checkpoint(step, {"taken": self.taken, "_to_repeat": self._to_repeat} | (data or {}))

    @property
    def _to_repeat(self) -> list[tuple[str, int, float]]:
        return self._repeats.state

    @_to_repeat.setter
    def _to_repeat(self, state: list[tuple[str, int, float]]) -> None:  # by `load_checkpoint`
        self._repeats.state = state

    async def _leave_out_long(self, data: LoadedData, limit: int, whose: str, *, held_out_too: bool) -> None:
        """See `prompt_limits.py`."""
        if data.streams or len(self.held_out):
            await leave_out_long(self, data, limit, whose, held_out_too=held_out_too)

    def _reference_of(self, item: Item) -> str | None:
        return self.reference_answer(item)

    def _prompt_of(self, item: Item) -> Messages | None:
        return self.conversation(item)

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S) as limit:
                await settled(self.close())
        except Exception as error:  # such as that of a setup that failed half way; it must not hide why the run ended
            late = f"close did not return within {CLOSE_S:g} s, and was ended"
            self._env_run.errors.note(error, late if limit.expired() else "close failed")
        finally:
            await super()._release()


def with_reply(messages: Sequence[Mapping[str, Any]], text: str) -> Messages:
    """`messages` and the assistant's `text`, which continues the last message if that is the assistant's already."""
    said = [dict(message) for message in messages]
    if said[-1]["role"] == "assistant":
        return [*said[:-1], {"role": "assistant", "content": said[-1]["content"] + text}]
    return [*said, {"role": "assistant", "content": text}]


def named_rewards(scored: Scored) -> dict[str, object]:
    """The field of a row that has an answer's named rewards; none where it has none."""
    return {"rewards": dict(scored.rewards)} if scored.rewards else {}


def mean_rewards(scored: Sequence[Scored]) -> dict[str, float]:
    """`reward_NAME`: the mean of each named reward, before its weight, over the answers that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (pair for each in scored for pair in each.rewards.items()):
        values[name].append(value)
    return {f"{REWARD}{name}": sum(of_answers) / len(of_answers) for name, of_answers in values.items()}
