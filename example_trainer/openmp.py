"""How the trainer's OpenMP threads wait. Import it before torch, whose OpenMP reads the variable once, when it is
loaded.

Trainer and vLLM take turns on the same cores. A thread that spins for long while it waits occupies the core that the
other needs; one that sleeps at once takes longer to wake than each of the thousands of small sums and norms of a step
takes. So they spin for some 50 to 100 us. After a third of that, which ends before Python calls the next operation, a
decode pass of vLLM took a quarter longer (Xeon).

libgomp, which PyTorch brings, reads both variables. A process with more threads than cores, such as one whose second
thread has multiplied once, spins by the policy alone: 1,000 times if it is ACTIVE, and not at all if it is PASSIVE.
Intel's library, which a user may preload, would spin for ever if it were ACTIVE.
"""

import os
from collections.abc import Mapping


def waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the OpenMP library of a process with this environment waits."""
    if "iomp" in environ.get("LD_PRELOAD", ""):
        return {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "1"}
    return {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "6000"}


WAITING = waiting(os.environ)
for name, value in WAITING.items():
    os.environ.setdefault(name, value)
