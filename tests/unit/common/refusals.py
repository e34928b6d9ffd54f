"""A kernel without what the sandbox uses: a seccomp filter refuses it to one thread and the processes it starts."""

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pyseccomp

from atroposlib.child_processes.sandbox import bubblewrap

CLONE_NEWNS = 0x20000
PR_SET_SECCOMP = 22


def without(means: tuple[str, ...], main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of `main()`, run where the kernel grants none of `means`: "landlock", "namespaces", "seccomp"."""
    results: list[Any] = []

    def run() -> None:
        _refuse(means)
        try:
            results.append(asyncio.run(main()))
        except Exception as error:
            results.append(error)

    bubblewrap.cache_clear()  # it remembers whether namespaces were granted
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    bubblewrap.cache_clear()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _refuse(means: tuple[str, ...]) -> None:
    calls = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    if "landlock" in means:
        for name in ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"):
            calls.add_rule(pyseccomp.ERRNO(errno.ENOSYS), name)
    if "namespaces" in means:
        calls.add_rule(pyseccomp.ERRNO(errno.EPERM), "unshare")
        calls.add_rule(
            pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_NEWNS, CLONE_NEWNS)
        )
    if "seccomp" in means:
        calls.add_rule(pyseccomp.ERRNO(errno.EINVAL), "seccomp")
        calls.add_rule(pyseccomp.ERRNO(errno.EINVAL), "prctl", pyseccomp.Arg(0, pyseccomp.EQ, PR_SET_SECCOMP))
    if means:
        calls.load()
