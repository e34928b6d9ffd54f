"""A process that cannot take a signal does not outlive its parent by more than the time of grace."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.services

GRACE_S = 0.5
CHILD = f"""
import os, signal, sys, time
from atroposlib.processes.exec_child import kill_after
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a call of C does that waits for a peer
kill_after(int(sys.argv[1]) if sys.argv[1:] else os.getppid(), {GRACE_S})
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_it_is_killed_after_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(2 * GRACE_S)
        assert child.status() != psutil.STATUS_ZOMBIE  # while the parent lives
        parent.kill()
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_is_killed_if_its_parent_had_ended_already() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    child = subprocess.run([sys.executable, "-c", CHILD, str(gone.pid)], capture_output=True, timeout=60, check=False)
    assert child.returncode == -signal.SIGKILL
    assert child.stdout
