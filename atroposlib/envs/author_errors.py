"""Errors raised by an environment's own code: where they happened, in one line, and how many are tolerated."""

import inspect
import sysconfig
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from atroposlib.envs.errors import EnvError
from atroposlib.envs.server_handling.errors import ServerError

# This library, Python's own, and what is installed beside it.
FOREIGN = [
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
]
WINDOW = 100
ITEM_CHARS_LOGGED = 300
# Where an environment's groups come from, last hand first: the first of these that its author wrote is named for a bad
# one.
GIVERS = ("postprocess_histories", "collect_trajectories", "collect_trajectory", "score")


class TooManyFailures(EnvError):
    """The environment's own code failed on more items than its budget allows."""


class MalformedGroup(ValueError):
    """A group that no trainer can use, whatever was sampled."""


def is_authors(filename: str) -> bool:
    """Whether a source file is neither this library's nor Python's nor installed."""
    path = Path(filename)
    return (
        not filename.startswith("<frozen")
        and "site-packages" not in path.parts
        and not any(root in path.parents for root in FOREIGN)
    )


def giver(env_cls: type) -> str:
    """`my_env.py:17 in collect_trajectories`: the method that gives the environment's groups; empty when its author
    wrote none.
    """
    methods = [inspect.unwrap(getattr(env_cls, name)) for name in GIVERS if hasattr(env_cls, name)]
    written = [
        method.__code__ for method in methods if inspect.isfunction(method) and is_authors(method.__code__.co_filename)
    ]
    return f"{written[0].co_filename}:{written[0].co_firstlineno} in {written[0].co_name}" if written else ""


def origin(error: BaseException, given_at: str = "") -> str:
    """`ZeroDivisionError: division by zero at my_env.py:42 in score`: the innermost line that is the author's.

    An error with no such line came of what the author's method returned: it is put down to `given_at`, unless a
    server failed.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames if is_authors(frame.filename)]
    returned = [given_at] if given_at and not isinstance(error, ServerError) else []
    where = (own or returned or [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames])[-1:]
    words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")
    return " at ".join([words, *where])


def shown(item: Any) -> str:
    """`item` on one line, cut."""
    text = " ".join(repr(item).split())
    return text if len(text) <= ITEM_CHARS_LOGGED else f"{text[:ITEM_CHARS_LOGGED]}..."


class ErrorBudget:
    """Of the last 100 items, `allowed` may fail by the environment's own fault. An inference server that fails costs
    nothing.

    `given_at` is where the environment's groups come from, see `giver`.
    """

    def __init__(self, allowed: int, given_at: str = "") -> None:
        self._allowed = allowed
        self.given_at = given_at
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def note_success(self) -> None:
        """An item was dealt with."""
        self._recent.append(False)

    def note_failure(self, error: BaseException, item: str) -> None:
        """An item was lost to `error`. Raises TooManyFailures when that is more than is borne."""
        if isinstance(error, ServerError):
            return
        self._recent.append(True)
        failed = sum(self._recent)
        if failed > self._allowed:
            raise TooManyFailures(
                f"{failed} of the last {len(self._recent)} items failed in the environment's own code (limit "
                f"{self._allowed}, --env.max_failed_items). The last one, {item}: {origin(error, self.given_at)}. "
                "Correct that"
                " line, or raise the limit"
            ) from error
