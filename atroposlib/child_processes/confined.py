"""The first module that a child of `ChildPool` runs: it drops its privileges, tries to break out, and runs the module.

    orders (JSON, from `sandbox.py`) ──▶ limits, Landlock, seccomp ──▶ {"means": [..], "escapes": [..]} ──▶ module
                                    └─ fork: the parent stays outside and guards (`warden.py`)

Privileges are dropped before anything else is imported, while there is only one thread that could keep them.
"""

import ctypes
import fcntl
import importlib.util
import json
import os
import resource
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from atroposlib.child_processes.warden import Bounds, end_with_parent, guarded

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2
INSTRUCTION_BYTES = 8


class FilterProgram(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def confine(orders: dict[str, Any]) -> list[str]:
    """Give up all rights that `orders` do not leave, for good. Returns the means that are in force."""
    libc = ctypes.CDLL(None, use_errno=True)
    end_with_parent()
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name, limit in orders["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(kind)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, limit))
    return [*_landlock(orders["readable"], orders["folder"]), *_seccomp(libc, bytes.fromhex(orders["seccomp"]))]


def _landlock(readable: list[str], folder: str) -> list[str]:
    """Let files be read beneath `readable` and changed beneath `folder` alone."""
    from landlock import FSAccess, Ruleset, SyscallError, landlock_abi_version

    ctypes.set_errno(0)  # the package takes what an earlier call left there for an error of its own
    try:
        rules = Ruleset()
    except SyscallError:  # the kernel has no Landlock, or it is switched off
        return []
    for path in filter(os.path.exists, readable):
        rules.allow(path, rules=FSAccess.READ_FILE | FSAccess.READ_DIR if os.path.isdir(path) else FSAccess.READ_FILE)
    devices = FSAccess.MAKE_CHAR | FSAccess.MAKE_BLOCK | FSAccess.MAKE_SOCK | FSAccess.MAKE_FIFO
    rules.allow(folder, rules=FSAccess.all() & ~(devices | FSAccess.EXECUTE))
    rules.apply()
    return [f"Landlock (ABI {landlock_abi_version()})"]


def _seccomp(libc: ctypes.CDLL, instructions: bytes) -> list[str]:
    program = FilterProgram(len(instructions) // INSTRUCTION_BYTES, instructions)
    if not instructions or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        return []
    return ["seccomp"]


def escapes(folder: Path, outside: Path, limits: dict[str, int]) -> list[str]:
    """The forbidden acts that this process can do: it tries each of them. None of them does harm where it succeeds."""
    parent = os.getppid()
    acts: dict[str, Callable[[], object]] = {
        "start a program": lambda: _started(folder / "program"),
        "fork": _forked,
        "open an internet socket": lambda: socket.socket(socket.AF_INET).close(),
        "open a local socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "signal its parent": lambda: os.kill(parent, 0),
        "let the kernel signal its parent": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, parent),
        "make namespaces": _unshared,
        "make a file in memory": lambda: os.close(os.memfd_create("escape")),
        "raise its limits": lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (limits["NOFILE"] + 1, limits["NOFILE"] + 1)
        ),
        "have more memory than its limit": lambda: bytearray(limits["AS"]),
        "write a file larger than its limit": lambda: _grown(folder / "large", limits["FSIZE"] + 1),
        "read its parent's environment": Path(f"/proc/{parent}/environ").read_bytes,
        "read its parent's memory": lambda: Path(f"/proc/{parent}/mem").open("rb").close(),
        "read a file outside": outside.read_bytes,
        "list a directory outside": lambda: os.listdir(outside.parent).index(outside.name),
        "write a file outside": lambda: outside.open("ab").close(),
        "make a file outside": lambda: _made(outside.with_name("made")),
        "change the mode of a file outside": lambda: os.chmod(outside, 0o600),
        "rename a file outside": lambda: os.rename(outside, outside),
    }
    return [act for act, attempt in acts.items() if _succeeds(attempt)]


def _succeeds(attempt: Callable[[], object]) -> bool:
    with suppress(OSError, ValueError, MemoryError):
        attempt()
        return True
    return False


def _started(program: Path) -> None:
    """Call execve on a file that is not there: an allowed call finds that out, a refused one never looks."""
    with suppress(FileNotFoundError):
        os.execv(program, [str(program)])


def _forked() -> None:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)


def _unshared() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _grown(path: Path, size: int) -> None:
    try:
        with path.open("wb") as file:
            file.truncate(size)
    finally:
        with suppress(OSError):
            path.unlink()


def _made(path: Path) -> None:
    path.open("xb").close()
    path.unlink()


def main() -> None:
    """Confine this process, report, and run the module that is named on the command line."""
    orders = json.loads(sys.stdin.readline())
    importlib.util.find_spec(sys.argv[1].partition(".")[0])  # lists its directory, which is soon out of reach
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, whose closing of stdin ends this process
    guarded(Path(orders["folder"]), Bounds(**orders["bounds"]))
    means = confine(orders)
    report = {"means": means, "escapes": escapes(Path(orders["folder"]), Path(orders["outside"]), orders["limits"])}
    print(json.dumps(report), flush=True)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
