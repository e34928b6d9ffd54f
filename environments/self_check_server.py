"""Two turns: the model answers a problem, is asked to check its answer, and answers again.

    python environments/self_check_server.py                            API on 8000, vLLM on 9001
    python environments/self_check_server.py serve --env.dataset_path problems.jsonl --env.max_new_tokens 512

    user: What is 7 * 8?               ─▶ <think>7 * 8 = 54</think> 54
    user: Check that. What is 7 * 8?   ─▶ <think>7 * 8 = 56</think> 56      this answer is scored

Both turns are trained on. A chat template that strips the thoughts of earlier turns (Qwen3's does) makes two sequences
of a rollout: in the second the model sees its first answer without the thoughts. The managed server's nodes are one
sequence or two, and nothing here depends on which.

Problems are generated sums and products, or come from a file with one {"question": ..., "answer": "... #### 12"} a
line. The last number of the second answer counts.
"""

from pathlib import Path

from pydantic import Field

from atroposlib.config import InputPathText
from atroposlib.envs.data.problems import Problem, ProblemStream, arithmetic_problems, read_problem_set
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout, with_reply
from atroposlib.envs.server_handling.dispatching.dispatch import Split, gather_or_cancel
from atroposlib.grading import last_number_is
from atroposlib.type_definitions import Messages

OPENING = "<think>"
EXAMPLE = f"Think first, then answer, like this:\n\nWhat is 2 + 2?\n{OPENING}2 + 2 = 4</think>\n4\n\n"


class SelfCheckConfig(QuestionEnvConfig):
    """Settings of the self-check environment, besides those of every question environment."""

    max_new_tokens: int = Field(default=32, ge=1, description="Most tokens of one turn.")
    dataset_path: InputPathText | None = Field(
        default=None,
        description="File (.jsonl, .json, .csv, .parquet) or directory of train, test; replaces the generated set.",
    )
    check_prompt: str = Field(
        default="Check that. {question}", description="Question of the second turn; {question} is the problem."
    )
    show_thinking: bool = Field(
        default=True,
        description=(
            "Show an example of <think> </think>, and begin each reply with <think>; off for models that "
            "think on their own."
        ),
    )


class SelfCheckEnv(QuestionEnv):
    """See the module's head."""

    name = "self_check"
    env_config_cls = SelfCheckConfig

    async def setup(self) -> None:
        """Read or make the problems, and hold some out."""
        path, held_out, seed = self.config.dataset_path, self.config.held_out_limit, self.config.seed
        problems = arithmetic_problems(held_out) if path is None else read_problem_set(Path(path), None, held_out, seed)
        self.stream, self.held_out = ProblemStream(problems.train, seed), problems.held_out

    async def training_item(self, number: int) -> Problem:
        """The problems again and again, each time in another order."""
        return self.stream[number]

    def prompt(self, item: Problem) -> Messages:
        """The problem, after an example of thinking."""
        shown = EXAMPLE if self.config.show_thinking else ""
        return [{"role": "user", "content": shown + item.question}]

    async def rollouts(self, item: Problem, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        """`n` conversations, each checking its own answer."""
        return await gather_or_cancel([self._converse(item, split, temperature, top_p) for _ in range(n)])

    async def _converse(self, item: Problem, split: Split, temperature: float, top_p: float) -> Rollout:
        messages, text = self.conversation(item), ""
        check = {"role": "user", "content": self.config.check_prompt.replace("{question}", item.question)}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for asked in ([], [check]):
                messages = [*messages, *asked]
                if self.config.show_thinking:
                    messages.append({"role": "assistant", "content": OPENING})
                reply = await managed.chat_completion(
                    messages=messages,
                    max_tokens=self.config.max_new_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    split=split,
                )
                text = reply.choices[0].message.content or ""
                messages = with_reply(messages, text)
            return Rollout(text, messages, managed.get_state()["nodes"])

    async def score(self, item: Problem, answer: str) -> float:
        """1 for the right number, else 0."""
        return float(last_number_is(answer, item.result))


if __name__ == "__main__":
    SelfCheckEnv.cli(default_command="serve")
