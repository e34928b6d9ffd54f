"""Tagged parts."""

from collections.abc import Sequence
from typing import Any

from atroposlib.compat.reward_fns.base_reward import BaseReward, register_reward
from atroposlib.grading.extraction import all_tagged, with_thoughts_opened


@register_reward
class FormatReward(BaseReward):
    """1 for a completion with something between a pair of one of `preferred_tags` (or of all, with
    `require_all_tags`), else 0.
    """

    def __init__(
        self,
        preferred_tags: Sequence[str] | None = None,
        require_all_tags: bool = False,
        case_sensitive: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight, **kwargs)
        self.preferred_tags = list(preferred_tags or ("think", "answer"))
        self.require_all_tags = require_all_tags
        self.case_sensitive = case_sensitive

    def score(self, completion: str, **kwargs: object) -> float:
        completion = with_thoughts_opened(completion)
        needed = all if self.require_all_tags else any
        return float(needed(self._has(tag, completion) for tag in self.preferred_tags))

    def _has(self, tag: str, text: str) -> bool:
        found = all_tagged(text, tag) if self.case_sensitive else all_tagged(text.lower(), tag.lower())
        return any(content.strip() for content in found)
