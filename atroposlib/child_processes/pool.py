"""Child processes that answer questions one at a time, and are killed when they are late.

    asyncio task ──▶ ChildPool.ask(request) ──JSON line──▶ child's stdin ··· its stdout ──JSON line──▶ reply
                                     └─ no reply in time: kill, restart on the next call ──▶ ChildFailed

Grading code can run for hours or take all memory on a short answer such as 9^{9^{9^9}}, and no thread can be stopped; a process can.
What runs in the child is `loop.py` with a function of the module's own.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIBRARY_ROOT = str(Path(__file__).parents[2])
REPLY_LIMIT_BYTES = 2**24


class ChildFailed(Exception):
    """A child died, kept silent or garbled its reply; it has been killed, and the next request starts another."""


class ChildPool:
    """`count` processes of `python -m module`, each started when first needed; for any number of tasks of one event loop.

    Their hash seed is fixed, so that what is made from sets of strings is the same in each.
    """

    def __init__(self, module: str, *, count: int, time_limit_s: float, start_limit_s: float) -> None:
        self._children = [_Child(module, time_limit_s, start_limit_s) for _ in range(count)]
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        for child in self._children:
            self._idle.put_nowait(child)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply of the next free child. Raises ChildFailed."""
        child = await self._idle.get()
        try:
            return await child.ask(request)
        finally:
            self._idle.put_nowait(child)

    async def close(self) -> None:
        """End the child processes."""
        for child in self._children:
            await child.kill()


class _Child:
    def __init__(self, module: str, time_limit_s: float, start_limit_s: float) -> None:
        self._module = module
        self._time_limit_s = time_limit_s
        self._start_limit_s = start_limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._ids = itertools.count()

    async def ask(self, content: Mapping[str, Any]) -> dict[str, Any]:
        request = {"id": next(self._ids), "time_limit_s": self._time_limit_s, **content}
        try:
            process = await self._running()
            async with asyncio.timeout(self._time_limit_s + 1.0):  # the child's own alarm comes first
                reply = await _exchange(process, request)
        except (TimeoutError, OSError, EOFError, json.JSONDecodeError) as error:
            await self.kill()
            raise ChildFailed(str(error) or f"no verdict within {self._time_limit_s:g} s") from error
        except asyncio.CancelledError:
            await self.kill()  # its late reply must not be taken for the next request's
            raise
        if reply.get("id") != request["id"]:
            await self.kill()
            raise ChildFailed(f"replied to another request: {reply}")
        return reply

    async def kill(self) -> None:
        """End the process, if it runs; the next request starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _running(self) -> asyncio.subprocess.Process:
        """The live process, started if there is none. Raises TimeoutError or EOFError when it cannot start."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", self._module),
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,
            env=_child_environment(),
            limit=REPLY_LIMIT_BYTES,
        )
        try:
            async with asyncio.timeout(self._start_limit_s):
                await _read(self._process)
        except TimeoutError:
            raise TimeoutError(f"{self._module} was not ready within {self._start_limit_s:g} s") from None
        return self._process


def _child_environment() -> dict[str, str]:
    """This process's own, with this library importable whatever the folder."""
    paths = [LIBRARY_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths)}


async def _exchange(process: asyncio.subprocess.Process, request: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    await process.stdin.drain()
    return await _read(process)


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise EOFError("the process ended, by its time or memory limit or because a package that it needs is missing")
    reply: dict[str, Any] = json.loads(line)
    return reply
