"""Errors of an environment's own code: where they happened, in one line; each in full once; how many are tolerated.

error ──origin──▶ `IndexError: list index out of range at my_env.py:17 in score`
      ──ErrorLog──▶ this line and the traceback; if it comes again, a count
      ──ErrorBudget──▶ TooManyFailures
"""

import inspect
import logging
import sysconfig
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from atroposlib.envs.errors import EnvError
from atroposlib.envs.server_handling.errors import ServerError
from atroposlib.logs import get_logger

log = get_logger(__name__)

# This library, Python's own, and what is installed beside it.
FOREIGN = [
    Path(__file__).parents[2],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
]
GENERATED = ("<frozen", "<template>")  # the latter is a chat template's
OWN_CODE = " in the environment's own code"
CORRECT = "Correct that line"
NOT_THEIRS = "That line is a library's and not the environment's; the log has the traceback"
WINDOW = 100
ITEM_CHARS_LOGGED = 300
RETURNED_CHARS_SHOWN = 80
REPORT_EVERY_S = 60.0
# Where an environment's groups come from, last hand first: the first of these that its author wrote is named for a bad
# one.
GIVERS = ("postprocess_histories", "collect_trajectories", "collect_trajectory", "score")
# What these functions of the framework work with is what the author's method returned.
WORKS_WITH = {"rollouts": "prompt", "conversation": "prompt"}


class AuthorError(EnvError):
    """The environment's own code is wrong, and the run ends; the message names file, line, method and rule."""


class TooManyFailures(AuthorError):
    """The environment's own code failed on more items than its budget allows."""


class MalformedGroup(ValueError):
    """A group that no trainer can use, whatever was sampled."""


class WrongReturn(TypeError):
    """An author's `method` returned something instead of what is `wanted`."""

    def __init__(self, method: Callable[..., object], returned: object, wanted: str) -> None:
        what = f"{type(returned).__name__} {shown(returned, RETURNED_CHARS_SHOWN)}" if returned is not None else "None"
        super().__init__(f"{method.__name__} returned {what} instead of {wanted}")
        self.where = location(method)


# What the framework raises: its own frames tell an author nothing.
SAY_ALL = (ServerError, MalformedGroup, WrongReturn)


def is_authors(filename: str) -> bool:
    """Return whether a source file is neither this library's nor Python's nor installed."""
    path = Path(filename)
    return (
        not filename.startswith(GENERATED)
        and "site-packages" not in path.parts
        and not any(root in path.parents for root in FOREIGN)
    )


def location(method: Any) -> str:
    """`my_env.py:17 in score`: where the author wrote a method; empty for one of somebody else's."""
    function = inspect.unwrap(getattr(method, "__func__", method))
    if not inspect.isfunction(function) or not is_authors(function.__code__.co_filename):
        return ""
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def written_by_author(env_cls: type) -> dict[str, str]:
    """The locations of the author's methods that groups come from, by name, last hand first."""
    names = dict.fromkeys([*GIVERS, *WORKS_WITH.values()])
    methods = {name: location(getattr(env_cls, name)) for name in names if hasattr(env_cls, name)}
    return {name: where for name, where in methods.items() if where}


def origin(error: BaseException, written: Mapping[str, str] | None = None) -> str:
    """`ZeroDivisionError: division by zero at my_env.py:42 in score`: the innermost line that is the author's.

    An error with no such line came of what a method returned: it is put down to the one of `written` whose result the
    framework worked with, unless a server failed.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    where = (blamed(error, written) or [_place(frame) for frame in frames])[-1:]
    words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")
    return " at ".join([words, *where])


def blamed(error: BaseException, written: Mapping[str, str] | None = None) -> list[str]:
    """Lines of the author's that an error is put down to, the innermost last; none if it is a library's alone."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [_place(frame) for frame in frames if is_authors(frame.filename)]
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if not own and before is not None:  # one of the author's, which Python or a library raised as another
        own = blamed(before)
    if isinstance(error, WrongReturn) and error.where:
        own = [error.where]
    elif not own and written and not isinstance(error, ServerError):
        own = [_worked_with(frames, written)]
    return own


def authors_lines(*frames: FrameType) -> list[str]:
    """List the author's lines in the stacks of frames, the innermost last."""
    stack = [each for frame in frames for each in traceback.extract_stack(frame)]
    return [_place(each) for each in stack if is_authors(each.filename)]


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _worked_with(frames: Sequence[traceback.FrameSummary], written: Mapping[str, str]) -> str:
    inside_out = (WORKS_WITH.get(frame.name, "") for frame in reversed(frames))
    return next((written[name] for name in inside_out if name in written), next(iter(written.values())))


