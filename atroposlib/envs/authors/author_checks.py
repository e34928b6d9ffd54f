"""Checks of an author's class before it runs, and of what its methods return. Each mistake is one line with the file,
the line, the method, the rule and the remedy.

    check_class(env_cls, command)        before anything is waited for ──▶ AuthorError
    messages, answers, trajectory, ...   around each call of a method ──▶ WrongReturn, which the error budget counts
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from typing import Any, TypeGuard

from atroposlib.config import MAX_NAME, check_name
from atroposlib.envs.authors.author_errors import AuthorError, WrongReturn, is_authors, location, shown
from atroposlib.envs.rollouts import Rollout
from atroposlib.wire.typed import all_encodable

# How the framework calls what an author writes, and what it gives.
METHODS = {
    "setup": ("async def setup(self)", "nothing"),
    "get_next_item": ("async def get_next_item(self)", "the next item to sample for, or None"),
    "training_item": ("async def training_item(self, number)", "question 0, 1, 2, ..."),
    "prompt": ("def prompt(self, item)", 'a list of messages, such as [{"role": "user", "content": "..."}]'),
    "score": ("async def score(self, item, answer)", "the reward of an answer, a number"),
    "reference_answer": ("def reference_answer(self, item)", "the right answer as text, or None"),
    "rollouts": ("async def rollouts(self, item, n, split, temperature, top_p)", "a list of n Rollout"),
    "collect_trajectory": (
        "async def collect_trajectory(self, item)",
        "one scored rollout and a list of items for later: `return rollout, []`",
    ),
    "collect_trajectories": (
        "async def collect_trajectories(self, item)",
        "a group of scored rollouts and a list of items for later: `return group, []`",
    ),
    "evaluate": ("async def evaluate(self)", 'metrics, such as {"accuracy": 0.5}'),
}
# An author who overrides one of these makes groups, or sends them, by it.
MAKE_GROUPS = ("collect_trajectory", "collect_trajectories", "handle_env", "add_train_workers", "env_manager")
MAKE_NONE = ("atroposlib.envs.run.environment", "atroposlib.envs.base")  # modules whose methods of these names do not
PLAIN = ("prompt", "reference_answer")  # called without `await`, by authors too
CHECK_THEMSELVES = ("score",)  # its parameters may be more
REQUIRED = ("tokens", "masks", "scores")


async def settled(value: object) -> Any:
    """Return the result of a method that an author writes as a coroutine or as a plain function:
    `await settled(env.setup())`. Raises a RuntimeError if something that the method waits for is cancelled: as a
    CancelledError it would end this task, which nobody cancelled, without a word. Of an ExceptionGroup, such as a
    TaskGroup's, the first error is raised: what it means is told from its kind.
    """
    try:
        return await value if inspect.isawaitable(value) else value
    except ExceptionGroup as group:
        error = group.exceptions[0]
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        what = "what it waited for was cancelled (CancelledError)"
        raise RuntimeError(what).with_traceback(error.__traceback__) from None


def check_class(env_cls: type, command: str) -> None:
    """Raise AuthorError for a class of which a method is missing, or cannot be called as `command` calls it, or whose
    name would not be one in logs and lists.
    """
    _check_name(env_cls)
    abstract: frozenset[str] = getattr(env_cls, "__abstractmethods__", frozenset())
    missing = [*(name for name in METHODS if name in abstract), *sorted(abstract - METHODS.keys())]
    if not missing and command != "evaluate" and all(_module_of(env_cls, name) in MAKE_NONE for name in MAKE_GROUPS):
        missing = ["collect_trajectory"]
    if missing:
        raise AuthorError(
            f"{class_location(env_cls)} has no {' and no '.join(missing)}; write {' and '.join(map(_rule, missing))}"
        )
    for name, (signature, _) in METHODS.items():
        method = inspect.unwrap(getattr(env_cls, name, env_cls))
        where = location(method) if _is_called(env_cls, name) else ""
        if where and name in PLAIN and inspect.iscoroutinefunction(method):
            raise AuthorError(f"{where} is a coroutine, but is called without await; write `{signature}`")
        if where and (inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)):
            raise AuthorError(f"{where} gives its result with `yield`; give it with `return`: write {_rule(name)}")
        if where and name not in CHECK_THEMSELVES and not _takes(method, signature):
            raise AuthorError(
                f"{where} has the parameters {inspect.signature(method)}, but is called with others; write"
                f" {_rule(name)}"
            )


def _check_name(env_cls: type) -> None:
    name = getattr(env_cls, "name", None)
    try:
        check_name(name or "")
    except (ValueError, TypeError, AttributeError):
        raise AuthorError(
            f"{class_location(env_cls)} has the name {shown(name, 80)}; write `name` as text of at most {MAX_NAME}"
            " printable characters"
        ) from None


def _is_called(env_cls: type, name: str) -> bool:
    """Return whether the framework calls the method: a class of its own has one. Any other is the author's alone."""
    return any(name in vars(owner) for owner in env_cls.__mro__ if is_ours(owner))


