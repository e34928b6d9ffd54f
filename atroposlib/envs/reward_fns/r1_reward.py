"""The rewards of R1: thoughts in their place, and the right answer after them."""

import re
from typing import Any

from atroposlib.envs.reward_fns.accuracy_reward import answer_of, same_answer
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, one_each

THOUGHTS = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@registry.register
class FormatReasoningReward(RewardFunction):
    """`reward_value` for thoughts in <think> and a response after them, as far as each is required; else 0."""

    def __init__(
        self,
        reward_value: float = 0.5,
        require_thinking: bool = True,
        require_response: bool = True,
        allow_multiple_thinking: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight, **kwargs)
        self.reward_value = reward_value
        self.require_thinking = require_thinking
        self.require_response = require_response
        self.allow_multiple_thinking = allow_multiple_thinking

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self.reward_value if self._fits(self.get_content(completion)) else 0.0 for completion in completions]

    def _fits(self, text: str) -> bool:
        thoughts = [found for found in THOUGHTS.findall(text) if found.strip()]
        if self.require_thinking and not thoughts or len(thoughts) > 1 and not self.allow_multiple_thinking:
            return False
        return not self.require_response or bool(text.rpartition("</think>")[2].strip())


@registry.register
class AccuracyXReward(RewardFunction):
    """`reward_value` when the response after the thoughts contains the solution, or with `exact_match` is it; or has its value."""

    def __init__(
        self, exact_match: bool = False, case_sensitive: bool = False, reward_value: float = 1.0, weight: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(weight, **kwargs)
        self.exact_match = exact_match
        self.case_sensitive = case_sensitive
        self.reward_value = reward_value

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        golds = one_each(solution, len(completions), "solution")
        return [
            self.reward_value if self._right(self.get_content(each), str(gold)) else 0.0
            for each, gold in zip(completions, golds, strict=True)
        ]

    def _right(self, text: str, gold: str) -> bool:
        response = text.rpartition("</think>")[2].strip()
        if not self.case_sensitive:
            response, gold = response.lower(), gold.lower()
        if response == gold.strip():
            return True
        if self.exact_match:
            return False
        return re.search(rf"(?<!\w){re.escape(gold.strip())}(?!\w)", response) is not None or same_answer(answer_of(response), gold, 1e-6)


@registry.register
class R1Reward(RewardFunction):
    """`format_weight` for the format and `accuracy_weight` for the answer, added."""

    def __init__(self, format_weight: float = 0.5, accuracy_weight: float = 1.0, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight, **kwargs)
        self._format = FormatReasoningReward(reward_value=1.0, weight=format_weight)
        self._accuracy = AccuracyXReward(weight=accuracy_weight)

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        formats, answers = self._format(completions), self._accuracy(completions, solution=solution)
        return [first + second for first, second in zip(formats, answers, strict=True)]
