"""Plain `grpo.py` with several trainer ranks: one process per rank, started and ended together.

    grpo.py --trainer-ranks 2 ──┬─▶ rank 0   its exit status is the run's
                                └─▶ rank 1   ends with rank 0, and with this process

This process computes nothing. It reports ranks that were killed or stopped, in one line on stderr. All ranks are in its
process group, so a signal to the group reaches all of them. Importing this module loads no torch; why it is not torch's
launcher, which starts the ranks of several machines (agent.py), is in docs/devices.md.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from atroposlib.logs import configure_logging, get_logger, print_error, put
from atroposlib.processes.identity import is_stopped
from atroposlib.stderr_lines import plain_stderr
from example_trainer.ranks.place import ASKING, LOST, VARIABLE, was_ended_by

NOTICE_S = 3.0  # for the ranks to end by themselves, once one has
GRACE_S = 5.0  # for rank 0 to leave in order, once another rank is lost
STOP_S = 60.0  # for rank 0 to leave in order, once it has been asked to
POLL_S = 0.05

log = get_logger(__name__)


@dataclass(frozen=True)
class Loss:
    """Tells why the run cannot continue, in a line; empty where a rank has printed one."""

    line: str = ""


def run_ranks(size: int, dist_timeout_s: float) -> int:
    """Start `size` ranks of this very command, and wait for them. The exit status of the run: rank 0's, or 1 with a
    line on stderr for what no rank could report itself.
    """
    configure_logging("trainer ranks")
    parent = _Parent(dist_timeout_s)
    try:
        parent.start(size)
        return parent.watch()
    finally:
        for rank in parent.ranks:
            rank.kill()
            rank.process.wait()


class _Rank:
    """One rank's process, as of the last `look`."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number = number
        self.process = process
        self.end: int | None = None  # its exit status, or the negative number of a signal; not of ours
        self.stopped_at: float | None = None  # since when it is stopped (SIGSTOP)
        self._asked = self._killed = False  # by this process

    def look(self) -> bool:
        """Note how the rank has ended, or since when it is stopped. Return whether it runs."""
        status = self.process.poll()
        if not self._killed:
            self.end = status
            if status is None:
                self.stopped_at = (self.stopped_at or time.monotonic()) if is_stopped(self.process.pid) else None
        return status is None

    @property
    def failure(self) -> int:
        """Return `end` where the rank failed by itself, and was not only lost by another; else 0."""
        return self.end if self.end and self.end != LOST else 0

    @property
    def asked_by_others(self) -> int | None:
        """Return the signal with which someone has asked this very rank to end: rank 0 leaves in order on it, any other
        at once.
        """
        if self._asked or self.end is None:
            return None
        signum = self.end - 128 if self.number == 0 else -self.end
        return signum if signum in ASKING else None

    def ask(self, signum: int) -> None:
        """Have it end in order, also if it is stopped."""
        self._asked = True
        self.process.send_signal(signum)
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        if self.look():
            self._killed = True
            self.process.kill()


