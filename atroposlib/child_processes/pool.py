"""Child processes that answer requests one at a time, without privileges, and are killed when they are late.

    asyncio task ──▶ ChildPool.ask(request) ──JSON line──▶ child's stdin ··· its stdout ──JSON line──▶ reply
                                     └─ no reply in time: kill, restart on the next call ──▶ ChildFailed

Grading code can run for hours or take all memory on a short answer such as 9^{9^{9^9}}, and no thread can be stopped;
a process can. It might also be made to run what the model wrote, so each child lives in a sandbox (`sandbox.py`) and is
stopped between requests (`warden.py`). What runs in it is `loop.py` with a function of the module's own. A reply counts
only if it repeats the request's random id, so that code in one answer cannot leave a reply for the next.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from atroposlib.child_processes.sandbox import Sandbox
from atroposlib.child_processes.warden import Ended
from atroposlib.logs import get_logger
from atroposlib.processes.async_child import start_group
from atroposlib.processes.groups import Group

log = get_logger(__name__)

Reply = dict[str, Any]  # a line of a child

REPLY_LIMIT_BYTES = 2**24
LAST_WORDS_CHARS = 300
LAST_WORDS_S = 10.0  # its warden closes the pipe as it exits; a busy machine takes long over it


class ChildFailed(Exception):
    """A child died, kept silent or garbled its reply; it has been killed, and the next request starts another."""


class ProgramFailed(ChildFailed):
    """A child that was ready failed at its request, by what it ran: it ended by itself, broke a bound of time, files or
    bytes, or garbled its reply. The machine's doing is a ChildFailed alone: it was killed from outside (no memory left
    on the machine, somebody's signal), or was gone before it had the request. The end of this process cancels a
    request, which then has no outcome at all. A program that waits looks like one for which the machine is too busy,
    so being late is the program's.
    """


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """The kernel's means that confine a child, and what it could do all the same when it tried to break out."""

    means: tuple[str, ...]
    escapes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Return whether every attempt to break out failed."""
        return not self.escapes

    def __str__(self) -> str:
        return f"sandbox: {', '.join(self.means) or 'none'}; " + (
            f"the child can still {', '.join(self.escapes)}" if self.escapes else "no escape found"
        )


class ChildPool:
    """`count` sandboxed processes of `python -m module`, started when first needed; for all tasks of one event loop.

    `module` calls `answer_requests` (`loop.py`) when it is run. It may read the interpreter, the installed packages,
    its own top-level package, and what is beneath `readable`.
    """

    def __init__(
        self, module: str, *, count: int, time_limit_s: float, start_limit_s: float, readable: Sequence[str | Path] = ()
    ) -> None:
        self._children = [_Child(module, time_limit_s, start_limit_s, readable, self._note) for _ in range(count)]
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        for child in self._children:
            self._idle.put_nowait(child)
        self._module = module
        self._report: SandboxReport | None = None

    async def sandbox_report(self) -> SandboxReport:
        """Report what confines the children, as the first one found out. Raises ChildFailed if it cannot start."""
        if self._report is None:
            async with self._next_child() as child:
                await child.started()
        assert self._report is not None
        return self._report

    async def ask(self, request: Mapping[str, object]) -> Reply:
        """The reply of the next free child. Raises ChildFailed."""
        async with self._next_child() as child:
            return await child.ask(request)

    async def close(self) -> None:
        """End the child processes."""
        for child in self._children:
            await child.kill()

    @contextlib.asynccontextmanager
    async def _next_child(self) -> AsyncIterator["_Child"]:
        child = await self._idle.get()
        try:
            yield child
        finally:
            self._idle.put_nowait(child)

    def _note(self, report: SandboxReport) -> None:
        """Log the first child's report; a later child may not have more rights. Raises ChildFailed."""
        if self._report is None:
            self._report = report
            log.log(
                logging.INFO if report.holds else logging.WARNING,
                "Child processes of %s run in a %s",
                self._module,
                report,
            )
        elif gained := set(report.escapes) - set(self._report.escapes):
            raise ChildFailed(f"its sandbox is weaker than that of the first child: it can {', '.join(sorted(gained))}")


