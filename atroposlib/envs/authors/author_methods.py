"""Methods of an environment that its author writes as a coroutine or as a plain function."""

import inspect
from typing import Any


async def settled(value: object) -> Any:
    """Return the result of such a method: `await settled(env.setup())`."""
    return await value if inspect.isawaitable(value) else value
