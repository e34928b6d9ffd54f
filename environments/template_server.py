"""Which of two numbers is larger? Put your own task in place of this one."""

from random import Random

from pydantic import Field

from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig
from atroposlib.grading import last_number


class LargerNumberConfig(QuestionEnvConfig):
    """Each field is a flag: --env.largest 999."""

    max_new_tokens: int = Field(default=16, ge=1, description="Most tokens of one answer.")
    largest: int = Field(default=99, ge=9, description="Largest number.")


class LargerNumberEnv(QuestionEnv):
    """A question is a pair of numbers."""

    name = "larger_number"
    env_config_cls = LargerNumberConfig

    def pair(self, name: str) -> list[int]:
        """Two different numbers, always the same for one name."""
        return Random(f"{self.config.seed} {name}").sample(range(1, self.config.largest + 1), 2)

    async def setup(self) -> None:
        """Load data here. `held_out` are the questions that the policy is measured with."""
        self.held_out = [self.pair(f"held out {number}") for number in range(self.config.held_out_limit)]

    async def training_item(self, number: int) -> list[int]:
        """Question 0, 1, 2, ..."""
        return self.pair(str(number))

    def prompt(self, item: list[int]) -> list[dict[str, str]]:
        """Return what the model is asked."""
        return [{"role": "user", "content": f"Which number is larger, {item[0]} or {item[1]}?"}]

    async def score(self, item: list[int], answer: str) -> float:
        """The reward of one answer."""
        return float(last_number(answer) == str(max(item)))

    def reference_answer(self, item: list[int]) -> str:
        """The right answer, for people who read the samples."""
        return str(max(item))


if __name__ == "__main__":
    LargerNumberEnv.cli(default_command="serve")
