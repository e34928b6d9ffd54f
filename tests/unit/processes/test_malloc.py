"""What malloc does with memory that the trainer frees: kept in this process, so that the next step faults no pages."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from atroposlib.processes.malloc import MMAP_MAX, NEVER, TRIM_THRESHOLD, keep_freed_memory

FAULTS_OF_A_SECOND_BLOCK = """
import ctypes, resource, sys
import torch
from atroposlib.processes.malloc import give_back_freed_memory, keep_freed_memory

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a page is 4 KB
if sys.argv[1] != "plain" and not keep_freed_memory():
    sys.exit("no mallopt")
torch.ones(64 << 20, dtype=torch.uint8)
if sys.argv[1] == "give back":
    give_back_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(48 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.services
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="page faults of glibc's malloc")
def test_a_block_in_memory_that_was_freed_costs_no_page_faults() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS_OF_A_SECOND_BLOCK, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert faults("keep") * 5 < faults("plain")
    assert faults("keep") * 5 < faults("give back")


@pytest.mark.parametrize(("answer", "kept"), [(1, True), (0, False)])
def test_malloc_is_told_both_and_what_it_refuses_is_known(answer: int, kept: bool) -> None:
    told: list[tuple[int, int]] = []

    def mallopt(what: int, value: int) -> int:
        told.append((what, value))
        return answer

    assert keep_freed_memory(SimpleNamespace(mallopt=mallopt)) is kept
    assert told == ([(MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER)] if answer else [(MMAP_MAX, 0)])


def test_a_c_library_without_the_choice_is_left_alone() -> None:
    assert not keep_freed_memory(SimpleNamespace())
