"""Steps that can be seen: numbers, bullets, connecting words."""

import re
from collections.abc import Mapping
from typing import Any

from atroposlib.compat.reward_fns.base_reward import BaseReward, register_reward

PATTERNS = {
    "numbered_steps": re.compile(r"(?im)^[ \t]*(?:step[ \t]+[0-9]+|[0-9]+[.)])"),
    "bullet_points": re.compile(r"(?m)^[ \t]*[-*•][ \t]+\S"),
    "sequence_indicators": re.compile(r"(?i)\b(?:first|second|third|then|next|finally|lastly)\b"),
    "logical_connectors": re.compile(r"(?i)\b(?:because|therefore|thus|hence|since|so that|which means|it follows)\b"),
}
WEIGHTS = {"numbered_steps": 0.5, "bullet_points": 0.3, "sequence_indicators": 0.2, "logical_connectors": 0.2}


@register_reward
class ReasoningStepsReward(BaseReward):
    """0 to 1: 0 below `min_words` words, else `base_score`, and per pattern its weight times count over `min_steps`."""

    def __init__(
        self,
        min_words: int = 10,
        min_steps: int = 3,
        base_score: float = 0.1,
        pattern_weights: Mapping[str, float] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight, **kwargs)
        unknown = set(pattern_weights or {}) - set(PATTERNS)
        if unknown:
            raise ValueError(f"pattern_weights names {sorted(unknown)}; there are {sorted(PATTERNS)}")
        self.min_words = min_words
        self.min_steps = min_steps
        self.base_score = base_score
        self.pattern_weights = {**WEIGHTS, **(pattern_weights or {})}

    def score(self, completion: str, **kwargs: object) -> float:
        if len(completion.split()) < self.min_words:
            return 0.0
        shares = (
            self.pattern_weights[name] * min(1.0, len(pattern.findall(completion)) / self.min_steps)
            for name, pattern in PATTERNS.items()
        )
        return min(1.0, self.base_score + sum(shares))
