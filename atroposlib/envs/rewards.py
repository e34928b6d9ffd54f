"""How an environment scores an answer: by `score`, by methods with `@reward`, or by the score that a rollout brings.

    class MyEnv(QuestionEnv):
        @reward
        def right(self, item, answer): ...                       a number; None if it cannot be scored

        @reward(weight=0.2)
        async def polite(self, item, answer, messages, state): ...

    rollout ──▶ score, or right + 0.2 polite, or rollout.own_score ──▶ Scored

Each method takes the item and the text of the answer, and what else it declares by name: `messages`, the whole
conversation, and `state`, what the rollout left (`Rollout.state`). It may be a plain function or a coroutine. The
parameters are read once, when the environment is built.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import SupportsFloat, TypeVar, overload

from atroposlib.envs.authors.author_checks import settled
from atroposlib.envs.authors.author_errors import WrongReturn
from atroposlib.envs.errors import Unscored
from atroposlib.envs.rollouts import Rollout, Scored
from atroposlib.envs.server_handling.dispatching.dispatch import gather_or_cancel

F = TypeVar("F", bound=Callable[..., object])

SCORE = "score"  # the method's name
WEIGHT = "__reward_weight__"  # on a method with `@reward`
BY_NAME = ("messages", "state")  # attributes of a Rollout


@overload
def reward(method: F) -> F: ...


@overload
def reward(*, weight: float = 1.0) -> Callable[[F], F]: ...


def reward(method: F | None = None, *, weight: float = 1.0) -> F | Callable[[F], F]:
    """Mark a method as one of the environment's rewards, which are added up by weight. Each has its mean in the
    metrics, `train/reward_NAME`; one of weight 0 has that alone.
    """

    if isinstance(method, (int, float)):
        raise ValueError(f"@reward({method!r}): write @reward(weight={method!r})")
    try:
        value = float(weight)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"@reward(weight={weight!r}): a weight is a finite number, such as 0.5")

    def mark(function: F) -> F:
        setattr(inspect.unwrap(function), WEIGHT, value)  # that of a static method, too
        return function

    return mark if method is None else mark(method)


def as_scored(value: object, method: Callable[..., object]) -> Scored:
    """Convert what `method` returned. Raises WrongReturn for what is not a number."""
    scored = value if isinstance(value, Scored) else Scored(value)  # type: ignore[arg-type]  # which is checked now
    if scored.reward is None:
        return scored
    return replace(scored, reward=_number(scored.reward, method, "a number, a Scored of one", value))


def _number(number: object, method: Callable[..., object], wanted: str, returned: object) -> float:
    if not isinstance(number, SupportsFloat):
        raise WrongReturn(method, returned, f"{wanted}, or None if the answer cannot be scored")
    return float(number)


@dataclass(frozen=True, slots=True)
class Method:
    """A method that scores, and which of `BY_NAME` it declares."""

    name: str
    declared: tuple[str, ...]
    weight: float = 1.0

    async def value(self, env: object, item: object, answer: str, rollout: Rollout) -> object:
        """Return the method's value for one answer."""
        method: Callable[..., object] = getattr(env, self.name)
        return await settled(method(item, answer, **{name: getattr(rollout, name) for name in self.declared}))


@dataclass(frozen=True, slots=True)
class Rewards:
    """Scores answers by one method `score`, by `named` rewards, or, with neither, as the rollout says."""

    score: Method | None
    named: Sequence[Method] = ()

    async def scored(self, env: object, item: object, answer: str, rollout: Rollout) -> Scored:
        """The result of one answer. Raises Unscored, and what the author's methods raise."""
        if self.named:
            return await self._sum(env, item, answer, rollout)
        if self.score is not None:
            return as_scored(await self.score.value(env, item, answer, rollout), getattr(env, self.score.name))
        if rollout.own_score is None:
            raise Unscored("the rollout has no own_score")
        return Scored(rollout.own_score)

    async def _sum(self, env: object, item: object, answer: str, rollout: Rollout) -> Scored:
        values = await gather_or_cancel([each.value(env, item, answer, rollout) for each in self.named])
        rewards = {}
        for each, value in zip(self.named, values, strict=True):
            if value is None:
                raise Unscored(f"the reward {each.name} is None")
            method = getattr(env, each.name)
            rewards[each.name] = _number(value, method, "a number", value)
            if not math.isfinite(rewards[each.name]):
                raise WrongReturn(method, value, "a finite number, or None if the answer cannot be scored")
        # in one rounding, so that 0.7 + 0.2 + 0.1 is 1
        return Scored(math.fsum(each.weight * rewards[each.name] for each in self.named), rewards=rewards)


def rewards_of(env: object, base: type, brings_its_own: bool) -> Rewards:
    """The rewards of an environment, whose `score` is its author's unless it is that of the class `base`. Raises
    ValueError for one with two ways to score, with none (unless its rollouts may bring their own), or with a method of
    other parameters.
    """
    env_cls = type(env)
    weights: dict[str, float] = {}
    for each in reversed(env_cls.__mro__):
        methods = {name: inspect.unwrap(value) for name, value in vars(each).items() if _is_method(value)}
        weights |= {name: getattr(method, WEIGHT) for name, method in methods.items() if hasattr(method, WEIGHT)}
    has_score = getattr(env_cls, SCORE) is not getattr(base, SCORE)
    if has_score and weights:
        raise ValueError(
            f"{env_cls.__name__} has both {SCORE} and methods with @reward ({', '.join(weights)}): keep one way to"
            " score"
        )
    if not (has_score or weights or brings_its_own):
        raise ValueError(
            f"{env_cls.__name__} scores nothing: write score(self, item, answer), methods with @reward, or rollouts"
            " with an own_score"
        )
    named = [_method(env, name, weight) for name, weight in weights.items()]
    return Rewards(_method(env, SCORE) if has_score else None, named)


def _is_method(value: object) -> bool:
    return callable(value) or isinstance(value, classmethod)


def _method(env: object, name: str, weight: float = 1.0) -> Method:
    signature = inspect.signature(getattr(env, name))
    declared = tuple(each for each in BY_NAME if each in signature.parameters)
    try:
        signature.bind("item", "answer", **dict.fromkeys(declared))
    except TypeError as error:
        first = next(iter(inspect.signature(inspect.unwrap(getattr(type(env), name))).parameters), "")
        error = TypeError(f"write self before {first}") if first == "item" else error
        raise ValueError(
            f"{type(env).__name__}.{name}{signature} is called with the item and the answer, and by name with"
            f" {' and '.join(BY_NAME)} if it declares them: {error}"
        ) from None
    return Method(name, declared, weight)