class _Parent:
    """Holds the ranks, in their order, from `start` to the end of `watch`."""

    def __init__(self, dist_timeout_s: float) -> None:
        self.ranks: list[_Rank] = []
        self._dist_timeout_s = dist_timeout_s
        self._signals: list[int] = []  # that have asked this process or a rank to end
        for signum in ASKING:
            signal.signal(signum, lambda signum, frame: self._signals.append(signum))

    def start(self, size: int) -> None:
        """Start the ranks. Signals wait until a rank can take them (place.begin_rank)."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
            try:
                for number in range(size):
                    self.ranks.append(_Rank(number, _start(number, size, listener)))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
            port = listener.getsockname()[1]
        pids = " ".join(str(rank.process.pid) for rank in self.ranks)
        log.info("Started %d trainer ranks, which meet at 127.0.0.1:%d: pids %s", size, port, pids)

    def watch(self) -> int:
        """Wait until rank 0 has ended, end the others, and explain. The exit status of the run."""
        first, *others = self.ranks
        loss = self._watch_until_the_end()
        if first.look():
            self._end(first, others)
        self._wait_for([other for other in others if other.look() and other.stopped_at is None], NOTICE_S)
        if first.end is not None and 0 <= first.end < LOST:  # done, or ended by an error that it has printed
            return first.end
        return self._explain(loss)

    def _watch_until_the_end(self) -> Loss | None:
        """Return once rank 0 has ended, or has to: a signal asks for it, or the run cannot continue, and rank 0 has had
        the time to notice that by itself.
        """
        first = self.ranks[0]
        while first.look() and not self._signals:
            time.sleep(POLL_S)
            self._look()
            if not self._signals and (loss := self._loss()) is not None:
                self._wait_for([first], NOTICE_S)
                return loss
        return None

    def _end(self, first: _Rank, others: Sequence[_Rank]) -> None:
        """Have rank 0 leave in order. It may wait for the others where no signal interrupts it, so they are killed."""
        grace_s = STOP_S if self._signals else GRACE_S
        first.ask(self._signals[0] if self._signals else signal.SIGTERM)
        for other in others:
            other.kill()
        self._wait_for([first], grace_s)

    def _explain(self, loss: Loss | None) -> int:
        """Say why the run has ended before it was done, where no rank has. The exit status of the run."""
        self._look()
        if self._signals:
            if self._signals[0] == signal.SIGINT:
                put("grpo: interrupted", plain_stderr())
            return 128 + self._signals[0]
        loss = loss or self._loss() or self._last_word()
        if loss.line:
            print_error("grpo", loss.line)
        return 1

    def _look(self) -> None:
        """Note how each rank is, and the signals that others have sent to one."""
        for rank in self.ranks:
            rank.look()
            if (signum := rank.asked_by_others) is not None:
                self._signals.append(signum)

    def _loss(self) -> Loss | None:
        """Explain why the run cannot continue, if a rank has ended or is stopped for too long."""
        now = time.monotonic()
        failed = [rank for rank in self.ranks if rank.failure]
        if failed:
            return Loss() if failed[0].failure > 0 else self._lost(failed[0], was_ended_by(-failed[0].failure))
        silent = [rank for rank in self.ranks if rank.stopped_at and now - rank.stopped_at >= self._dist_timeout_s]
        return self._silent(silent[0]) if silent else None

    def _last_word(self) -> Loss:
        """Explain why rank 0 has ended, where neither it nor another one has said so, and none was lost."""
        silent = [rank for rank in self.ranks if rank.stopped_at is not None or rank.end is None]
        lost_contact = f"the {len(self.ranks)} trainer ranks have lost contact with each other; see their log"
        return self._silent(silent[0]) if silent else Loss(lost_contact)

    def _silent(self, rank: _Rank) -> Loss:
        state = "runs, but" if rank.stopped_at is None else "is stopped (SIGSTOP), and"
        return self._lost(rank, f"{state} did not answer for {self._dist_timeout_s:g} s (--dist-timeout-s)")

    def _lost(self, rank: _Rank, how: str) -> Loss:
        return Loss(f"trainer rank {rank.number} of {len(self.ranks)} {how}; the others have ended with it")

    def _wait_for(self, ranks: Sequence[_Rank], within_s: float) -> None:
        """Return when the ranks have ended, after at most `within_s` seconds, or at a second Ctrl-C or TERM."""
        deadline, signals = time.monotonic() + within_s, len(self._signals)
        while any([rank.look() for rank in ranks]):
            if time.monotonic() > deadline or len(self._signals) > signals:
                return
            time.sleep(POLL_S)


def _start(number: int, size: int, listener: socket.socket) -> subprocess.Popen[bytes]:
    """A rank: this very command, told by a variable which rank it is. Rank 0 inherits the socket where all meet."""
    place = (number, size, listener.getsockname()[1], listener.fileno(), os.getpid())
    return subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env={**os.environ, VARIABLE: " ".join(map(str, place))},
        pass_fds=[listener.fileno()] if number == 0 else [],
        stdin=subprocess.DEVNULL,
    )
