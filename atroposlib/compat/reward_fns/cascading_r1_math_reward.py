"""Format first: the answer counts only if the format is right."""

from typing import Any

from atroposlib.compat.reward_fns.accuracy_reward import AccuracyReward
from atroposlib.compat.reward_fns.r1_reward import FormatReasoningReward
from atroposlib.compat.reward_fns.registry import registry
from atroposlib.compat.reward_fns.reward_function import RewardFunction


@registry.register
class CascadingR1MathReward(RewardFunction):
    """0 to 1 + `format_value`: the latter for thoughts and a response, 1 more for the right result among those."""

    def __init__(self, format_value: float = 0.5, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight, **kwargs)
        self._format = FormatReasoningReward(reward_value=format_value)
        self._accuracy = AccuracyReward()

    def compute(self, completions: list[object], solution: object = None, **kwargs: object) -> list[float]:
        formats, answers = self._format(completions), self._accuracy(completions, solution=solution)
        return [shape + answer if shape else 0.0 for shape, answer in zip(formats, answers, strict=True)]


def cascading_r1_math_reward(completions: list[object], solution: object, **kwargs: object) -> list[float]:
    """The reward as a plain function."""
    return CascadingR1MathReward()(completions, solution=solution)
