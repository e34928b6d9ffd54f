"""Right or wrong, by number or by math-verify."""

import re
from fractions import Fraction
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, one_each
from atroposlib.grading.extraction import BOXED, extract_boxed, extract_tagged, last_number

PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")


@registry.register
class AccuracyReward(RewardFunction):
    r"""1 for a completion whose answer equals the solution, else 0.

    The answer is the last \boxed{}, else what stands in <answer>, else the last number. With `split_on_think_tag` only what comes after
    </think> counts. More than `max_boxed_threshold` boxes are guessing and score 0.
    """

    def __init__(
        self, tolerance: float = 1e-6, split_on_think_tag: bool = True, max_boxed_threshold: int = 6, weight: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(weight, **kwargs)
        self.tolerance = tolerance
        self.split_on_think_tag = split_on_think_tag
        self.max_boxed_threshold = max_boxed_threshold

    def compute(self, completions: list[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any) -> list[float]:
        golds = one_each(solution if solution is not None else ground_truth, len(completions), "solution")
        return [self._score(self.get_content(completion), str(gold)) for completion, gold in zip(completions, golds, strict=True)]

    def _score(self, text: str, gold: str) -> float:
        if self.split_on_think_tag:
            text = text.rpartition("</think>")[2]
        if text.count(BOXED) > self.max_boxed_threshold:
            return 0.0
        return float(same_answer(answer_of(text), answer_of(gold) or gold, self.tolerance))


def answer_of(text: str) -> str | None:
    r"""The answer that `text` gives: after ####, boxed, tagged, or the last number."""
    _, mark, marked = text.rpartition("####")
    return marked.strip() if mark else extract_boxed(text) or extract_tagged(text) or last_number(text)


def same_answer(answer: str | None, gold: str, tolerance: float) -> bool:
    """Whether two answers are equal: as numbers within `tolerance` (relative above 1), else as mathematics."""
    if answer is None:
        return False
    left, right = (text.replace(",", "").replace("$", "").strip() for text in (answer, gold))
    if PLAIN_NUMBER.fullmatch(left) and PLAIN_NUMBER.fullmatch(right):
        first, second = _fraction(left), _fraction(right)
        return first is not None and second is not None and abs(float(first - second)) <= tolerance * max(1.0, abs(float(second)))
    return left == right or _equal_mathematics(left, right)


def _fraction(text: str) -> Fraction | None:
    above, _, below = text.partition("/")
    return Fraction(above) / Fraction(below or 1) if Fraction(below or 1) else None


def _equal_mathematics(answer: str, gold: str) -> bool:
    """By math-verify, whose own limits of five seconds hold in the main thread. An environment that cannot wait uses `Grader`."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}")))
