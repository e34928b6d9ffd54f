"""Similarity to a reference text."""

import math
from collections import Counter
from typing import Any

from atroposlib.compat.reward_fns.registry import registry
from atroposlib.compat.reward_fns.reward_function import RewardFunction, one_each

GRAM = 3


@registry.register
class CosineScaledReward(RewardFunction):
    """`min_reward` to `max_reward`: the cosine (0 to 1) of the trigrams of completion and solution, mapped to these.

    The ancestor embeds by a neural model (`model_name`); this library holds none, so the argument is refused rather
    than ignored.
    """

    def __init__(
        self,
        model_name: str | None = None,
        scale_factor: float = 1.0,
        min_reward: float = -1.0,
        max_reward: float = 1.0,
        default_reward: float = 0.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight, **kwargs)
        if model_name is not None:
            raise ValueError(
                f"model_name {model_name!r}: this reward compares trigrams and loads no model; leave model_name unset"
            )
        self.scale_factor = scale_factor
        self.min_reward = min_reward
        self.max_reward = max_reward
        self.default_reward = default_reward

    def compute(self, completions: list[object], solution: object = None, **kwargs: object) -> list[float]:
        if solution is None:
            return [self.default_reward] * len(completions)
        scaled = [
            self.min_reward
            + (self.max_reward - self.min_reward) * cosine(self.get_content(each), str(gold)) * self.scale_factor
            for each, gold in zip(completions, one_each(solution, len(completions), "solution"), strict=True)
        ]
        return [max(self.min_reward, min(self.max_reward, value)) for value in scaled]


def cosine(left: str, right: str) -> float:
    """Cosine of the trigram counts of two texts, 0..1."""
    first, second = _grams(left), _grams(right)
    norm = math.sqrt(sum(count**2 for count in first.values()) * sum(count**2 for count in second.values()))
    return sum(count * second[gram] for gram, count in first.items()) / norm if norm else 0.0


def _grams(text: str) -> Counter[str]:
    padded = f"  {' '.join(text.lower().split())}  "
    return Counter(padded[start : start + GRAM] for start in range(len(padded) - GRAM + 1))
