"""`RewardFunction`: the base of all rewards."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.errors import Unscored


class RewardFunction(ABC):
    """Scores completions. A call is `compute` times `weight`; what `compute` raises is raised, naming the reward."""

    def __init__(self, weight: float = 1.0, name: str | None = None, **kwargs: object) -> None:
        self.weight = weight
        self.config = kwargs
        self.wandb_logger: Any = None
        self._name = name

    @property
    def name(self) -> str:
        """The given name, else the class's."""
        return self._name or type(self).__name__.lower()

    @abstractmethod
    def compute(self, completions: list[Any], **kwargs: object) -> list[float]:
        """One reward a completion, before the weight. Keyword arguments are what the caller knows, e.g. `solution`."""

    def __call__(self, completions: list[Any], **kwargs: object) -> list[float]:
        """The weighted rewards. Raises RuntimeError when `compute` failed: a zero would be a reward that nobody gave.

        Raises Unscored when an answer could not be scored.
        """
        try:
            rewards = self.compute(completions, **kwargs)
        except Unscored:
            raise
        except Exception as error:
            raise RuntimeError(f"the reward '{self.name}' failed on {len(completions)} completions: {error}") from error
        if len(rewards) != len(completions):
            raise RuntimeError(
                f"the reward '{self.name}' gave {len(rewards)} values for {len(completions)} completions"
            )
        weighted = [self.weight * reward for reward in rewards]
        self.log_metrics(rewards, weighted)
        return weighted

    def set_wandb_logger(self, logger: object) -> None:
        """Something with `log(dict)`, which then gets the mean and range of every call's rewards."""
        self.wandb_logger = logger

    def log_metrics(self, raw_rewards: Sequence[float], weighted_rewards: Sequence[float]) -> None:
        """Log them, if there is a logger."""
        if self.wandb_logger is None or not raw_rewards:
            return
        count = len(raw_rewards)
        self.wandb_logger.log(
            {
                f"reward/{self.name}/mean_raw": sum(raw_rewards) / count,
                f"reward/{self.name}/mean_weighted": sum(weighted_rewards) / count,
                f"reward/{self.name}/min": min(raw_rewards),
                f"reward/{self.name}/max": max(raw_rewards),
            }
        )

    @staticmethod
    def get_content(completion: object) -> str:
        """The text of a completion: a string, a message, or a conversation, of which the last message counts."""
        if isinstance(completion, str):
            return completion
        if isinstance(completion, dict):
            return str(completion["message"]["content"] if "message" in completion else completion.get("content") or "")
        if isinstance(completion, (list, tuple)) and completion:
            return RewardFunction.get_content(completion[-1])
        raise TypeError(f"a completion must be text, a message or a list of messages, not {completion!r}")


def one_each(value: object, count: int, what: str) -> list[object]:
    """`value` for each of `count` completions: a list as it is, anything else repeated. Raises ValueError."""
    if value is None:
        raise ValueError(f"no {what} was given")
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) == 1:
        return list(value) * count
    if len(value) != count:
        raise ValueError(f"{len(value)} {what}s for {count} completions")
    return list(value)
