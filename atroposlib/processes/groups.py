"""Ends process groups: TERM, a time of grace, KILL. A group here is that of a session, so that nobody else is in it.

Needs nothing but Python, as the remote agent of the launcher does.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from atroposlib.processes.identity import all_pids, boot_id, first_ticks, is_alive

POLL_S = 0.05
FOLLOW_S = 0.5  # in which vLLM's processes follow their leader (vllm_patching/plugin.py)
KILL_S = 2.0  # in which the kernel ends what was killed


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
        return [pid for pid in all_pids() if self._has(pid) and is_alive(pid)]

    def signal(self, number: int) -> bool:
        """Send it to the whole group, so that a process that was forked meanwhile is not missed. Return whether there
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

    def signal(self, number: int) -> bool:
        """Send it to each. Return whether there was one."""
        for pid in (members := self.members()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(members)

    def _has(self, pid: int) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            return self._entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False


G = TypeVar("G", bound=Group | Marked)


def end_groups(
    groups: Sequence[Group],
    grace_s: float,
    kill_s: float = KILL_S,
    *,
    asked: Callable[[list[Group]], object] = lambda groups: None,
    killing: Callable[[list[Group]], object] = lambda groups: None,
) -> list[Group]:
    """End the groups: TERM, and KILL after `grace_s` seconds. Return those that are there `kill_s` seconds later.

    Calls `asked` with those that ran, after TERM, and `killing` with those that are about to be killed. Of a group the
    leader is killed first: its resource tracker then removes what it had in shared memory.
    """
    running = [group for group in groups if group.signal(signal.SIGTERM)]
    if running:
        asked(running)
    if left := left_after(running, grace_s):
        killing(left)
        for group in left:
            with suppress(ProcessLookupError):
                os.kill(group.pid, signal.SIGKILL)
        left = left_after(left_after(left, FOLLOW_S), kill_s - FOLLOW_S, signal.SIGKILL)
    return left


def left_after(groups: Sequence[G], seconds: float, number: int = 0) -> list[G]:
    """Wait until the groups have no members, at most `seconds`, and send them signal `number` all the while, for what
    they start meanwhile. Return those that have: a signal is only delivered when its receiver is scheduled.
    """
    deadline = time.monotonic() + seconds
    while left := [group for group in groups if group.signal(number)]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return left
