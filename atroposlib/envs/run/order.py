"""The order of a run that can be repeated (--env.deterministic): which item each group is of, and how it is sampled.

    batch 3 ──▶ group 0, 1, 2, ... ──▶ item number 3 * items_per_batch + group ──▶ seeds of its requests ──▶ posted
                                                        ▲                                     │
                                                        └── asked again, by the same seeds ◀──┘ one that failed

Nothing is kept from one batch to the next. An environment that starts again in the middle of a batch begins the batch
again, and gives the same groups: the API stores once what is posted twice under one key.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from atroposlib.envs.errors import EnvError
from atroposlib.envs.failures import GroupLost
from atroposlib.envs.server_handling.dispatching.request_seeds import RequestSeeds, seeded
from atroposlib.logs import get_logger

log = get_logger(__name__)

TRIES = 5  # of an item, before the environment gives up
PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # between them; each is twice as long as the one before


@dataclass
class Place:
    """The place of one group in the run: its batch, its number in that, and the policy that has to sample it."""

    batch: int
    group: int
    policy_version: int
    is_filled: bool = False  # the group is there, or its item is known to give none
    was_of_other_policy: bool = False  # what was sampled for it last, as while a trainer resumes

    def expect_sampled_by(self, group: Mapping[str, Any]) -> None:
        """Raise GroupLost for a group that is not whole, or not sampled by the place's policy alone."""
        if self.is_filled:
            raise GroupLost("its item gave several groups", "not repeatable", "items_not_repeatable")
        if failed := sum((group.get("failed") or {}).values()):
            raise GroupLost(f"{failed} of its rollouts failed", "not repeatable", "items_not_repeatable")
        spans = group.get("version_spans")
        versions = {version for of_sequence in spans or () for _, version in of_sequence}
        if versions != {self.policy_version}:
            self.was_of_other_policy = bool(spans)
            told = f"versions {sorted(versions)}" if spans else "a server that does not say which policy it serves"
            raise GroupLost(
                f"it was sampled by {told}, not by policy version {self.policy_version} alone",
                "not repeatable",
                "items_not_repeatable",
            )


_place: ContextVar[Place | None] = ContextVar("place", default=None)


def current_place() -> Place | None:
    """Return the place that this task's item has; None in a run that is not to be repeated."""
    return _place.get()


def fill_place() -> None:
    """Note that the item that this task works on has given its group, in a run that can be repeated."""
    if (place := current_place()) is not None:
        place.is_filled = True


@contextmanager
def placed(place: Place) -> Iterator[None]:
    """Have the tasks that are started meanwhile work for this place."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def why_not_repeatable(env_cls: type) -> str | None:
    """Why an environment of this class cannot be part of a run that can be repeated; None if it can."""
    if getattr(env_cls, "deterministic", False):  # which a QuestionEnv says
        return None
    name = getattr(env_cls, "name", None) or env_cls.__name__
    return (
        f"deterministic: {name} does not give the same groups again, because what it samples or how it scores depends"
        f" on more than the answers (class {env_cls.__name__} is no QuestionEnv, or says `deterministic = False`): drop"
        " the flag, or this environment"
    )


class Order:
    """The places of `environment`'s groups; `seed` is the run's. For `patience_s` seconds another policy than a batch's
    may be served.
    """

    def __init__(self, environment: str, seed: int, patience_s: float) -> None:
        self._environment = environment
        self._seed = seed
        self._patience_s = patience_s
        self.batch = -1
        self.policy_version = -1
        self.begun = 0  # groups of this batch
        self.batches_before = 0  # that dynamic sampling had filled when this batch began

    def follow(self, batch: int, policy_version: int) -> bool:
        """Turn to the batch that is sampled now. Return whether it is another one."""
        if (batch, policy_version) == (self.batch, self.policy_version):
            return False
        self.batch, self.policy_version, self.begun = batch, policy_version, 0
        return True

    def begin_again(self) -> None:
        """Begin the batch anew when it is next turned to: an API without a journal may have lost what it was given."""
        self.batch = -1

    def begin(self) -> Place:
        """The place of the next group of this batch."""
        place = Place(self.batch, self.begun, self.policy_version)
        self.begun += 1
        return place

    def give_back(self, place: Place) -> None:
        """Let the next group have a place that has no item now."""
        if place.batch == self.batch:
            self.begun = place.group

    def ordinal(self, place: Place) -> tuple[str, int, int]:
        """Return what a group says of its place."""
        return self._environment, place.batch, place.group

    async def fill(self, place: Place, handle: Callable[[], Awaitable[None]], why: Callable[[], str]) -> None:
        """Call `handle` until it has filled the place, by the same seeds each time. Stop early when another batch is
        sampled. Raises EnvError, with what `why` says, after several tries; while another policy is served, after
        `patience_s` seconds.
        """
        tries, began, pause_s = 0, time.monotonic(), PAUSE_S
        while True:
            error, place.is_filled, place.was_of_other_policy = None, False, False
            with seeded(RequestSeeds(self._seed, *self.ordinal(place), place.policy_version)):
                try:
                    await handle()
                except EnvError:
                    raise
                except Exception as raised:  # by an author's code; the place needs its group all the same
                    error = raised
            if (place.is_filled and error is None) or place.batch != self.batch:
                return
            told = repr(error) if error is not None else why()
            tries += not place.was_of_other_policy
            if tries >= TRIES or time.monotonic() - began > self._patience_s:
                break
            log.warning(
                "Asking again in %g s for group %d of batch %d (try %d of %d failed): %s",
                pause_s,
                place.group,
                place.batch,
                tries,
                TRIES,
                told,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise EnvError(
            f"group {place.group} of batch {place.batch} failed {tries} times within {time.monotonic() - began:.0f} s,"
            f" the last because {told}; a run with --env.deterministic cannot go on without it: fix the cause and"
            " resume the run, or drop the flag"
        ) from error


def post_key(run: str | None, ordinal: tuple[str, int, int]) -> str:
    """Compute the key under which a group is posted, the same whenever it is posted."""
    return blake2b(repr((run, *ordinal)).encode(), digest_size=16).hexdigest()
