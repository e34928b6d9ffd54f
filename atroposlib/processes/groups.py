"""Ends process groups: TERM, a time of grace, KILL. A group here is that of a session, so that nobody else is in it.

Needs nothing but Python, as the remote agent of the launcher does.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

from atroposlib.processes.identity import all_pids, boot_id, first_ticks, is_alive, is_running

POLL_S = 0.05
FOLLOW_S = 0.5  # in which vLLM's processes follow their leader (vllm_patching/plugin.py)
KILL_S = 2.0  # in which the kernel ends what was killed


class Members(Protocol):
    """Declares what processes that are ended together need."""

    def members(self) -> list[int]: ...

    def signal(self, number: signal.Signals) -> bool: ...


class Led(Members, Protocol):
    """Declares what has a leader, too."""

    @property
    def pid(self) -> int: ...


M = TypeVar("M", bound=Members)
L = TypeVar("L", bound=Led)


@dataclass(frozen=True)
class Group:
    """The process group of the session that process `pid` leads, or led."""

    pid: int
    start: int | None  # of the leader; None where it had ended before anybody could ask
    boot: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the group of a child that has just been started."""
        return cls(pid, first_ticks(pid), boot_id())

    def members(self) -> list[int]:
        """List its living processes. The kernel gives a group's number to no new process while a member lives, so
        they are ours unless the process of that number is another one.
        """
        if self.boot != boot_id() or first_ticks(self.pid) not in (None, self.start):
            return []
        return [pid for pid in all_pids() if self._has(pid) and is_running(pid)]

    def signal(self, number: signal.Signals) -> bool:
        """Send it to the whole group, so that a process that was forked meanwhile is not missed. Returns whether there
        was one.
        """
        if not self.members():
            return False
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        return True

    def _has(self, pid: int) -> bool:
        with suppress(ProcessLookupError, PermissionError):
            return os.getpgid(pid) == self.pid == os.getsid(pid)
        return False


class Marked:
    """Every process that has inherited the variable `name` with this value, whatever session it has made."""

    def __init__(self, name: str, value: str) -> None:
        self._entry = f"{name}={value}".encode()
        self._seen: dict[int, int] = {}  # start by pid; one that is ending has no variables any more

    def members(self) -> list[int]:
        self._seen |= {pid: start for pid in all_pids() if self._has(pid) and (start := first_ticks(pid)) is not None}
        return [pid for pid, start in self._seen.items() if is_alive(pid, start)]

    def signal(self, number: signal.Signals) -> bool:
        """Send it to each. Returns whether there was one."""
        found = self.members()
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        return bool(found)

    def _has(self, pid: int) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            return self._entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False


def end_groups(
    groups: Iterable[L],
    grace_s: float,
    kill_s: float = KILL_S,
    *,
    asked: Callable[[list[L]], object] = lambda groups: None,
    killing: Callable[[list[L]], object] = lambda groups: None,
) -> list[L]:
    """End the groups: TERM, and KILL after `grace_s` seconds. Return those that are there `kill_s` seconds later.

    Calls `asked` with those that ran, after TERM, and `killing` with those that are about to be killed. Of a group the
    leader is killed first: its resource tracker then removes what it had in shared memory.
    """
    running = [group for group in groups if group.signal(signal.SIGTERM)]
    if running:
        asked(running)
    left = _left_after(running, grace_s)
    if left:
        killing(left)
        for group in left:
            with suppress(ProcessLookupError):
                os.kill(group.pid, signal.SIGKILL)
        left = kill(_left_after(left, FOLLOW_S), kill_s - FOLLOW_S)
    return left


def kill(groups: Sequence[M], within_s: float) -> list[M]:
    """Kill them, and what they start meanwhile. Return those that are there `within_s` seconds later: a signal is only
    delivered when its receiver is scheduled.
    """
    deadline = time.monotonic() + within_s
    while left := [group for group in groups if group.signal(signal.SIGKILL)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)
    return []


def _left_after(groups: Sequence[L], seconds: float) -> list[L]:
    """Wait until the groups have no members, at most `seconds`. Return those that have."""
    deadline = time.monotonic() + seconds
    while left := [group for group in groups if group.members()]:
        if time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)
    return []
