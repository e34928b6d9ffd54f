"""Children of an event loop that lead a group of their own, and so can be killed with what they start there."""

import asyncio
from typing import Any

from atroposlib.processes.groups import Group


async def start_group(*command: str, **streams: Any) -> tuple[asyncio.subprocess.Process, Group]:
    """Start a process, with the arguments of asyncio.create_subprocess_exec. Raises OSError."""
    process = await asyncio.create_subprocess_exec(*command, start_new_session=True, **streams)
    return process, Group.of(process.pid)
