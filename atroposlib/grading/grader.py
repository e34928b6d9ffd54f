"""Compare an answer with the known result by math-verify, in child processes that are killed when they take too long.

    asyncio task ──▶ Grader.grade(answer, gold) ──JSON line──▶ child.py (math-verify, sympy) ──▶ right | wrong | unparseable
                                        └─ no reply in time: kill, restart on the next call ──▶ grader_failed

sympy can run for hours or take all memory on a short answer such as 9^{9^{9^9}}, and no thread can be stopped; a process can.
A failure of the grader is an outcome of its own, never "wrong": the model did not cause it.
"""

import asyncio
import contextlib
import itertools
import json
import re
import sys
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field

from atroposlib.config import Config
from atroposlib.logs import get_logger

log = get_logger(__name__)

CHILD = Path(__file__).with_name("child.py")
INTEGER = re.compile(r"-?[0-9]{1,18}")
MAX_ANSWER_CHARS = 1000


class Outcome(StrEnum):
    """What became of one answer."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSEABLE = "unparseable"
    GRADER_FAILED = "grader_failed"


class GraderSettings(Config):
    """Limits of grading."""

    processes: int = Field(default=1, ge=1, le=64, description="Child processes that grade at the same time.")
    time_limit_s: float = Field(default=5.0, gt=0, description="Seconds one answer may take before its process is killed.")
    start_limit_s: float = Field(default=60.0, gt=0, description="Seconds a child process may take to import math-verify.")


class Grader:
    """Grades for any number of tasks of one event loop; `outcomes` counts what it found. Close it when done."""

    def __init__(self, settings: GraderSettings | None = None) -> None:
        settings = settings or GraderSettings()
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        self._children = [_Child(settings) for _ in range(settings.processes)]
        for child in self._children:
            self._idle.put_nowait(child)
        self.outcomes: Counter[Outcome] = Counter()

    async def grade(self, answer: str | None, gold: str) -> Outcome:
        """Whether `answer` equals `gold`, both mathematics as LaTeX or plain numbers. None is unparseable."""
        outcome = await self._grade(answer, gold)
        self.outcomes[outcome] += 1
        return outcome

    async def close(self) -> None:
        """End the child processes."""
        for child in self._children:
            await child.kill()

    async def _grade(self, answer: str | None, gold: str) -> Outcome:
        if answer is None or len(answer) > MAX_ANSWER_CHARS:
            return Outcome.UNPARSEABLE
        if INTEGER.fullmatch(answer) and INTEGER.fullmatch(gold):  # where math-verify says the same, and a process is not needed
            return Outcome.RIGHT if int(answer) == int(gold) else Outcome.WRONG
        child = await self._idle.get()
        try:
            return await child.judge(answer, gold)
        finally:
            self._idle.put_nowait(child)


class _Child:
    """One child process, started when first needed and again after every kill; one answer at a time."""

    def __init__(self, settings: GraderSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._ids = itertools.count()

    async def judge(self, answer: str, gold: str) -> Outcome:
        """The child's verdict; a death, a silence or a garbled reply is GRADER_FAILED, logged with the answer."""
        request = {"id": next(self._ids), "gold": gold, "answer": answer, "time_limit_s": self._settings.time_limit_s}
        try:
            process = await self._running()
            async with asyncio.timeout(self._settings.time_limit_s + 1.0):  # the child's own alarm comes first
                reply = await _exchange(process, request)
        except (TimeoutError, OSError, EOFError, json.JSONDecodeError) as error:
            return await self._failed(str(error) or f"no verdict within {self._settings.time_limit_s:g} s", request)
        except asyncio.CancelledError:
            await self.kill()  # its late reply must not be taken for the next answer's
            raise
        if reply.get("id") != request["id"]:
            return await self._failed(f"replied to another request: {reply}", request)
        if reply["verdict"] == Outcome.GRADER_FAILED:
            log.warning("The grader failed on the answer %r (known: %r): %s", answer, gold, reply["reason"])
        return Outcome(reply["verdict"])

    async def kill(self) -> None:
        """End the process, if it runs; the next answer starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _failed(self, reason: str, request: dict[str, Any]) -> Outcome:
        log.warning("The grader failed on the answer %r (known: %r): %s; restarting it", request["answer"], request["gold"], reason)
        await self.kill()
        return Outcome.GRADER_FAILED

    async def _running(self) -> asyncio.subprocess.Process:
        """The live process, started if there is none. Raises TimeoutError or EOFError when it cannot start."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, str(CHILD), stdin=pipe, stdout=pipe, start_new_session=True)
        try:
            async with asyncio.timeout(self._settings.start_limit_s):
                await _read(self._process)
        except TimeoutError:
            raise TimeoutError(f"math-verify did not load within {self._settings.start_limit_s:g} s") from None
        return self._process


async def _exchange(process: asyncio.subprocess.Process, request: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    await process.stdin.drain()
    return await _read(process)


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise EOFError("the grader process ended, by its time or memory limit or because math-verify is missing")
    reply: dict[str, Any] = json.loads(line)
    return reply