@dataclass(eq=False)
class _Child:
    module: str
    time_limit_s: float
    start_limit_s: float
    readable: Sequence[str | Path]
    note: Callable[[SandboxReport], None]
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)
    _group: Group | None = field(default=None, init=False)
    _sandbox: Sandbox | None = field(default=None, init=False)
    _may_signal: bool = field(default=True, init=False)  # itself or its warden
    # The child's stderr, bounded by its limit of file size.
    _errors: IO[bytes] = field(
        default_factory=lambda: tempfile.TemporaryFile("ab+", buffering=0),  # noqa: SIM115  closes with this object
        init=False,
    )

    async def ask(self, content: Mapping[str, object]) -> Reply:
        request = {"id": secrets.token_hex(8), "time_limit_s": self.time_limit_s, **content}
        process = await self.started()
        # the child's own alarm comes first, then its warden's
        async with self._killed_when_it_fails(at_work=True), asyncio.timeout(self.time_limit_s + 1.0):
            self._errors.truncate(0)
            reply = await _exchange(process, request)
            if reply.get("id") != request["id"]:
                raise ValueError("it replied to another request")
        return reply

    async def started(self) -> asyncio.subprocess.Process:
        """The live process, started if there is none. Raises ChildFailed when it cannot start."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.kill()
        async with self._killed_when_it_fails(), asyncio.timeout(self.start_limit_s):
            self._sandbox = sandbox = Sandbox(self.module, self.readable, self.time_limit_s, REPLY_LIMIT_BYTES)
            process, self._group = await start_group(
                *sandbox.command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                cwd=sandbox.folder,
                env=sandbox.environment(),
                limit=REPLY_LIMIT_BYTES,
            )
            self._process = process
            answer = await _exchange(process, sandbox.orders())
            self._may_signal = "seccomp" not in answer["means"]
            namespaces = ["namespaces (bubblewrap)"] if sandbox.namespaces else []
            self.note(SandboxReport(tuple(namespaces + answer["means"]), tuple(answer["escapes"])))
            await _read(process)  # it is ready
            return process

    async def kill(self) -> None:
        """End the process, if it runs, and remove its directory; the next request starts another."""
        process, self._process = self._process, None
        if process is not None:
            assert self._group is not None
            self._group.signal(signal.SIGKILL)  # bubblewrap and what it started
            await process.wait()
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    @contextlib.asynccontextmanager
    async def _killed_when_it_fails(self, *, at_work: bool = False) -> AsyncIterator[None]:
        try:
            yield
        except (TimeoutError, OSError, EOFError, ValueError, RecursionError) as error:
            why, code = str(error) or "no reply in time", None
            if isinstance(error, EOFError) and self._process is not None and self._sandbox is not None:
                with contextlib.suppress(TimeoutError):  # it is ending, and may still write why
                    code = await asyncio.wait_for(self._process.wait(), LAST_WORDS_S)
                    why = self._sandbox.why_ended(code) or why
            await self.kill()
            kind = ProgramFailed if at_work and self._is_its_own(error, code) else ChildFailed
            raise kind(f"{why}{self._last_words()}") from error
        except (asyncio.CancelledError, ChildFailed):
            await self.kill()  # its late reply must not be taken for the next request's
            raise

    def _is_its_own(self, error: Exception, code: int | None) -> bool:
        """Return whether what it ran is to blame for the error, not the machine; see ProgramFailed."""
        if isinstance(error, EOFError):
            return self._may_signal or code is None or (code in list(Ended) and code != Ended.KILLED)
        return isinstance(error, TimeoutError) or not isinstance(error, OSError)

    def _last_words(self) -> str:
        """The last line of the child's stderr, shortened and in ASCII: the model may have chosen it."""
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, end - 4 * LAST_WORDS_CHARS))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"; its last words: {lines[-1][-LAST_WORDS_CHARS:]!a}" if lines else ""


async def _exchange(process: asyncio.subprocess.Process, request: Mapping[str, object]) -> Reply:
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    await process.stdin.drain()
    return await _read(process)


async def _read(process: asyncio.subprocess.Process) -> Reply:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise EOFError("the process ended, by a limit of time or memory or because a package that it needs is missing")
    reply = json.loads(line)
    if not isinstance(reply, dict):
        raise ValueError("its reply is not a JSON object")
    return reply
