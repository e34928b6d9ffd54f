"""Crossword answers: directions, numbers, and nothing but letters."""

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

# "1. OCEAN", "1-Across: OCEAN", "DOWN 3: TREE"
ENTRY = re.compile(r"(?im)^\s*(?:(?:across|down)\s*)?\d+[.\-: ]\s*(?:(?:across|down)\s*[:.\-]?\s*)?([^\s].*)$")


@registry.register
class CrosswordFormatReward(RewardFunction):
    """`reward_value` for a completion in which every one of `format_patterns` is found, or by default a numbered answer.

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
        self.format_patterns = [re.compile(pattern) for pattern in format_patterns or (ENTRY,)]
        self.reward_value = reward_value
        self.penalize_invalid_chars = penalize_invalid_chars
        self.valid_chars = set(valid_chars.upper())

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self.reward_value if self._fits(self.get_content(completion)) else 0.0 for completion in completions]

    def _fits(self, text: str) -> bool:
        if not all(pattern.search(text) for pattern in self.format_patterns):
            return False
        answers = [found.strip().upper() for found in ENTRY.findall(text)]
        return not self.penalize_invalid_chars or all(set(answer) <= self.valid_chars for answer in answers)
