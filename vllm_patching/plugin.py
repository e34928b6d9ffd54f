"""vLLM's general plugin: vLLM loads it in each of its processes, before any other part of this package. Processes
that vLLM forks have loaded it before they were; our server has them register anew.

It escapes control characters in vLLM's logs, which contain names and prompts of requests.

It installs batch-invariant arithmetic, and salts by policy version, if the launcher asked for them, before a model
exists.

When vLLM's API process exits normally, it ends its engine and workers. When it is killed, they keep running, with their
ports and memory. So each child asks the kernel for a SIGTERM when its parent dies. One that cannot take the signal, as
it waits for a peer in C, is killed a little later.
"""

import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import stat
import sys
from contextlib import suppress
from functools import cache

from atroposlib.logs import escape_records
from atroposlib.processes.exec_child import die_with, kill_after
from vllm_patching.batch_invariant import switch
from vllm_patching.kv_cache import SALTED

GRACE_S = 15.0  # in which an engine ends by itself when its API process has died


def register() -> None:
    """Idempotent: vLLM may call it several times in one process."""
    escape_records()
    if switch.is_on():
        from vllm_patching.batch_invariant import hooks

        hooks.install()
    from vllm_patching.compat import vllm_engine, vllm_kernels, vllm_layers

    if vllm_layers.on_cpu():
        if not switch.is_on():
            vllm_kernels.fuse_norm()
        vllm_layers.share_rows()
        vllm_layers.share_logits()
        vllm_engine.accept_routed_experts()
        vllm_engine.take_back_discarded_draws()
        vllm_engine.draw_by_inversion()
        vllm_engine.sleep_while_waiting()
    if os.environ.get(SALTED) == "1":
        vllm_engine.salt_requests()
    parent = multiprocessing.parent_process()
    if parent is not None:  # the API process has none
        vllm_engine.end_engine_with_its_threads()
        if vllm_layers.on_cpu():
            vllm_engine.zero_new_kv_blocks()
        _end_with(parent.pid)


@cache
def register_in_forks() -> None:
    """Have every process that this one forks from now on register, and each that those fork. What was asked for may
    have become known after the plugin was loaded.
    """
    multiprocessing.util.register_after_fork(register, _begin_as_fork)


def _begin_as_fork(_: object) -> None:
    """Leave the parent's event loop, which would take this process's signals for its own, and its ports, which would
    stay taken until this process has followed it. Then register.
    """
    signal.set_wakeup_fd(-1)
    with open(os.devnull, "rb") as nothing:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if _is_bound_to_a_port(descriptor):
                os.dup2(nothing.fileno(), descriptor)  # and not closed: objects of the parent still name it
    register()


def _is_bound_to_a_port(descriptor: int) -> bool:
    """Whether an open file is a TCP socket that is connected to nobody."""
    with suppress(OSError):  # the list of open files was one of them, and is closed by now
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                return False
            try:
                found.getpeername()
            except OSError:
                return True
    return False


def _end_with(parent: int | None) -> None:
    if not sys.platform.startswith("linux") or parent is None:
        return
    kill_after(parent, GRACE_S)
    if not die_with(parent, signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
