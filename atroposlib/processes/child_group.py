"""A child process in its own process group, ended with all of its descendants: a service of the launcher, on this
machine or another, and the vLLM server of the restart bridge. Needs nothing but Python.

- Only the group that was started here is ever signalled. Its leader stays unreaped until the group is gone, so the
  kernel cannot give its number to another process meanwhile.
- When the parent is killed, the kernel sends the leader a signal (exec_child.py); vLLM's engine and workers follow
  their API process (vllm_patching/plugin.py).
- What only this group had mapped in /dev/shm, and was not there before, is removed: by its own resource tracker, for
  which a leader that ignores TERM is killed before the rest, or by us.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO

from atroposlib.errors import AtroposError
from atroposlib.files import open_regular
from atroposlib.logs import get_logger
from atroposlib.processes import exec_child
from atroposlib.processes.exit_words import exit_words
from atroposlib.processes.groups import FOLLOW_S, POLL_S, Group, end_groups
from atroposlib.processes.log_files import last_lines
from atroposlib.processes.shared_memory import mapped_files, present_inodes, remove_unused

KILL_WAIT_S = 3.0
LINES_SHOWN = 20

log = get_logger(__name__)


class StillRunning(AtroposError):
    """Is raised when processes of a group are there after SIGKILL."""


class ChildGroup:
    """Runs `command` from construction until it ends or `stop`. Start it in the main thread.

    Its output is appended to `log_path`, or mixed with our own. It runs once `ready` has returned, which gets its
    group; if that raises, it never does.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path | None,
        environment: Mapping[str, str],
        *,
        die_with: signal.Signals = signal.SIGKILL,
        cores: Sequence[int] = (),
        directory: Path | None = None,
        ready: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self.log_path = log_path
        self._shared_before = present_inodes()
        with _appended(log_path) if log_path else nullcontext() as output:
            self._log_start = output.tell() if output else 0
            self._popen = subprocess.Popen(
                exec_child.words(die_with, command, cores),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=directory,
                start_new_session=True,
            )
        self.group = Group.of(self._popen.pid)
        stdin = self._popen.stdin
        assert stdin is not None
        try:
            ready(self.group)
        except BaseException:
            stdin.close()
            self._popen.wait()
            raise
        with suppress(BrokenPipeError), stdin:  # killed already, as `status` will tell
            stdin.write(b"\n")

    @property
    def pid(self) -> int:
        """Return the number of the leader, which is the group's."""
        return self._popen.pid

    def status(self) -> int | None:
        """Return how the leader ended, negative for a signal; None while it runs. It stays a zombie."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def wait(self, within_s: float) -> int | None:
        """Return how the leader ended, as `status` does, or None if it still runs after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while (status := self.status()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return status

    def end(self) -> str | None:
        """Say how the leader ended, in the words of `exit_words`, or None while it runs."""
        if self._popen.returncode is not None:
            return "stopped"
        status = self.status()
        return None if status is None else exit_words(status)

    def last_lines(self) -> str:
        """Return the end of what this process has written to its log."""
        if self.log_path is None:
            return ""
        return "\n".join(f"    {line}" for line in last_lines(self.log_path, LINES_SHOWN, start=self._log_start))

    def stop(self, grace_s: float) -> None:
        """End the group: TERM, KILL after `grace_s` seconds, 5 s more at most. Idempotent. Raises StillRunning."""
        if self._popen.returncode is not None:
            return
        shared = mapped_files(self.group.members(), self._shared_before)

        def killing(groups: list[Group]) -> None:
            log.warning("Process group %d did not end within %.1f s of TERM: killing it", self.pid, grace_s)

        if end_groups([self.group], grace_s, FOLLOW_S + KILL_WAIT_S, killing=killing):
            seen = f", and {self.log_path}" if self.log_path else ""
            raise StillRunning(
                f"processes {self.group.members()} of group {self.pid} still run {KILL_WAIT_S:.0f} s after SIGKILL: see"
                f" `ps` for what they wait for{seen}"
            )
        self._popen.wait()
        remove_unused(shared)

    def reap(self) -> None:
        """Once its group is gone, or is about to be."""
        self._popen.poll()


def _appended(log_path: Path) -> IO[bytes]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    return open_regular(log_path, "ab")