def shown(item: object, chars: int = ITEM_CHARS_LOGGED) -> str:
    """`item` on one line, cut."""
    text = " ".join(repr(item).split())
    return text if len(text) <= chars else f"{text[:chars]}..."


class ErrorLog:
    """Logs an error with its traceback. The same one again, of one type at one line, is counted, and logged once a
    minute without. `now` is the clock, in seconds.
    """

    def __init__(self, written: Mapping[str, str] | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._written = written or {}
        self._now = now
        self._seen: Counter[tuple[str, str]] = Counter()
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}  # when last, and the count by then

    @property
    def giver(self) -> str:
        """`my_env.py:17 in collect_trajectories`: the method that groups come from; empty if its author wrote none."""
        return next(iter(self._written.values()), "")

    def origin(self, error: BaseException) -> str:
        """Name the origin of an error, as the function `origin` does, knowing the methods that the author wrote."""
        return origin(error, self._written)

    def note(self, error: Exception, text: str, level: int = logging.ERROR) -> None:
        """Log `text: ORIGIN`, or count."""
        if (more := self._unsaid_if_due(self._kind(error))) is None:
            return
        again = f" (the same error {more} more times before)" if more else ""
        with_traceback = self._seen[self._kind(error)] == 1 and not isinstance(error, SAY_ALL)
        log.log(level, "%s: %s%s", text, self.origin(error), again, exc_info=error if with_traceback else None)

    def note_reason(self, cause: str, text: str) -> None:
        """Warn of `text`, which says all, or count it as one more of the same cause."""
        if (more := self._unsaid_if_due(("", cause))) is not None:
            log.warning("%s%s", text, f" ({more} more by {cause} before)" if more else "")

    def _unsaid_if_due(self, kind: tuple[str, str]) -> int | None:
        """Count one more. Return None if one was logged within the minute, else how many were not since then."""
        self._seen[kind] += 1
        at, count = self._logged.get(kind, (0.0, 0))
        if count and self._now() - at < REPORT_EVERY_S:
            return None
        self._logged[kind] = self._now(), self._seen[kind]
        return self._seen[kind] - count - 1

    def blamed(self, error: BaseException) -> list[str]:
        """List the blamed lines, as the function `blamed` does, knowing the methods that the author wrote."""
        return blamed(error, self._written)

    def again(self, error: BaseException) -> str:
        """` (the same error 32 more times)`; empty when it was noted once."""
        more = self._seen[self._kind(error)] - 1
        return f" (the same error {more} more times)" if more > 0 else ""

    def _kind(self, error: BaseException) -> tuple[str, str]:
        return type(error).__name__, self.origin(error).rpartition(" at ")[2]


class ErrorBudget:
    """Lets `allowed` of the last 100 items fail by the environment's own fault. An inference server that fails costs
    nothing.
    """

    def __init__(self, allowed: int, errors: ErrorLog | None = None) -> None:
        self._allowed = allowed
        self._errors = errors or ErrorLog()
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def note_success(self) -> None:
        """An item was dealt with."""
        self._recent.append(False)

    def note_failure(self, error: Exception, item: str, then: str = "") -> None:
        """An item was lost to `error`, which is logged with what is done `then`. Raises TooManyFailures when that is
        more than is allowed.
        """
        self._errors.note(error, f"Dropped the item {item}{then}")
        if isinstance(error, ServerError):
            return
        self._recent.append(True)
        failed = sum(self._recent)
        if failed > self._allowed:
            is_own = bool(self._errors.blamed(error))
            raise TooManyFailures(
                f"{failed} of the last {len(self._recent)} items failed{OWN_CODE if is_own else ''} (limit "
                f"{self._allowed}, --env.max_failed_items). The last one, {item}: {self._errors.origin(error)}"
                f"{self._errors.again(error)}. {CORRECT if is_own else NOT_THEIRS}, or raise the limit"
            ) from error


@contextmanager
def needed(what: str, method: Callable[..., object]) -> Iterator[None]:
    """Guard a call of an author's `method` that the run cannot do without: log what it raises with its traceback, and
    end the run with an AuthorError.
    """
    try:
        yield
    except (EnvError, ServerError):
        raise
    except (Exception, SystemExit) as error:  # also an `exit()`, with which a program's work is not done
        if not isinstance(error, SAY_ALL):
            log.error("%s failed", what, exc_info=error)
        where = location(method)
        written = {what: where} if where else None
        remedy = CORRECT if blamed(error, written) else NOT_THEIRS
        raise AuthorError(f"{what} failed: {origin(error, written)}. {remedy}") from error
