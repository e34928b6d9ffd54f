"""The process that the supervisor starts: it becomes the service once it is recorded.

    supervisor ──▶ this file as a script: the kernel sends it TERM when the supervisor dies, and keeps it to its cores
               ──▶ the supervisor writes its record, then a byte to its stdin
               ──exec──▶ the service, same pid, stdin closed

So no service runs unrecorded: if the supervisor dies in between, stdin ends and the script exits.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
NOT_STARTED = 127  # as a shell has it


def main(parent: int, cores: list[int], command: list[str]) -> None:
    """Wait for the byte, and become `command`, on these CPU cores if there are any."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent or not os.read(0, 1):  # it died before we asked, or before it had written our record
        raise SystemExit(NOT_STARTED)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if cores:
        try:
            os.sched_setaffinity(0, cores)  # which its children inherit
        except OSError as error:
            print(f"cannot run on the CPU cores {cores}: {error.strerror}", file=sys.stderr)
            raise SystemExit(NOT_STARTED) from None
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the service would inherit that
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(NOT_STARTED) from None


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(core) for core in sys.argv[2].split(",") if core], sys.argv[3:])