def is_ours(owner: type) -> bool:
    """Return whether a class is the framework's."""
    return owner.__module__.startswith("atroposlib.")


def _module_of(env_cls: type, name: str) -> str:
    """The module whose class has the method `name` of `env_cls`."""
    return next((owner.__module__ for owner in env_cls.__mro__ if name in vars(owner)), MAKE_NONE[0])


def _rule(name: str) -> str:
    signature, gives = METHODS.get(name, (f"def {name}(self)", "what its base class wants"))
    return f"`{signature}`, which returns {gives}"


def class_location(env_cls: type) -> str:
    """`MyEnv (my_env.py:4)`."""
    try:
        file, line = inspect.getsourcefile(env_cls) or "", inspect.getsourcelines(env_cls)[1]
    except (OSError, TypeError):  # no source: a class that was made by a call
        return env_cls.__name__
    return f"{env_cls.__name__} ({file}:{line})" if is_authors(file) else env_cls.__name__


def _takes(method: Callable[..., object], signature: str) -> bool:
    """Return whether `method` can be called with as many arguments as `signature` has."""
    try:
        inspect.signature(method).bind(*signature.partition("(")[2].split(","))
    except TypeError:
        return False
    return True


def questions(setup: Callable[..., object], held_out: object) -> None:
    """Raise AuthorError unless `held_out`, which `setup` has set, can be counted and cut, as a list can."""
    if not isinstance(held_out, Sized) or not hasattr(held_out, "__getitem__"):
        raise AuthorError(
            f"{location(setup) or 'setup'} set held_out to {shown(held_out, 80)}, which cannot be counted and cut; make"
            " it a list, such as list(...)"
        )


def messages(prompt: Callable[[object], object], item: object) -> Any:
    """Return the messages that `prompt` gives for `item`, their texts encodable. Raises WrongReturn."""
    returned: Any = prompt(item)
    if not _is_list_of(Mapping, returned) or not returned or not all(map(_is_message, returned)):
        raise WrongReturn(prompt, returned, METHODS["prompt"][1])
    return all_encodable(returned)


def _is_message(value: Mapping[str, object]) -> bool:
    return "role" in value and ("content" in value or "tool_calls" in value)


def answers(rollouts: Callable[..., object], returned: Any, n: int) -> Sequence[Rollout]:
    """Return `returned`, the answers that `rollouts` gave when it was asked for `n`. Raises WrongReturn."""
    if not _is_list_of(Rollout, returned) or len(returned) != n:
        raise WrongReturn(rollouts, returned, f"a list of {n} Rollout")
    if location(rollouts) and (empty := [rollout for rollout in returned if not rollout.sequences]):
        raise WrongReturn(rollouts, empty[0], 'a Rollout with sequences, such as managed.get_state()["nodes"]')
    return list(returned)


async def trajectory(collect_trajectory: Callable[[object], Awaitable[object]], item: object) -> tuple[Any, Any]:
    """Return the rollout and the later items that `collect_trajectory` gives for `item`. Raises WrongReturn."""
    rollout, later = _pair("collect_trajectory", collect_trajectory, await settled(collect_trajectory(item)))
    for sequence in rollout if isinstance(rollout, list) else [rollout] if rollout else []:
        if not isinstance(sequence, Mapping) or any(sequence.get(key) is None for key in REQUIRED):
            raise WrongReturn(collect_trajectory, sequence, f"a dict with {', '.join(REQUIRED)}")
    return rollout, later


async def groups(collect_trajectories: Callable[[object], Awaitable[object]], item: object) -> tuple[Any, Any]:
    """Return the groups and the later items that `collect_trajectories` gives for `item`. Raises WrongReturn."""
    returned, later = _pair("collect_trajectories", collect_trajectories, await settled(collect_trajectories(item)))
    for group in returned if isinstance(returned, list) else [returned]:
        if group and not isinstance(group, Mapping):
            raise WrongReturn(collect_trajectories, group, f"a dict with the lists {', '.join(REQUIRED)}")
    return returned, later


async def metrics(evaluate: Callable[[], Awaitable[object]]) -> Mapping[str, object] | None:
    """Return the metrics that `evaluate` gives. Raises WrongReturn."""
    returned: Mapping[str, object] | None = await settled(evaluate())
    if returned is not None and not isinstance(returned, Mapping):
        raise WrongReturn(evaluate, returned, METHODS["evaluate"][1])
    return returned


def _pair(name: str, method: Callable[..., object], returned: object) -> tuple[object, object]:
    if not isinstance(returned, (tuple, list)) or len(returned) != 2 or isinstance(returned[1], Mapping):
        raise WrongReturn(method, returned, METHODS[name][1])
    return returned[0], returned[1]


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_list_of(kind: type, value: object) -> bool:
    return _is_list(value) and all(isinstance(each, kind) for each in value)
