"""Ours: the tasks and the reward of `environments/verifiers_tasksets/sums.py` as an environment of this project.

python benchmarks/peers/arms/sums_server.py process --env.total_steps 20
"""

import re

from pydantic import Field

from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig

Item = tuple[int, int]
SUMS: list[Item] = [(a, b) for a in range(1, 10) for b in range(1, 10)]


class SumsConfig(QuestionEnvConfig):
    """Settings."""

    max_new_tokens: int = Field(default=24, ge=1, description="Most tokens of one answer.")


class SumsEnv(QuestionEnv):
    """Sums of one-digit numbers, in order; the last number counts."""

    name = "sums"
    env_config_cls = SumsConfig

    async def setup(self) -> None:
        self.held_out = SUMS[:1]

    async def training_item(self, number: int) -> Item:
        return SUMS[number % len(SUMS)]

    def prompt(self, item: Item) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"What is {item[0]} + {item[1]}?"}]

    async def score(self, item: Item, answer: str) -> float:
        numbers = re.findall(r"\d+", answer)
        return float(bool(numbers) and int(numbers[-1]) == sum(item))


if __name__ == "__main__":
    SumsEnv.cli(default_command="process")
