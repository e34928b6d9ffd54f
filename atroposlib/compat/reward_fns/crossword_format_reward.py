"""Crossword answers: directions, numbers, and nothing but letters."""

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.compat.reward_fns.base_reward import BaseReward, register_reward

# A line without the blanks around it: "1. OCEAN", "1-Across: OCEAN", "DOWN 3: TREE".
ENTRY = re.compile(r"(?i)(?:(?:across|down)\s*)?[0-9]+[.\-: ]\s*(?:(?:across|down)\s*[:.\-]?\s*)?(\S.*)")


@register_reward
class CrosswordFormatReward(BaseReward):
    """`reward_value` or 0: for a completion that holds every one of `format_patterns`, or by default a numbered answer.

    With `penalize_invalid_chars` numbered answers of other characters than `valid_chars` (any case) score 0.
    """

    def __init__(
        self,
        format_patterns: Sequence[re.Pattern[str] | str] | None = None,
        reward_value: float = 1.0,
        penalize_invalid_chars: bool = True,
        valid_chars: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight, **kwargs)
        self.format_patterns = [re.compile(pattern) for pattern in format_patterns or ()]
        self.reward_value = reward_value
        self.penalize_invalid_chars = penalize_invalid_chars
        self.valid_chars = {*valid_chars.upper(), *valid_chars.lower()}

    def score(self, completion: str, **kwargs: object) -> float:
        answers = [entry[1] for line in completion.split("\n") if (entry := ENTRY.fullmatch(line.strip()))]
        patterns = self.format_patterns
        fits = all(pattern.search(completion) for pattern in patterns) if patterns else bool(answers)
        valid = not self.penalize_invalid_chars or all(set(answer) <= self.valid_chars for answer in answers)
        return self.reward_value if fits and valid else 0.0
