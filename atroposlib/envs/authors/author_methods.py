"""Methods of an environment that its author writes as a coroutine or as a plain function."""

import inspect
from typing import Any


async def settled(value: Any) -> Any:
    """What such a method gives: `await settled(env.setup())`."""
    return await value if inspect.isawaitable(value) else value
