"""Plain `grpo.py` with several trainer ranks: one process per rank, started and ended together.

    grpo.py --trainer-ranks 2 ──┬─▶ rank 0   Ctrl-C and TERM are passed on to it; its exit status is the run's
                                └─▶ rank 1   ends with rank 0, and with this process

torchrun does the same over several machines. Importing this module loads no torch.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from atroposlib.logs import print_error
from example_trainer.config import TrainerConfig
from example_trainer.gpus import visible_gpus

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
VARIABLE = "ATROPOS_TRAINER_RANK"  # rank, size, port of the store, its socket, pid of the parent
LOST = 70  # the exit status of a rank that misses another one, and leaves the explanation to us
NOTICE_S = 3.0  # for the other ranks, once one has ended
GRACE_S = 8.0  # for rank 0 to leave in order, where it had not noticed
STOP_S = 60.0  # for rank 0, once it has been asked to end
POLL_S = 0.05


@dataclass(frozen=True)
class Place:
    """A process among the trainer's ranks, and among those on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    port: int | None = None  # of the store, on loopback, where this module started the ranks
    listener: int | None = None  # the socket that rank 0 makes the store of
    parent: int | None = None

    @staticmethod
    def of_this_process() -> "Place":
        """As torchrun or this module says; else alone."""
        if (ours := os.environ.get(VARIABLE)) is not None:
            rank, size, port, listener, parent = map(int, ours.split())
            return Place(rank, size, rank, size, port, listener if rank == 0 else None, parent)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return Place(*(int(os.environ.get(name, default)) for name, default in zip(names, (0, 1, 0, 1), strict=True)))


def ranks_to_start(config: TrainerConfig) -> int:
    """How many processes this one must start; 0 if it is a rank itself, or the only one."""
    if VARIABLE in os.environ or "WORLD_SIZE" in os.environ:
        return 0
    ranks = config.trainer_ranks
    if ranks == "auto":
        alone = config.device != "auto" or config.batch_invariant or not config.bridge.several_ranks
        ranks = 1 if alone else len(visible_gpus(os.environ)) or 1
    return ranks if ranks > 1 else 0


def run_ranks(size: int, dist_timeout_s: float) -> int:
    """Start `size` ranks of this very command, and wait for them: rank 0's exit status, or 1 with a line on stderr for
    what no rank could report itself.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ranks = [_start(rank, size, listener) for rank in range(size)]
    asked: list[int] = []  # signals to pass on to rank 0
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: asked.append(signum))
    first = ranks[0]
    stopping = False
    try:
        while first.poll() is None:
            if asked:
                stopping = True
                first.send_signal(asked.pop())
                _ended([first], STOP_S, asked)
                break
            if any(rank.poll() is not None for rank in ranks):
                if not _ended([first], NOTICE_S, asked):  # it waits for a batch, or for ever
                    first.terminate()
                    _ended([first], GRACE_S, asked)
                break
            time.sleep(POLL_S)
        _ended(ranks, NOTICE_S, asked)
    finally:
        silent = [rank.poll() is None for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.wait()
    if first.returncode >= 0 and (stopping or first.returncode not in (LOST, 128 + signal.SIGTERM)):
        return first.returncode
    if cause := _cause(ranks, silent, dist_timeout_s):
        print_error("grpo", cause)
    return 1


def _cause(ranks: list[subprocess.Popen[bytes]], silent: list[bool], dist_timeout_s: float) -> str | None:
    """Why the ranks ended, unless one of them has said so."""
    for number, rank in enumerate(ranks):
        if rank.returncode < 0 and not silent[number]:
            killer = signal.Signals(-rank.returncode).name
            return f"trainer rank {number} of {len(ranks)} was ended by {killer}; the others have ended with it"
    for number, _ in enumerate(ranks):
        if silent[number]:
            return (
                f"trainer rank {number} of {len(ranks)} did not answer for {dist_timeout_s:g} s (--dist-timeout-s);"
                " the others have ended with it"
            )
    if all(rank.returncode in (0, LOST) for rank in ranks):
        return f"the {len(ranks)} trainer ranks lost each other"
    return None


def _ended(ranks: list[subprocess.Popen[bytes]], within_s: float, asked: list[int]) -> bool:
    """Whether all have ended, after at most `within_s` seconds. A signal that comes meanwhile is passed on."""
    deadline = time.monotonic() + within_s
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            return False
        if asked:
            ranks[0].send_signal(asked.pop())
        time.sleep(POLL_S)
    return True


def _start(rank: int, size: int, listener: socket.socket) -> subprocess.Popen[bytes]:
    place = (rank, size, listener.getsockname()[1], listener.fileno(), os.getpid())
    return subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env={**os.environ, VARIABLE: " ".join(map(str, place))},
        pass_fds=[listener.fileno()] if rank == 0 else [],
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C reaches this process alone, which passes it on
    )


def end_with_parent() -> None:
    """In a rank: end when the process that started it does, rank 0 in order, the others at once."""
    place = Place.of_this_process()
    if place.parent is None:
        return
    signum = signal.SIGTERM if place.rank == 0 else signal.SIGKILL
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != place.parent:  # it died before we asked
        raise SystemExit(128 + signum)
