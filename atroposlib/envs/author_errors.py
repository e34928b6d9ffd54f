"""What an environment's own code raises: where it happened, in one line, and how much of it is borne."""

import traceback
from collections import deque
from pathlib import Path

from atroposlib.envs.errors import EnvError
from atroposlib.envs.server_handling.errors import ServerError

LIBRARY = Path(__file__).parents[1]
WINDOW = 100


class TooManyFailures(EnvError):
    """The environment's own code failed on more items than its budget allows."""


def origin(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero at my_env.py:42 in score`: the innermost line that is neither this library's nor installed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if LIBRARY not in Path(frame.filename).parents and "site-packages" not in frame.filename]
    where = (own or frames)[-1:]
    words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")
    return f"{words} at {where[0].filename}:{where[0].lineno} in {where[0].name}" if where else words


class ErrorBudget:
    """Of the last 100 items, `allowed` may fail by the environment's own fault. An inference server that fails costs nothing."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
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
                f"{failed} of the last {len(self._recent)} items failed by the environment's own code, {self._allowed} may "
                f"(--env.max_failed_items). The last one, {item}: {origin(error)}. Correct that line, or raise the limit"
            ) from error
