"""Thoughts in one <think> block, and an answer after it."""

import re

from atroposlib.compat.reward_fns.base_reward import BaseReward, register_reward
from atroposlib.grading.extraction import with_thoughts_opened

THINK_THEN_ANSWER = re.compile(r"\s*<think>(?P<thoughts>.+?)</think>(?P<answer>.*)", re.DOTALL)


@register_reward
class ThinkFormatReward(BaseReward):
    """0 to 1: 1 for `<think>thoughts</think> answer`, half without an answer, 0 for anything else or more tags. The
    chat template may have written the opening tag.
    """

    def score(self, completion: str, **kwargs: object) -> float:
        found = THINK_THEN_ANSWER.fullmatch(with_thoughts_opened(completion))
        if (
            found is None
            or not found["thoughts"].strip()
            or "<think>" in found["thoughts"]
            or re.search("</?think>", found["answer"])
        ):
            return 0.0
        return 1.0 if found["answer"].strip() else 0.5
