"""Stands where grpo.py does: starts ranks that do as they are told, and load no torch.

python -m tests.unit.trainer.stub_ranks DIST_TIMEOUT_S RANK_0 RANK_1 ...   each a word of ACTS
"""

import os
import signal
import sys
import time
from collections.abc import Callable

from atroposlib.logs import print_error
from example_trainer.ranks.place import LOST, Place, begin_rank, ignore_signals
from example_trainer.ranks.spawn import run_ranks


def ready() -> None:
    os.write(sys.stdout.fileno(), f"RANK {Place.of_this_process().rank} {os.getpid()}\n".encode())  # lines stay whole


def work() -> int:
    """Work until it is asked to end; rank 0 takes a moment to close what it holds."""
    try:
        ready()
        time.sleep(60)
    finally:
        time.sleep(0.2)
        if Place.of_this_process().rank == 0:
            print("CLOSED", flush=True)
    return 0


def stuck() -> int:
    """Wait for another rank where no signal interrupts it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    ready()
    time.sleep(60)
    return 0


def failing() -> int:
    ready()
    print_error("grpo", "its own line")
    return 1


def losing() -> int:
    """Notice that another one is gone."""
    ready()
    time.sleep(0.5)
    return LOST


def finishing() -> int:
    ready()
    time.sleep(0.5)
    return 0


ACTS: dict[str, Callable[[], int]] = {
    "work": work,
    "stuck": stuck,
    "failing": failing,
    "losing": losing,
    "finishing": finishing,
}


def main() -> int:
    place = Place.of_this_process()
    if place.size == 1:
        return run_ranks(len(sys.argv) - 2, float(sys.argv[1]))
    begin_rank(place)
    try:
        return ACTS[sys.argv[2 + place.rank]]()
    finally:
        ignore_signals()


if __name__ == "__main__":
    raise SystemExit(main())
