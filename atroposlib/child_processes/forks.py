"""The loop of a `LineChild` that loads what it needs once, and answers each request in a fork of itself.

    {"id": 7, "do": "parse", "time_limit_s": 5.0}  ──▶ fork ──▶ answer(request) ──pipe──▶ {"id": 7, "reply": {...}}
                                                     └─ late, out of memory, crashed ──▶ {"id": 7, "error": {...}}
    {"id": 7, "do": "cancel"}                            kills the fork; no reply

A library cannot be stopped, and a crash of it takes its process along; a fork is ended by the kernel's alarm, which is
left at its default action, and costs milliseconds where loading takes seconds. Forks run at a low priority and end with
this process, and this one ends when its stdin does.
"""

import json
import os
import resource
import selectors
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from atroposlib.processes.exec_child import die_with
from atroposlib.processes.exit_words import exit_words

NICENESS = 10
REPLY_BYTES = 16 << 20
Request = dict[str, Any]
Answer = Callable[[Request], Mapping[str, object]]


@dataclass
class _Fork:
    number: int
    pid: int
    written: bytearray = field(default_factory=bytearray)


def answer_by_forks(answer: Answer, memory_bytes: int) -> None:
    """Serve stdin to stdout until stdin ends; whatever a library prints goes to stderr. A fork may take `memory_bytes`
    more than this process has. `answer` may raise: its error is the reply.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, whose closing of stdin ends this process
    replies = os.dup(1)
    os.dup2(2, 1)
    selector, forks, unread = selectors.DefaultSelector(), dict[int, _Fork](), bytearray()
    selector.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            chunk = os.read(key.fd, 1 << 20)
            if key.fd != 0:
                if not _take(forks[key.fd], chunk):
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _send(replies, _reply(forks.pop(key.fd)))
                continue
            if not chunk:
                for fork in forks.values():
                    os.kill(fork.pid, signal.SIGKILL)
                return
            unread += chunk
            *lines, unread = unread.split(b"\n")
            for request in map(json.loads, lines):
                if request["do"] == "ping":
                    _send(replies, {"id": request["id"], "reply": {}})
                elif request["do"] == "cancel":
                    _kill(forks, request["id"])
                else:
                    pipe, fork = _forked(request, answer, memory_bytes)
                    forks[pipe] = fork
                    selector.register(pipe, selectors.EVENT_READ)


def _take(fork: _Fork, chunk: bytes) -> bool:
    """Keep what a fork has written; False at its end, and when it writes too much."""
    fork.written += chunk
    if len(fork.written) > REPLY_BYTES:
        os.kill(fork.pid, signal.SIGKILL)
        fork.written.clear()
        return False
    return bool(chunk)


def _kill(forks: dict[int, _Fork], number: int) -> None:
    for fork in forks.values():
        if fork.number == number:
            os.kill(fork.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own


def _reply(fork: _Fork) -> dict[str, object]:
    _, status = os.waitpid(fork.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        with suppress(ValueError):
            return {"id": fork.number, **json.loads(fork.written)}
    late = code in (-signal.SIGALRM, -signal.SIGXCPU)
    return {"id": fork.number, "error": {"message": "late" if late else exit_words(code), "is_wrong": False}}


def _forked(request: Request, answer: Answer, memory_bytes: int) -> tuple[int, _Fork]:
    pipe, end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(end)
        return pipe, _Fork(request["id"], pid)
    status = 1
    try:
        _limit(request["time_limit_s"], memory_bytes, parent)
        _send(end, _answered(request, answer))
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is flushed or ended twice


def _limit(limit_s: float, memory_bytes: int, parent: int) -> None:
    if not die_with(parent, signal.SIGKILL):
        os._exit(1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    os.nice(NICENESS)
    with open("/proc/self/statm", encoding="ascii") as sizes:
        most = int(sizes.read().split()[0]) * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answered(request: Request, answer: Answer) -> dict[str, object]:
    try:
        return {"reply": answer(request)}
    except Exception as error:  # a library's, of which each raises its own
        return {"error": {"message": f"{type(error).__name__}: {error}"[:2000], "is_wrong": True}}


def _send(end: int, content: Mapping[str, object]) -> None:
    left = memoryview(json.dumps(content).encode() + b"\n")
    while left:
        left = left[os.write(end, left) :]
