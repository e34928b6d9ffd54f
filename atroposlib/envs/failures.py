"""Rollouts that fail, and their siblings that continue.

    attempt(rollout) x n ──▶ results and Failures ──▶ survivors: those with a result, and how many failed, by cause
                                                            └── fewer than two: raises what lost the group

A failed rollout has no score. It is never a 0: that would teach the model from the fault of a server or a scorer. It is
counted in its group's `failed` instead, and so takes its place in the batch. If it were sampled again, short rollouts
would take the places of long ones.
"""

from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from atroposlib.clients.activity import ROLLOUTS_FAILED
from atroposlib.envs.authors.author_checks import settled
from atroposlib.envs.authors.author_errors import origin
from atroposlib.envs.errors import EnvError, Unscored
from atroposlib.envs.limits.time_limit import time_limit
from atroposlib.envs.server_handling.errors import ServerError
from atroposlib.type_definitions import Messages
from atroposlib.wire.batching import Cause

T = TypeVar("T")
NEEDED = 2  # rollouts that a group is left with, for advantages to be relative to something


class RolloutFailed(Exception):
    """Raise it where one rollout cannot continue, through no fault of the policy."""

    def __init__(self, reason: str = "", cause: Cause = "infrastructure") -> None:
        super().__init__(reason)
        self.cause = cause


class GroupLost(Exception):
    """Too few rollouts of a group are left, and no error of the environment's own code is to blame. `kind` is counted
    among the reasons for which groups are dropped, `count` in the metrics.
    """

    def __init__(self, reason: str, kind: str, count: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.count = count


EXPECTED = (TimeoutError, RolloutFailed, Unscored, ServerError)


@dataclass(frozen=True, slots=True)
class Failure:
    """One rollout that failed; with its messages where it was sampled, and only its score is missing."""

    cause: Cause
    error: Exception
    messages: Messages | None = None

    @property
    def is_expected(self) -> bool:
        """Return whether the error's text says all. Of other errors an author wants to see where they were raised."""
        return isinstance(self.error, EXPECTED)

    def __str__(self) -> str:
        is_wordless = not str(self.error) and self.error.__traceback__ is not None  # such as that of asyncio.wait_for
        return origin(self.error) if is_wordless or not self.is_expected else str(self.error)


async def attempt(
    work: Awaitable[T], limit_s: float, late: Cause = "timeout", other: Cause = "environment"
) -> T | Failure:
    """The result of `work`, or why there is none. `late` and `other` are the causes of one that takes longer than
    `limit_s` seconds (0 or less: any time), and of one whose own code raises. An EnvError belongs to no rollout, and is
    raised.
    """
    try:
        async with time_limit(limit_s) as limit:
            result: T = await settled(work)
            return result
    except EnvError:
        raise
    except TimeoutError as error:
        return Failure(late, too_slow(limit_s) if limit.ran_out else error)
    except RolloutFailed as error:
        return Failure(error.cause, error)
    except Unscored as error:
        return Failure("scorer", error)
    except ServerError as error:
        return Failure("infrastructure", error)
    except (Exception, SystemExit) as error:  # an answer that is run as a program may bring the latter
        return Failure(other, carried(error))


def carried(error: BaseException) -> Exception:
    """Return `error`, or a RuntimeError that tells it where it is one that no Future can hold (StopIteration) or that
    ends the event loop (SystemExit).
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def too_slow(limit_s: float) -> TimeoutError:
    """Make the error of a rollout that took too long."""
    return TimeoutError(f"it took longer than {limit_s:g} s (--env.rollout_timeout)")


def survivors(results: Sequence[T | Failure]) -> tuple[list[T], Counter[Cause]]:
    """The results of the rollouts that have one, and how many failed, by cause. Raises what lost the group if fewer
    than two are left, or none of a group of one.
    """
    failures = [result for result in results if isinstance(result, Failure)]
    left = [result for result in results if not isinstance(result, Failure)]
    failed = Counter(failure.cause for failure in failures)
    if failures and len(left) < min(NEEDED, len(results)):
        raise _what_lost(failures, failed, len(results))
    return left, failed


def _what_lost(failures: Sequence[Failure], failed: Counter[Cause], sampled: int) -> Exception:
    """The first error of the environment's own code, else of a server, else of a scorer, else a GroupLost."""
    errors = [failure.error for failure in failures]
    for failure in failures:
        if not failure.is_expected:
            return failure.error
    for error in errors:
        if isinstance(error, ServerError):
            return error
    for error in errors:
        if isinstance(error, Unscored):
            reason = f"{failed['scorer']} of its {sampled} answers could not be scored"
            return Unscored(f"{reason}: {error}" if str(error) else reason, error.count)
    causes = ", ".join(f"{count} {cause}" for cause, count in failed.most_common())
    late = "items_timed_out" if failed.most_common(1)[0][0] == "timeout" else "groups_lost"
    return GroupLost(
        f"{failed.total()} of its {sampled} rollouts failed ({causes}): {failures[0]}", ROLLOUTS_FAILED, late
    )
