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


# Of all completions, with what the caller knows as keywords: a reward each, or one for all.
PlainReward = Callable[..., list[float] | float]


class FunctionReward(RewardFunction):
    """A plain function `f(completions, **kwargs)` as a reward; one number is the reward of every completion."""

    def __init__(self, function: PlainReward, weight: float = 1.0, name: str | None = None, **kwargs: object) -> None:
        super().__init__(weight, name or function.__name__, **kwargs)
        self._function = function

    def compute(self, completions: list[object], **kwargs: object) -> list[float]:
        rewards = self._function(completions, **{**self.config, **kwargs})
        return [rewards] * len(completions) if isinstance(rewards, (int, float)) else list(rewards)


class RewardRegistry:
    """Name to class, or to plain function."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Class decorator, with or without a name: `@registry.register`, `@registry.register(name="short")`."""

        def keep(each: Any) -> object:
            self._known[canonical(name or each.__name__)] = each
            return each

        return keep if cls is None else keep(cls)

    def register_function(self, name: str, function: PlainReward) -> None:
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

    def create(self, name_or_config: str | Mapping[str, Any] | PlainReward, **defaults: Any) -> RewardFunction:
        """A reward by name, by {"type": name, "weight": ..., "params": {...}}, or of a plain function; `defaults` hold
        where the configuration says nothing. One that is a reward already stays as it is.
        """
        if isinstance(name_or_config, RewardFunction):
            return name_or_config
        if callable(name_or_config):
            return FunctionReward(name_or_config, **defaults)
        config: dict[str, Any] = {"type": name_or_config} if isinstance(name_or_config, str) else dict(name_or_config)
        found = self.get(config.pop("type"))
        params = config.pop("params", None) or {}
        parameters = {**defaults, **config, **params}
        reward: RewardFunction = found(**parameters) if isinstance(found, type) else FunctionReward(found, **parameters)
        return reward

    def list_registered(self) -> list[str]:
        """All names, those of the built-in rewards included."""
        return sorted({*self._known, *BUILT_IN})

    def load_required_functions(self, config: object) -> set[str]:
        """Load the rewards that a configuration names, so that a wrong name shows at once; their names.

        They are in `reward_functions` and `reward_funcs` of the configuration, in `dataset_reward_funcs` and
        `reward_funcs` of each of its `datasets`, and in `reward_funcs` of each of their `types`. All may be dicts or
        objects.
        """
        datasets = _of(config, "datasets")
        kinds = [kind for dataset in datasets for kind in _of(dataset, "types")]
        named = [*_of(config, "reward_functions"), *_of(config, "reward_funcs")]
        named += [name for dataset in datasets for name in _of(dataset, "dataset_reward_funcs")]
        named += [name for holder in (*datasets, *kinds) for name in _of(holder, "reward_funcs")]
        names = {each if isinstance(each, str) else each["type"] for each in named}
        for name in names:
            self.get(name)
        return names


def _of(holder: object, key: str) -> list[Any]:
    """The list that a dict or an object holds as `key`; none if it has none."""
    return list((holder.get(key) if isinstance(holder, Mapping) else getattr(holder, key, None)) or [])


registry = RewardRegistry()
