"""Longer completions, up to a length."""

from typing import Any

from atroposlib.compat.reward_fns.base_reward import BaseReward, register_reward


@register_reward
class LengthReward(BaseReward):
    """0 to 1: words of the completion over `target_words`."""

    def __init__(self, target_words: int = 200, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight, **kwargs)
        if target_words < 1:
            raise ValueError(f"target_words {target_words} must be at least 1")
        self.target_words = target_words

    def score(self, completion: str, **kwargs: object) -> float:
        return min(1.0, len(completion.split()) / self.target_words)
