"""Has the kernel end a child when its parent dies. This is the only file that asks for that.

As a script, which needs nothing but Python, it becomes the command once the parent allows it:

    parent ──▶ exec_child.py PID SIGNAL CORES COMMAND...: the kernel sends it SIGNAL when the parent dies, and keeps it
               to its cores
           ──▶ the parent writes its record, if it keeps one, then a byte to the child's stdin
           ──exec──▶ the command, same pid, stdin empty

So nothing runs unrecorded: if the parent dies in between, stdin ends and the script exits.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import cache

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
NOT_STARTED = 127  # as a shell has it
PARENT_ASKED_EVERY_S = 0.5


def die_with(parent: int | None, number: int) -> bool:
    """Have the kernel send this process signal `number` when its parent dies. False if the parent, which was the
    process `parent`, has died already. Does nothing but compare where the kernel is not Linux. Raises OSError.
    """
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent


@cache
def kill_after(parent: int, grace_s: float) -> None:
    """Kill this process `grace_s` seconds after its parent, the process `parent`, has ended, if it is still there then.
    Idempotent.

    Python runs a signal's handler between two instructions, so a call of C that waits for a peer, such as one that
    joins a process group, would outlive its parent until its own limit. A thread does not wait for that call.
    """

    def watch() -> None:
        while os.getppid() == parent:  # pidfd_open needs Linux 5.3, which clusters need not have
            time.sleep(PARENT_ASKED_EVERY_S)
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def words(number: int, command: Iterable[str], cores: Sequence[int] = ()) -> list[str]:
    """The command line that starts `command` as a child of this process. It waits for a byte on its stdin."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), _joined(cores), *command]


def main(parent: int, number: int, cores: list[int], command: list[str]) -> None:
    """Wait for the byte, and become `command`, on these CPU cores if there are any."""
    if not die_with(parent, number) or not os.read(0, 1):  # it died before we asked, or before it had our record
        raise SystemExit(NOT_STARTED)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if cores:
        try:
            os.sched_setaffinity(0, cores)  # which its children inherit
        except OSError as error:
            print(f"cannot run on the CPU cores {cores}: {error.strerror}", file=sys.stderr)
            raise SystemExit(NOT_STARTED) from None
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(NOT_STARTED) from None


def _joined(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [int(core) for core in sys.argv[3].split(",") if core], sys.argv[4:])
