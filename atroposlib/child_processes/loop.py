"""The loop of a process that `ChildPool` starts: one JSON line in, one out, until stdin ends.

    {"id": 3, "time_limit_s": 5.0, ...}  ──▶  answer(request)  ──▶  {"id": 3, ...}

A time limit cannot be enforced on sympy and its like from inside, so none is tried: the kernel's alarm, left at its default action,
ends the whole process even while it runs C code, and the parent starts another. The alarm also ends it when the parent is gone.
Memory is bounded likewise.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY_LIMIT_BYTES = 4 * 2**30


def answer_requests(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Serve stdin to stdout, which is kept clean: whatever a library prints goes to stderr. `answer` must not raise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, whose closing of stdin ends this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    logging.disable(logging.WARNING)
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        replies.write(json.dumps({"ready": True}) + "\n")
        replies.flush()
        for line in sys.stdin:
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, request["time_limit_s"])
            reply = answer(request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            replies.write(json.dumps({"id": request["id"], **reply}) + "\n")
            replies.flush()
