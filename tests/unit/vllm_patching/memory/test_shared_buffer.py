"""Shared memory between processes: the same bytes, nothing left behind, clear errors."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from atroposlib.processes.identity import still_runs, this_process
from atroposlib.wire.processes import Process
from vllm_patching.memory.shared_buffer import SharedBuffer, SharedBufferError, open_buffer

HOLDER = """
import json, sys, time
from msgspec.structs import asdict
from atroposlib.processes.identity import this_process
from vllm_patching.memory.shared_buffer import SharedBuffer
buffer = SharedBuffer(8192)
print(json.dumps([asdict(this_process()), buffer.fd]), flush=True)
sys.stdin.readline()
print(int(buffer.tensor[100]), flush=True)
time.sleep(60)
"""


@pytest.mark.services
def test_another_process_writes_the_same_bytes_and_a_kill_leaves_nothing() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None

    process, fd = json.loads(holder.stdout.readline())
    owner = Process(**process)
    view = open_buffer(owner, fd, 8192)
    view[100] = 42
    holder.stdin.write("go\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "42\n"
    mapped = Path(f"/proc/{holder.pid}/maps").read_text()
    assert "/memfd:atropos-weights (deleted)" in mapped
    assert "/dev/shm/" not in mapped
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(10)
    assert not still_runs(owner)
    view[101] = 7  # the pages live on while someone has them mapped
    with pytest.raises(SharedBufferError, match="has ended"):
        open_buffer(owner, fd, 8192)


def test_its_memory_is_there_and_its_size_cannot_change() -> None:
    buffer = SharedBuffer(1 << 20)
    assert buffer.tensor.shape == (1 << 20,)
    assert buffer.tensor.dtype == torch.uint8
    assert os.fstat(buffer.fd).st_blocks * 512 == 1 << 20  # allocated now, not at the first write
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 4096)


def test_a_view_outlives_the_buffer_whose_descriptor_is_closed() -> None:
    buffer = SharedBuffer(4096)
    fd, view = buffer.fd, buffer.tensor[:8]
    del buffer
    view.fill_(3)
    assert view.tolist() == [3] * 8
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_more_than_is_free_is_refused_with_figures() -> None:
    with pytest.raises(SharedBufferError, match=r"need 1000000000 MB of shared memory, but \d+ MB are free"):
        SharedBuffer(10**15)


def test_a_descriptor_of_another_size_or_none_is_refused() -> None:
    buffer = SharedBuffer(4096)
    with pytest.raises(SharedBufferError, match="has 4096 bytes, not the 8192"):
        open_buffer(this_process(), buffer.fd, 8192)
    with pytest.raises(SharedBufferError, match="No such file"):
        open_buffer(this_process(), 987654, 4096)


def test_a_reused_pid_is_not_the_same_process() -> None:
    me = this_process()
    assert still_runs(me)
    assert not still_runs(replace(me, started=me.started - 1))
    assert not still_runs(replace(me, pid=2**22 + 1))


@pytest.mark.services
def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(["sleep", "60"])
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    process = replace(this_process(), pid=child.pid, started=int(stat[19]))
    assert still_runs(process)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not still_runs(process)
    child.wait()
