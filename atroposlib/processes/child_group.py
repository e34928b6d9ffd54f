"""A child process in its own process group, ended with all of its descendants. The restart bridge runs its vLLM server
in one.

- Only the group that was started here is ever signalled. Its leader stays unreaped until the group is gone, so the
  kernel cannot give its number to another process meanwhile.
- When the parent is killed, so is the leader (exec_child.py); vLLM's engine and workers follow their API process
  (vllm_patching/plugin.py).
- What only this group had mapped in /dev/shm is removed: by its own resource tracker, for which a leader that
  ignores TERM is killed before the rest, or by us.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from atroposlib.errors import AtroposError
from atroposlib.files import open_regular
from atroposlib.logs import get_logger
from atroposlib.processes import exec_child
from atroposlib.processes.identity import living_members
from atroposlib.processes.log_files import last_lines
from atroposlib.processes.shared_memory import SHARED_MEMORY, mapped_shared_memory

POLL_S = 0.05
FOLLOW_S = 0.5  # in which vLLM's processes follow their leader (vllm_patching/plugin.py)
KILL_WAIT_S = 3.0
LINES_SHOWN = 20

log = get_logger(__name__)


class StillRunning(AtroposError):
    """Is raised when processes of a group are there after SIGKILL."""


class ChildGroup:
    """Runs `command`, with its output appended to `log_path`, from construction until it ends or `stop`. Start it in
    the main thread.
    """

    def __init__(self, command: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log_path
        with open_regular(log_path, "ab") as output:
            self._log_start = output.tell()
            self._popen = subprocess.Popen(
                exec_child.words(signal.SIGKILL, command),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError), self._popen.stdin as stdin:  # killed already, as `end` will tell
            stdin.write(b"\n")

    def end(self) -> str | None:
        """Say how the leader ended ("exit status 1", "killed by SIGKILL"), or None while it runs."""
        if self._popen.returncode is not None:
            return "stopped"
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if ended.si_code == os.CLD_EXITED:
            return f"exit status {ended.si_status}"
        return f"killed by {signal.Signals(ended.si_status).name}"

    def last_lines(self) -> str:
        """Return the end of what this process has written to its log."""
        return "\n".join(f"    {line}" for line in last_lines(self.log_path, LINES_SHOWN, start=self._log_start))

    def stop(self, grace_s: float) -> None:
        """End the group: TERM, KILL after `grace_s` seconds, 5 s more at most. Idempotent. Raises StillRunning."""
        if self._popen.returncode is not None:
            return
        shared = mapped_shared_memory(living_members(self.pid))
        os.killpg(self.pid, signal.SIGTERM)
        if not self._gone_within(grace_s):
            log.warning("Process group %d did not end within %.1f s of TERM: killing it", self.pid, grace_s)
            os.kill(self.pid, signal.SIGKILL)
            if not self._gone_within(FOLLOW_S):
                os.killpg(self.pid, signal.SIGKILL)
            if not self._gone_within(KILL_WAIT_S):
                left = living_members(self.pid)
                raise StillRunning(
                    f"processes {left} of group {self.pid} still run {KILL_WAIT_S:.0f} s after SIGKILL: see `ps` for"
                    f" what they wait for, and {self.log_path}"
                )
        self._popen.wait()
        if shared:
            orphaned = shared - mapped_shared_memory(psutil.pids())
            for entry in os.scandir(SHARED_MEMORY):
                if entry.inode() in orphaned:
                    Path(entry.path).unlink(missing_ok=True)

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while living_members(self.pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True
