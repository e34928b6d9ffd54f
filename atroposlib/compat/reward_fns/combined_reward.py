"""Several rewards as one."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from atroposlib.compat.reward_fns.registry import PlainReward, registry
from atroposlib.compat.reward_fns.reward_function import RewardFunction


@registry.register
class CombinedReward(RewardFunction):
    """The sum of weighted rewards, in the range that their weighted ranges add up to.

    `normalization` "sum" divides by the weights' total, "minmax" stretches each batch to 0..1.
    """

    def __init__(
        self,
        rewards: Sequence[str | Mapping[str, Any] | PlainReward],
        normalization: Literal["none", "sum", "minmax"] = "none",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight, **kwargs)
        if normalization not in ("none", "sum", "minmax"):
            raise ValueError(f"normalization {normalization!r} is not known; choose none, sum or minmax")
        self.normalization = normalization
        self.reward_functions = [registry.create(each) for each in rewards]

    @property
    def name(self) -> str:
        return self._name or "combined_" + "_".join(reward.name for reward in self.reward_functions)

    def set_wandb_logger(self, logger: object) -> None:
        super().set_wandb_logger(logger)
        for reward in self.reward_functions:
            reward.set_wandb_logger(logger)

    def compute(self, completions: list[Any], **kwargs: object) -> list[float]:
        parts = [reward(completions, **kwargs) for reward in self.reward_functions]
        totals = [sum(values) for values in zip(*parts, strict=True)] if parts else [0.0] * len(completions)
        if self.normalization == "sum":
            weights = sum(reward.weight for reward in self.reward_functions)
            return [total / weights for total in totals] if weights > 0 else totals
        low, high = min(totals, default=0.0), max(totals, default=0.0)
        if self.normalization == "minmax" and high > low:
            return [(total - low) / (high - low) for total in totals]
        return totals
