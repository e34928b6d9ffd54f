"""Arithmetic over several turns: the model may call a calculator, reads its reply, and answers.

    python environments/calculator_tool_server.py                           API on 8000, vLLM on 9001
    python environments/calculator_tool_server.py serve --env.max_turns 3 --env.terms 6

    user: What is ...? ─▶ <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>
    tool: 391          ─▶ <answer>391</answer>

What the model wrote is trained on, over all turns; the question, the calculator's replies and what the template puts
around them are not. The calculator computes exactly by a parser (`atroposlib.grading.arithmetic`), in a child
process without privileges. With `tool_cost` each call lowers the score.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

from pydantic import Field

from atroposlib.child_processes.calculator_child import tool_result as tool_result  # also imported from here
from atroposlib.child_processes.pool import ChildFailed, ChildPool
from atroposlib.envs.data.dataset import not_held_out
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout, with_reply
from atroposlib.envs.server_handling.dispatching.dispatch import Split, gather_or_cancel
from atroposlib.grading import after_thoughts, extract_tagged
from atroposlib.grading.arithmetic import compute
from atroposlib.type_definitions import Messages

CHILD = "atroposlib.child_processes.calculator_child"
TOOL_LIMIT_S = 5.0
START_LIMIT_S = 60.0
SYSTEM_PROMPT = (
    "You may use a calculator. To use it, end your message with\n"
    '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}</tool_call>\n'
    "and its reply comes as the next message. When you know the result, write it as a number inside <answer> </answer>"
    " tags."
)
NUMBER = re.compile(r"-?[0-9]{1,100}(?:\.[0-9]{1,100})?")
MIN_RIGHT = 1e-9


@dataclass(frozen=True, slots=True)
class Question:
    """An expression and its value."""

    expression: str
    value: Fraction


class CalculatorConfig(QuestionEnvConfig):
    """Settings of the calculator environment, besides those of every question environment."""

    max_new_tokens: int = Field(default=128, ge=1, description="Most tokens of one turn.")
    max_turns: int = Field(default=4, ge=1, description="Most turns of the model in one conversation.")
    terms: int = Field(default=4, ge=2, le=12, description="Numbers in an expression.")
    largest_number: int = Field(default=99, ge=2, description="Largest number in an expression.")
    tool_cost: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Deduction from the score of a right answer for each call of the calculator.",
    )
    tool_role: str = Field(
        default="tool", description="Role of the calculator's messages; 'user' for chat templates without tools."
    )


class CalculatorEnv(QuestionEnv):
    """See the module's head."""

    name = "calculator_tool"
    env_config_cls = CalculatorConfig

    def __init__(self, config: CalculatorConfig, *others: Any, **named: Any) -> None:
        super().__init__(config, *others, **named)
        self.pool = ChildPool(CHILD, count=1, time_limit_s=TOOL_LIMIT_S, start_limit_s=START_LIMIT_S)

    async def setup(self) -> None:
        """Hold questions out."""
        self.held_out = [
            make_question(Random(f"{self.config.seed} held out {n}"), self.config)
            for n in range(self.config.held_out_limit)
        ]
        # With tool_cost a right answer may score less than 1; one that cost everything scores as a wrong one.
        self.right_from = max(MIN_RIGHT, 1.0 - self.config.tool_cost * (self.config.max_turns - 1))

    async def training_item(self, number: int) -> Question:
        """Question `number`, none of those held out."""
        generator = Random(f"{self.config.seed} {number}")
        return not_held_out(lambda: make_question(generator, self.config), self.held_out)

    def prompt(self, item: Question) -> Messages:
        """The question, and how to call the calculator."""
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"What is {item.expression}?"},
        ]

    async def rollouts(self, item: Question, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        """`n` conversations, each going its own way."""
        return await gather_or_cancel([self._converse(item, split, temperature, top_p) for _ in range(n)])

    async def _converse(self, item: Question, split: Split, temperature: float, top_p: float) -> Rollout:
        messages = self.conversation(item)
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
                said = (after_thoughts(text) or "") if self.config.thinking_mode else text
                result = await self._tool_result(said)
                if result is None or turn + 1 == self.config.max_turns:
                    break
                messages.append({"role": self.config.tool_role, "content": result})
            # one in which each turn extended the previous one, or several if the template rewrites earlier turns
            sequences = managed.get_state()["nodes"]
        turns = [message["content"] for message in messages if message["role"] == "assistant"]
        if self.config.thinking_mode:  # of each turn, or what the last one thinks would hide the calls before it
            turns = [after_thoughts(turn) or "" for turn in turns]
        return Rollout("".join(turns), messages, sequences)

    async def _tool_result(self, text: str) -> str | None:
        if "<tool_call>" not in text:
            return None
        try:
            result: str | None = (await self.pool.ask({"text": text}))["result"]
        except ChildFailed as error:
            raise RolloutFailed(f"the calculator failed on {text[-200:]!r}: {error}") from error
        return result

    async def close(self) -> None:
        """End the calculator."""
        await self.pool.close()

    def reference_answer(self, item: Question) -> str:
        """The value, as a fraction where it is not an integer."""
        return str(item.value)

    async def score(self, item: Question, answer: str) -> float:
        """0 to 1: 1 for the right number, less `tool_cost` for each call. An expression of that value is not an
        answer."""
        given = extract_tagged(answer) or ""
        right = NUMBER.fullmatch(given) is not None and Fraction(given) == item.value
        return max(0.0, 1.0 - self.config.tool_cost * answer.count("<tool_call>")) if right else 0.0


def make_question(generator: Random, config: CalculatorConfig) -> Question:
    """Random numbers, joined by random operations that keep the value whole."""
    numbers = [generator.randint(2, config.largest_number) for _ in range(config.terms)]
    expression = str(numbers[0]) + "".join(f" {generator.choice('+-*')} {number}" for number in numbers[1:])
    return Question(expression, compute(expression).value)


if __name__ == "__main__":
    CalculatorEnv.cli(default_command="serve")
