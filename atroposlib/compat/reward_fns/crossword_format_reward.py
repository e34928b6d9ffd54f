"""Crossword answers: directions, numbers, and nothing but letters."""

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.compat.reward_fns.registry import registry
from atroposlib.compat.reward_fns.reward_function import RewardFunction

# A line without the blanks around it: "1. OCEAN", "1-Across: OCEAN", "DOWN 3: TREE".
ENTRY = re.compile(r"(?i)(?:(?:across|down)\s*)?[0-9]+[.\-: ]\s*(?:(?:across|down)\s*[:.\-]?\s*)?(\S.*)")


@registry.register
class CrosswordFormatReward(RewardFunction):
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

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self.reward_value if self._fits(self.get_content(completion)) else 0.0 for completion in completions]

    def _fits(self, text: str) -> bool:
        entries = [ENTRY.fullmatch(line.strip()) for line in text.split("\n")]
        answers = [entry[1] for entry in entries if entry]
        if not (all(pattern.search(text) for pattern in self.format_patterns) if self.format_patterns else answers):
            return False
        return not self.penalize_invalid_chars or all(set(answer) <= self.valid_chars for answer in answers)
