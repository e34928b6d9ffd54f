"""`BaseReward` and `@register_reward`: a reward of one completion, for those who need no more.

@register_reward("polite")
class PoliteReward(BaseReward):
    def score(self, completion: str, **kwargs) -> float:
        return float("please" in completion)
"""

from abc import abstractmethod
from typing import Any

from atroposlib.compat.reward_fns.registry import registry
from atroposlib.compat.reward_fns.reward_function import RewardFunction


class BaseReward(RewardFunction):
    """A reward that looks at one text at a time; `registry.create` makes it like any other."""

    @abstractmethod
    def score(self, completion: str, **kwargs: object) -> float:
        """The reward of one completion's text."""

    def compute(self, completions: list[object], **kwargs: object) -> list[float]:
        return [self.score(self.get_content(completion), **kwargs) for completion in completions]


def register_reward(name_or_class: str | type) -> Any:
    """Class decorator, `@register_reward` or `@register_reward("name")`."""
    if isinstance(name_or_class, str):
        return registry.register(name=name_or_class)
    return registry.register(name_or_class)
