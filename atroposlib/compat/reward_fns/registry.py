"""Rewards by name."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from atroposlib.compat.reward_fns.reward_function import RewardFunction
from atroposlib.flags import nearest

# Built-in rewards, and the module of this package that defines each; what is registered elsewhere needs no entry.
BUILT_IN = {
    "accuracy": "accuracy_reward",
    "accuracyx": "r1_reward",
    "cascadingr1math": "cascading_r1_math_reward",
    "chandasmeter": "chandas_meter_reward",
    "combined": "combined_reward",
    "cosinescaled": "cosine_scaled_reward",
    "crosswordformat": "crossword_format_reward",
    "format": "format_reward",
    "formatreasoning": "r1_reward",
    "length": "length_reward",
    "r1": "r1_reward",
    "reasoningsteps": "reasoning_steps_reward",
    "repetitionpenalty": "repetition_penalty_reward",
    "thinkformat": "think_format_reward",
}


def canonical(name: str) -> str:
    """`AccuracyReward`, `accuracy_reward` and `accuracy` are one name."""
    return name.lower().replace("_", "").removesuffix("reward")


class FunctionReward(RewardFunction):
    """A plain function `f(completions, **kwargs) -> list[float]` as a reward."""

    def __init__(
        self, function: Callable[..., list[float]], weight: float = 1.0, name: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(weight, name or function.__name__, **kwargs)
        self._function = function

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return self._function(completions, **{**self.config, **kwargs})


class RewardRegistry:
    """Name to class, or to plain function."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Class decorator, with or without a name: `@registry.register`, `@registry.register(name="short")`."""

        def keep(each: Any) -> Any:
            self._known[canonical(name or each.__name__)] = each
            return each

        return keep if cls is None else keep(cls)

    def register_function(self, name: str, function: Callable[..., list[float]]) -> None:
        """A plain function as the reward `name`."""
        self._known[canonical(name)] = function

    def get(self, name: str) -> Any:
        """The class, or the function. Raises KeyError that names the nearest known one."""
        key = canonical(name)
        if key not in self._known and key in BUILT_IN:
            importlib.import_module(f"{__package__}.{BUILT_IN[key]}")
        if key not in self._known:
            raise KeyError(f"no reward '{name}'{nearest(key, self.list_registered())}")
        return self._known[key]

    def create(self, name_or_config: str | Mapping[str, Any], **defaults: Any) -> RewardFunction:
        """A reward by name, or by {"type": name, "weight": ..., "params": {...}}; `defaults` stand below the
        configuration.
        """
        config: dict[str, Any] = {"type": name_or_config} if isinstance(name_or_config, str) else dict(name_or_config)
        found = self.get(config.pop("type"))
        params = config.pop("params", None) or {}
        parameters = {**defaults, **config, **params}
        reward: RewardFunction = found(**parameters) if isinstance(found, type) else FunctionReward(found, **parameters)
        return reward

    def list_registered(self) -> list[str]:
        """All names, those of the built-in rewards included."""
        return sorted({*self._known, *BUILT_IN})

    def load_required_functions(self, config: Mapping[str, Any]) -> None:
        """Load what the `reward_functions` (or `reward_funcs`) of a configuration name, so that a wrong name shows at
        once.
        """
        for each in config.get("reward_functions") or config.get("reward_funcs") or []:
            self.get(each if isinstance(each, str) else each["type"])


registry = RewardRegistry()
