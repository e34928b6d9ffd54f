"""The product of two numbers, with a tool. Put your own task and tools in place of these.

user: What is 48 times 31?   ─▶ <tool_call>{"name": "multiply", "arguments": {"a": 48, "b": 31}}</tool_call>
tool: 1488                   ─▶ It is 1488.                                          this answer is scored
"""

from random import Random

from pydantic import Field

from atroposlib.envs.tool_env import ToolEnv, ToolEnvConfig
from atroposlib.grading import last_number


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers."""
    return a * b


class ProductConfig(ToolEnvConfig):
    """Each field is a flag: --env.largest 999."""

    largest: int = Field(default=99, ge=12, description="Largest number.")


class ProductEnv(ToolEnv):
    """A question is a pair of numbers."""

    name = "product"
    env_config_cls = ProductConfig
    tools = (multiply,)

    def pair(self, name: str) -> list[int]:
        """Two numbers, always the same for one name."""
        return Random(f"{self.config.seed} {name}").sample(range(11, self.config.largest + 1), 2)

    async def setup(self) -> None:
        """Numbers that the policy is measured with."""
        self.held_out = [self.pair(f"held out {number}") for number in range(self.config.held_out_limit)]

    async def training_item(self, number: int) -> list[int]:
        """Question 0, 1, 2, ..."""
        return self.pair(str(number))

    def prompt(self, item: list[int]) -> list[dict[str, str]]:
        """Return what opens the conversation."""
        return [{"role": "user", "content": f"What is {item[0]} times {item[1]}?"}]

    def reference_answer(self, item: list[int]) -> str:
        """The right answer, for people who read the samples."""
        return str(item[0] * item[1])

    async def score(self, item: list[int], answer: str, state: dict[str, int]) -> float:
        """The reward: whether the last turn is right, less a little for each call that was wrong."""
        return (last_number(answer) == self.reference_answer(item)) - 0.1 * state["tool_errors"]


if __name__ == "__main__":
    ProductEnv.cli(default_command="serve")
