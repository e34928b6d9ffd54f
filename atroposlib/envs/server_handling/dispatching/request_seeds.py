"""A seed for each request of a run that can be repeated: a function of what is asked, and for what.

    run seed, policy version, environment, item, sample ──┐
    the request: prompt, temperature, ... ────────────────┴─▶ seed of its answer, or of the first of n

Requests that are equal in all of that have the seeds of their order. A request that is tried again has its own again.
"""

from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, TypeVar

from atroposlib.row_files.json_text import encode

T = TypeVar("T")

SEED_BITS = 52  # exact in every JSON reader, with room for n answers, whose seeds vLLM counts up


class RequestSeeds:
    """The seeds of everything that is asked for one item; `identity` tells the item from all others."""

    def __init__(self, *identity: str | int) -> None:
        self._identity = identity
        self._asked: Counter[bytes] = Counter()

    def seed(self, request: dict[str, Any], sample: int) -> int:
        """Return the seed of the next request that is equal to this one."""
        said = blake2b(encode([*self._identity, sample, sorted(request.items())]), digest_size=32).digest()
        self._asked[said] += 1
        drawn = blake2b(said + self._asked[said].to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(drawn, "little") >> (64 - SEED_BITS)


_seeds: ContextVar[RequestSeeds | None] = ContextVar("request_seeds", default=None)
_sample: ContextVar[int] = ContextVar("sample", default=0)


@contextmanager
def seeded(seeds: RequestSeeds) -> Iterator[None]:
    """Have what is asked meanwhile, by this task and those that it starts, sampled by these seeds."""
    token = _seeds.set(seeds)
    try:
        yield
    finally:
        _seeds.reset(token)


async def for_sample(number: int, work: Awaitable[T]) -> T:
    """Do the work of one of an item's samples, in a task of its own."""
    _sample.set(number)
    return await work


def current_sample() -> int:
    """The number of the item's sample that this task works on; 0 where it works on none."""
    return _sample.get()


def with_seed(request: dict[str, Any]) -> dict[str, Any]:
    """The request with its seed; as it is outside of `seeded`, and where it has one."""
    seeds = _seeds.get()
    if seeds is None or request.get("seed") is not None:
        return request
    return {**request, "seed": seeds.seed(request, _sample.get())}
