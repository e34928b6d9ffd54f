"""A trusted child process that answers many requests at once, one JSON object per line in each direction.

    ask("play", task=3) ──{"id": 7, "do": "play", "task": 3}──▶ child ──{"id": 7, "reply": {...}}──▶ the reply
                                                                      └─{"id": 7, "error": {...}}──▶ ChildRefused

It is asked for a sign of life every few seconds. One that ends, keeps silent or garbles a line is killed with all that
it started, and every request that waits fails with `ChildFailed`. Starting another is the caller's business.
"""

import asyncio
import contextlib
import itertools
import json
import secrets
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atroposlib.child_processes.pool import ChildFailed
from atroposlib.logs import get_logger
from atroposlib.processes.async_child import start_group
from atroposlib.processes.exit_words import exit_words
from atroposlib.processes.groups import Group, Marked, left_after

log = get_logger(__name__)

LINE_BYTES = 64 << 20
ASKED_EVERY_S = 5.0
MARK = "ATROPOS_CHILD"  # a variable that the child and all that it starts inherit, unless they clear it
LAST_WORDS = 20  # lines of stderr
LAST_WORDS_CHARS = 500
LAST_WORDS_S = 1.0
POLLED_EVERY_S = 0.05
REAPED_WITHIN_S = 5.0


class ChildRefused(Exception):
    """The child answered that it cannot. `is_wrong`: for what it was told, so that no other would either."""

    def __init__(self, message: str, is_wrong: bool) -> None:
        super().__init__(message)
        self.is_wrong = is_wrong


class LineChild:
    """One process. `said` gets each line of its stderr."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        silence_limit_s: float,
        said: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._command = command
        self._mark = secrets.token_hex(16)
        self._environment = {**environment, MARK: self._mark}
        self._silence_limit_s = silence_limit_s
        self._said = said
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._group: Group | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._words: deque[str] = deque(maxlen=LAST_WORDS)
        self._failure: str | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Return whether the process may be asked."""
        return self._process is not None and self._failure is None

    @property
    def pid(self) -> int | None:
        """The process, once it was started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process. Raises ChildFailed."""
        pipe = asyncio.subprocess.PIPE
        try:
            self._process, self._group = await start_group(
                *self._command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=self._environment,
                limit=LINE_BYTES,
            )
        except OSError as error:
            raise ChildFailed(f"{self._command[0]} cannot be started: {error}") from error
        work = (self._read_replies(), self._read_errors(), self._watch(), self._await_end(self._process))
        self._tasks = [asyncio.create_task(each) for each in work]

    async def ask(self, do: str, limit_s: float | None = None, **content: object) -> Any:
        """The child's reply. A caller that is cancelled, or waits longer than `limit_s`, has the work ended. Raises
        ChildFailed, ChildRefused and TimeoutError.
        """
        if not self.is_alive:
            raise ChildFailed(self._failure or "the process was not started")
        number = next(self._numbers)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_s):
                await self._send({"id": number, "do": do, **content})
                return await future
        finally:
            del self._waiting[number]
            if not future.done() or future.cancelled():
                await self._cancel(number)

    async def close(self, limit_s: float = 2.0) -> None:
        """Let the process end in its own way, within `limit_s`, and then kill it."""
        if self._process is not None and self._failure is None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), limit_s)
        await self._fail("the process was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, request: Mapping[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(self._silence_limit_s):
                await self._process.stdin.drain()
        except OSError as error:
            raise ChildFailed(f"the process does not read: {error or type(error).__name__}") from error

    async def _cancel(self, number: int) -> None:
        if self.is_alive:
            with contextlib.suppress(ChildFailed, TimeoutError):
                await self._send({"id": number, "do": "cancel"})

    async def _read_replies(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._take(json.loads(line))
            await asyncio.sleep(LAST_WORDS_S)
            await self._fail("it closed its output")
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # no JSON, too long, or another shape
            await self._fail(f"it wrote a line that is not a reply ({type(error).__name__}: {str(error)[:200]})")

    def _take(self, reply: Any) -> None:
        future = self._waiting.get(reply["id"])
        if future is None or future.done():  # of a request that was cancelled
            return
        if "reply" in reply:
            future.set_result(reply["reply"])
        else:
            error = reply["error"]
            future.set_exception(ChildRefused(str(error["message"]), bool(error["is_wrong"])))

    async def _await_end(self, process: asyncio.subprocess.Process) -> None:
        # `wait` also waits for every other process that has the pipes open, such as a grandchild
        while process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(POLLED_EVERY_S)
        await asyncio.sleep(POLLED_EVERY_S)  # what it wrote last is read meanwhile
        await self._fail(f"it ended: {exit_words(process.returncode)}")

    async def _read_errors(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(1 << 16):
            for line in chunk.decode(errors="replace").splitlines():
                if line.strip():
                    self._words.append(line[:LAST_WORDS_CHARS])
                    self._said(line[:LAST_WORDS_CHARS])

    async def _watch(self) -> None:
        while self.is_alive:
            await asyncio.sleep(ASKED_EVERY_S)
            try:
                await self.ask("ping", self._silence_limit_s)
            except TimeoutError:
                await self._fail(f"it has not answered for {self._silence_limit_s:g} s")
            except ChildFailed as error:
                await self._fail(str(error))

    async def _fail(self, reason: str) -> None:
        """Kill the process and all that it started, and then fail all that wait."""
        if self._ending is None:
            self._failure = f"{reason}{f'; its last words: {self._words[-1]}' if self._words else ''}"
            self._ending = asyncio.create_task(self._end(self._failure))
        await asyncio.shield(self._ending)

    async def _end(self, failure: str) -> None:
        if self._process is not None:
            assert self._group is not None
            all_of_it: list[Group | Marked] = [self._group, Marked(MARK, self._mark)]
            await asyncio.to_thread(left_after, all_of_it, REAPED_WITHIN_S, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), REAPED_WITHIN_S)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChildFailed(failure))
