"""Reward functions: completions in, one number each out; made by name from a registry, and combined.

    @registry.register
    class ShortReward(RewardFunction):
        def compute(self, completions, **kwargs) -> list[float]: ...

    registry.create("short", weight=0.5)     or {"type": "short", "weight": 0.5, "params": {...}}

Names ignore case, "_" and "reward".
One file a built-in reward; the registry loads it when it is first asked for.
"""

from atroposlib.compat.reward_fns.base_reward import BaseReward, register_reward
from atroposlib.compat.reward_fns.combined_reward import CombinedReward
from atroposlib.compat.reward_fns.registry import registry
from atroposlib.compat.reward_fns.reward_function import RewardFunction

__all__ = ["BaseReward", "CombinedReward", "RewardFunction", "register_reward", "registry"]
