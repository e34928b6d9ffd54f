"""The parent of trainer ranks, with ranks that load no torch: whichever process ends, and however, all end, with the
right exit status and one line.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.services

REPOSITORY = Path(__file__).parents[4]
TIMEOUT_S = 2.0  # --dist-timeout-s


@dataclass
class Outcome:
    """How a run ended; `left` are processes of it that live on."""

    status: int
    out: str
    errors: list[str]  # without lines of the log
    seconds: float
    left: list[int]


class Ranks:
    """A parent and its ranks, all of which have started."""

    def __init__(self, *acts: str, wait: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.trainer.stub_ranks", str(TIMEOUT_S), *acts],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().split() for _ in acts] if wait else []
        self.pids = [int(pid) for _, _, pid in sorted(lines)]
        self.since = time.monotonic()

    def kill(self, rank: int, signum: int) -> None:
        os.kill(self.pids[rank], signum)

    def end(self, within_s: float = 15.0) -> Outcome:
        try:
            out, err = self.process.communicate(timeout=within_s)
        finally:
            seconds = time.monotonic() - self.since
            left = [pid for pid in self.pids if psutil.pid_exists(pid)]
            for pid in [*left, *([self.process.pid] if self.process.returncode is None else [])]:
                os.kill(pid, signal.SIGKILL)
        errors = [line for line in err.splitlines() if "[trainer" not in line]
        return Outcome(self.process.returncode, out, errors, seconds, left)


def check(outcome: Outcome, status: int, *errors: str, closed: bool = True) -> None:
    """`closed`: rank 0 had the time to close what it holds."""
    assert (outcome.status, outcome.errors, outcome.left) == (status, list(errors), [])
    assert ("CLOSED" in outcome.out) == closed


def killed(rank: int) -> str:
    return (
        f"grpo: error: trainer rank {rank} of 2 was ended by SIGKILL (by the kernel, if memory ran out); the others"
        " have ended with it"
    )


def stopped(rank: int) -> str:
    return (
        f"grpo: error: trainer rank {rank} of 2 is stopped (SIGSTOP), and did not answer for 2 s (--dist-timeout-s);"
        " the others have ended with it"
    )


INTERRUPTED = "grpo: interrupted"


def test_the_run_ends_with_rank_0() -> None:
    check(Ranks("finishing", "work").end(), 0, closed=False)


def test_an_error_that_a_rank_has_printed_is_the_only_line() -> None:
    check(Ranks("failing", "losing").end(), 1, "grpo: error: its own line", closed=False)
    check(Ranks("work", "failing").end(), 1, "grpo: error: its own line")


@pytest.mark.parametrize("first", ["work", "losing", "stuck"])
def test_a_killed_rank_ends_all_with_one_line(first: str) -> None:
    """Whether rank 0 waits for a batch, notices, or waits for the one that was killed."""
    ranks = Ranks(first, "stuck")
    ranks.kill(1, signal.SIGKILL)
    outcome = ranks.end()
    check(outcome, 1, killed(1), closed=first == "work")
    assert outcome.seconds < 15


def test_a_killed_rank_0_ends_all_with_one_line() -> None:
    ranks = Ranks("work", "losing")
    ranks.kill(0, signal.SIGKILL)
    check(ranks.end(), 1, killed(0), closed=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_all_within_the_deadline_and_ten_seconds(rank: int) -> None:
    ranks = Ranks("work", "work")
    ranks.kill(rank, signal.SIGSTOP)
    outcome = ranks.end()
    check(outcome, 1, stopped(rank))  # also rank 0 closes: it is continued for that
    assert TIMEOUT_S <= outcome.seconds < TIMEOUT_S + 10


def test_a_rank_that_was_stopped_for_less_goes_on() -> None:
    ranks = Ranks("work", "stuck")
    ranks.kill(1, signal.SIGSTOP)
    time.sleep(TIMEOUT_S / 2)
    ranks.kill(1, signal.SIGCONT)
    time.sleep(TIMEOUT_S)
    assert ranks.process.poll() is None
    ranks.process.terminate()
    check(ranks.end(), 143)


@pytest.mark.parametrize(
    ("signum", "status", "lines"), [(signal.SIGINT, 130, [INTERRUPTED]), (signal.SIGTERM, 143, [])]
)
@pytest.mark.parametrize("whom", ["the parent", "all, as a terminal does", "rank 0", "rank 1"])
def test_ctrl_c_and_term_end_all_in_order(whom: str, signum: int, status: int, lines: list[str]) -> None:
    ranks = Ranks("work", "work")
    if whom == "the parent":
        ranks.process.send_signal(signum)
    elif whom.startswith("all"):
        os.killpg(ranks.process.pid, signum)
    else:
        ranks.kill(int(whom[-1]), signum)
    check(ranks.end(), status, *lines)


def test_a_second_ctrl_c_does_not_wait_for_rank_0() -> None:
    ranks = Ranks("stuck", "stuck")
    ranks.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    ranks.process.send_signal(signal.SIGINT)
    outcome = ranks.end()
    check(outcome, 130, INTERRUPTED, closed=False)
    assert outcome.seconds < 5


def test_a_signal_during_the_start_waits_until_ranks_can_take_it() -> None:
    """No traceback of an import that was interrupted."""
    ranks = Ranks("work", "work", wait=False)
    assert ranks.process.stderr is not None
    assert "Started 2 trainer ranks" in ranks.process.stderr.readline()
    os.killpg(ranks.process.pid, signal.SIGINT)
    outcome = ranks.end()
    assert (outcome.status, outcome.errors) == (130, [INTERRUPTED])


@pytest.mark.slow
@pytest.mark.parametrize("first", ["work", pytest.param("stuck", marks=pytest.mark.nightly)])
def test_no_rank_outlives_a_killed_parent(first: str) -> None:
    ranks = Ranks(first, "stuck")
    ranks.process.kill()
    gone = psutil.wait_procs([psutil.Process(pid) for pid in ranks.pids if psutil.pid_exists(pid)], timeout=15)
    assert gone[1] == []
    check(ranks.end(), -signal.SIGKILL, closed=first == "work")


def test_ranks_that_lost_each_other_are_explained() -> None:
    check(
        Ranks("losing", "losing").end(),
        1,
        "grpo: error: the 2 trainer ranks have lost contact with each other; see their log",
        closed=False,
    )
