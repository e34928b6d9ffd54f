"""Methods of an environment that its author writes as a coroutine or as a plain function."""

import inspect
from collections.abc import Awaitable
from typing import TypeVar, cast

T = TypeVar("T")


async def settled(value: Awaitable[T] | T) -> T:
    """What the method gives, once it is there."""
    return await value if inspect.isawaitable(value) else cast(T, value)
