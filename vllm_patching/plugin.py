"""vLLM's general plugin: loaded in every vLLM process, before anything else of ours.

Names and prompts reach vLLM's logs, too: from here on their control characters are escaped, as in every log of ours.

Where the launcher asked for batch-invariant arithmetic, it is installed here, before a model exists.

vLLM ends its engine and workers when the API process ends in an orderly way, but leaves them running, ports and
memory held, when that process is killed. Here each child asks the kernel to be told to stop when its parent dies.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

from atroposlib.logs import escape_records
from vllm_patching.batch_invariant import switch

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def register() -> None:
    """Idempotent; vLLM may call it more than once a process."""
    escape_records()
    if switch.is_on():
        from vllm_patching.batch_invariant import hooks

        hooks.install()
    parent = multiprocessing.parent_process()
    if parent is not None:  # the API process has none
        from vllm_patching import compat

        compat.end_engine_with_its_threads()
        if compat.on_cpu():
            compat.zero_new_kv_blocks()
        _end_with(parent.pid)


def _end_with(parent: int | None) -> None:
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGTERM)
