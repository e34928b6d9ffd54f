"""vLLM's general plugin: vLLM loads it in each of its processes, before any other part of this package.

It escapes control characters in vLLM's logs, which contain names and prompts of requests.

It installs batch-invariant arithmetic, and salts by policy version, if the launcher asked for them, before a model
exists.

When vLLM's API process exits normally, it ends its engine and workers. When it is killed, they keep running, with their
ports and memory. So each child asks the kernel for a SIGTERM when its parent dies. One that cannot take the signal, as
it waits for a peer in C, is killed a little later.
"""

import multiprocessing
import os
import signal
import sys

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
            vllm_kernels.fuse_norm_and_activation()
        vllm_layers.share_rows()
        vllm_engine.accept_routed_experts()
        vllm_engine.take_back_discarded_draws()
        vllm_engine.sleep_while_waiting()
    if os.environ.get(SALTED) == "1":
        vllm_engine.salt_requests()
    parent = multiprocessing.parent_process()
    if parent is not None:  # the API process has none
        vllm_engine.end_engine_with_its_threads()
        if vllm_layers.on_cpu():
            vllm_engine.zero_new_kv_blocks()
        _end_with(parent.pid)


def _end_with(parent: int | None) -> None:
    if not sys.platform.startswith("linux") or parent is None:
        return
    kill_after(parent, GRACE_S)
    if not die_with(parent, signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
