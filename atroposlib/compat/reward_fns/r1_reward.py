"""The rewards of R1: thoughts in their place, and the right answer after them."""

import re
from typing import Any

from atroposlib.compat.reward_fns.accuracy_reward import answer_of, is_number, marked_answer, same_answer
from atroposlib.compat.reward_fns.base_reward import BaseReward, register_reward
from atroposlib.compat.reward_fns.reward_function import RewardFunction, one_each
from atroposlib.grading.extraction import all_tagged, with_thoughts_opened
from atroposlib.grading.grader import BlockingGrader

TAIL_CHARS = 16
# words before an answer; after others, such as "not" and "or", it is none, or one of several
GIVING = ("is", "are", "was", "be", "becomes", "equals", "answer", "option", "choice", "choose", "pick", "it's")


@register_reward
class FormatReasoningReward(BaseReward):
    """`reward_value` or 0: for thoughts in <think> and a response after them, as far as each is required; else 0."""

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

    def score(self, completion: str, **kwargs: object) -> float:
        completion = with_thoughts_opened(completion)
        thoughts = [found for found in all_tagged(completion, "think") if found.strip()]
        if (self.require_thinking and not thoughts) or (len(thoughts) > 1 and not self.allow_multiple_thinking):
            return 0.0
        responds = completion.rpartition("</think>")[2].strip()
        return self.reward_value if responds or not self.require_response else 0.0


@register_reward
class AccuracyXReward(RewardFunction):
    """`reward_value` or 0: for a response after the thoughts that is the solution, or without `exact_match` answers it.

    A response has one answer and cannot name several: what it marks (####, \\boxed{}, <answer>), else its last number
    or the words that it ends with. Raises Unscored when math-verify failed.
    """

    def __init__(
        self,
        exact_match: bool = False,
        case_sensitive: bool = False,
        reward_value: float = 1.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight, **kwargs)
        self._grader = BlockingGrader()
        self.exact_match = exact_match
        self.case_sensitive = case_sensitive
        self.reward_value = reward_value

    def compute(self, completions: list[object], solution: object = None, **kwargs: object) -> list[float]:
        return [
            self.reward_value if self._right(self.get_content(each), str(gold)) else 0.0
            for each, gold in zip(completions, one_each(solution, len(completions), "solution"), strict=True)
        ]

    def _right(self, text: str, gold: str) -> bool:
        response = text.rpartition("</think>")[2].strip()
        if not self.case_sensitive:
            response, gold = response.lower(), gold.lower()
        if response == gold.strip():
            return True
        if self.exact_match:
            return False
        gold = (marked_answer(gold) or gold).strip()
        if marked_answer(response) is None and not is_number(gold) and _ends_with(response, gold):
            return True
        return same_answer(answer_of(response), gold, 1e-6, self._grader)


def _ends_with(response: str, gold: str) -> bool:
    """Return whether `gold` stands by itself at the end: after a word that gives an answer, a colon or "=", or nothing.
    Quotes, brackets and emphasis around it give no answer: London or "Paris" are two.
    """
    before = rf"(?:\A|\b(?i:{'|'.join(GIVING)})\s|[:=]\s?)[\"'(*]{{0,3}}"
    return re.search(rf"{before}{re.escape(gold)}\W{{0,3}}\Z", response[-len(gold) - TAIL_CHARS :]) is not None


@register_reward
class R1Reward(RewardFunction):
    """0 to `format_weight` + `accuracy_weight`: the one for the format and the other for the answer, added."""

    def __init__(
        self, format_weight: float = 0.5, accuracy_weight: float = 1.0, weight: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(weight, **kwargs)
        self._format = FormatReasoningReward(reward_value=1.0, weight=format_weight)
        self._accuracy = AccuracyXReward(weight=accuracy_weight)

    def compute(self, completions: list[object], solution: object = None, **kwargs: object) -> list[float]:
        formats, answers = self._format(completions), self._accuracy(completions, solution=solution)
        return [first + second for first, second in zip(formats, answers, strict=True)]
