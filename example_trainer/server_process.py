"""A child process in its own process group, ended with all of its descendants. The restart bridge runs its vLLM server
in one.

    trainer ──▶ this file as a script: asks the kernel to be killed when the trainer dies
            ──exec──▶ the command, same pid

Promises
- Only the group that was started here is ever signalled. Its leader stays unreaped until the group is gone, so the
  kernel cannot give its number to another process meanwhile.
- When the trainer is killed, so is the leader; vLLM's engine and workers follow their API process
  (vllm_patching/plugin.py).
- What only this group had mapped in /dev/shm is removed: by its own resource tracker, for which a leader that
  ignores TERM is killed before the rest, or by us.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from atroposlib.files import open_regular
from atroposlib.logs import get_logger
from example_trainer.errors import TrainerError

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
SHARED_MEMORY = "/dev/shm"
POLL_S = 0.05
FOLLOW_S = 0.5  # in which vLLM's processes follow their leader (vllm_patching/plugin.py)
KILL_WAIT_S = 3.0
LINES_SHOWN = 20
DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

log = get_logger(__name__)


class ServerProcess:
    """`command` with its output appended to `log_path`; runs from construction until it ends or `stop`. Start it in
    the main thread.
    """

    def __init__(self, command: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log_path
        with open_regular(log_path, "ab") as output:
            self._log_start = output.tell()
            self._popen = subprocess.Popen(
                [sys.executable, __file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def end(self) -> str | None:
        """How the leader ended ("exit status 1", "killed by SIGKILL"), or None while it runs."""
        if self._popen.returncode is not None:
            return "stopped"
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if ended.si_code == os.CLD_EXITED:
            return f"exit status {ended.si_status}"
        return f"killed by {signal.Signals(ended.si_status).name}"

    def last_lines(self) -> str:
        """The end of what this process has written to its log."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LINES_SHOWN:])

    def stop(self, grace_s: float) -> None:
        """End the group: TERM, KILL after `grace_s` seconds, 5 s more at most. Idempotent. Raises TrainerError if
        some stays.
        """
        if self._popen.returncode is not None:
            return
        shared = mapped_shared_memory(self._members())
        os.killpg(self.pid, signal.SIGTERM)
        if not self._gone_within(grace_s):
            log.warning("Process group %d did not end within %.1f s of TERM: killing it", self.pid, grace_s)
            os.kill(self.pid, signal.SIGKILL)
            if not self._gone_within(FOLLOW_S):
                os.killpg(self.pid, signal.SIGKILL)
            if not self._gone_within(KILL_WAIT_S):
                raise TrainerError(
                    f"processes {sorted(self._members())} of group {self.pid} still run {KILL_WAIT_S:.0f} s after"
                    f" SIGKILL: see `ps` for what they wait for, and {self.log_path}"
                )
        self._popen.wait()
        if shared:
            orphaned = shared - mapped_shared_memory(psutil.pids())
            for entry in os.scandir(SHARED_MEMORY):
                if entry.inode() in orphaned:
                    Path(entry.path).unlink(missing_ok=True)

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(self._members()):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _members(self) -> Iterator[int]:
        for pid in psutil.pids():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(pid) == self.pid and psutil.Process(pid).status() not in DEAD:
                    yield pid


def mapped_shared_memory(pids: Iterable[int]) -> set[int]:
    """Inodes of the files in /dev/shm that these processes have mapped, as far as this user may see; semaphores are
    mapped too.
    """
    device = os.stat(SHARED_MEMORY).st_dev
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    found = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
            fields = (line.split(maxsplit=5) for line in maps)  # address, permissions, offset, device, inode, path
            found |= {int(inode) for _, _, _, device_name, inode, *_ in fields if device_name == wanted}
    return found


if __name__ == "__main__":  # in the child: die with the trainer, then become the command
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    trainer, *command = sys.argv[1:]
    if os.getppid() != int(trainer):  # it died before we asked
        raise SystemExit(1)
    os.execv(command[0], command)
