"""Right or wrong, by number or by math-verify."""

import re
from fractions import Fraction
from typing import Any

from atroposlib.compat.reward_fns.registry import registry
from atroposlib.compat.reward_fns.reward_function import RewardFunction, one_each
from atroposlib.envs.errors import Unscored
from atroposlib.grading.extraction import BOXED, extract_boxed, extract_tagged, last_number
from atroposlib.grading.grader import MAX_ANSWER_CHARS, BlockingGrader, Outcome

NUMBER = re.compile(r"(?P<above>-?[0-9]+(?:\.[0-9]+)?)(?:/(?P<below>[0-9]+))?")
THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
# Numbers that nobody writes out, such as 9^{9^9}, 2^{99999} and (9!)!: the caller would only wait for the time limit.
BEYOND_WRITING = re.compile(r"\^[\s{(]*-?(?:\d+[\s)]*[!^]|\d{5})|\d{5}\s*!|!\s*[)}]*\s*!|\\[dt]?binom\s*\{?\d{5}")


@registry.register
class AccuracyReward(RewardFunction):
    r"""0 or 1: 1 for a completion whose answer equals the solution.

    The answer is what follows ####, else the last \boxed{}, else what stands in <answer>, else the last number. With
    `split_on_think_tag` only what comes after </think> counts. More than `max_boxed_threshold` boxes are guessing and
    score 0. An answer that is not a number goes to math-verify in a child process, and the caller waits for it, at most
    the 5 s of `GraderSettings`: an environment uses `Grader`, which does not block. Raises Unscored when it failed.
    """

    def __init__(
        self,
        tolerance: float = 1e-6,
        split_on_think_tag: bool = True,
        max_boxed_threshold: int = 6,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight, **kwargs)
        self._grader = BlockingGrader()
        self.tolerance = tolerance
        self.split_on_think_tag = split_on_think_tag
        self.max_boxed_threshold = max_boxed_threshold

    def compute(
        self, completions: list[object], solution: object = None, ground_truth: object = None, **kwargs: object
    ) -> list[float]:
        known = solution if solution is not None else ground_truth
        return [
            self._score(self.get_content(completion), str(gold))
            for completion, gold in zip(completions, one_each(known, len(completions), "solution"), strict=True)
        ]

    def _score(self, text: str, gold: str) -> float:
        if self.split_on_think_tag:
            _, closed, text = text.rpartition("</think>")
            if not closed and "<think>" in text:
                return 0.0
        if text.count(BOXED) > self.max_boxed_threshold:
            return 0.0
        return float(same_answer(answer_of(text), marked_answer(gold) or gold, self.tolerance, self._grader))


def marked_answer(text: str) -> str | None:
    """The answer that `text` marks as such: after ####, boxed or tagged."""
    _, mark, marked = text.rpartition("####")
    return marked.strip() if mark else extract_boxed(text) or extract_tagged(text)


def answer_of(text: str) -> str | None:
    """The answer that `text` marks, else its last number."""
    return marked_answer(text) or last_number(text)


def same_answer(answer: str | None, gold: str, tolerance: float, grader: BlockingGrader) -> bool:
    """Return whether two answers are equal: integers exactly, others within `tolerance` (relative below 1), else by
    `grader`.

    Raises Unscored when the grader failed.
    """
    if answer is None:
        return False
    left, right = _plain(answer), _plain(gold)
    if left == right:
        return True
    if len(left) > MAX_ANSWER_CHARS:
        return False
    first, second = _fraction(left), _fraction(right)
    if first is None or second is None:
        if BEYOND_WRITING.search(left) and not BEYOND_WRITING.search(right):
            return False
        outcome = grader.grade(left, right)
        if outcome == Outcome.GRADER_FAILED:
            raise Unscored(f"math-verify failed on the answer {left[:200]!r} (known: {right[:200]!r})")
        return outcome is Outcome.RIGHT
    apart = abs(first - second)
    if first.denominator == second.denominator == 1:
        return apart == 0
    return apart <= Fraction(tolerance) * min(Fraction(1), max(abs(first), abs(second)))


def is_number(text: str) -> bool:
    """Return whether `text` is a number, or a quotient of numbers."""
    return _fraction(_plain(text)) is not None


def _plain(text: str) -> str:
    """Without blanks and dollars around it, and a number without thousands separators."""
    text = text.strip().strip("$").strip()
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def _fraction(text: str) -> Fraction | None:
    found = NUMBER.fullmatch(text) if len(text) <= MAX_ANSWER_CHARS else None
    if found is None or not Fraction(found["below"] or 1):
        return None
    return Fraction(found["above"]) / Fraction(found["below"] or 1)
