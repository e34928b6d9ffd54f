"""The loop of a process that `ChildPool` starts: one JSON line in, one out, until stdin ends.

    {"id": "a8f0", "time_limit_s": 5.0, ...}  ──▶  answer(request)  ──▶  {"id": "a8f0", ...}

By then `confined.py` has dropped the process's privileges. Python cannot enforce a time limit on sympy from inside, so
the kernel does: its alarm, left at the default action, ends the whole process even while it runs C code, and the parent
starts another. Code that cancels the alarm is ended by the warden (`warden.py`), soon after.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable


def answer_requests(answer: Callable[[dict[str, object]], dict[str, object]]) -> None:
    """Serve stdin to stdout, which is kept clean: whatever a library prints goes to stderr. `answer` must not raise."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
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
