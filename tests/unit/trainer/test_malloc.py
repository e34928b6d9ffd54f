"""What malloc does with memory that the trainer frees: kept in this process, so that the next step faults no pages."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from example_trainer.malloc import MMAP_MAX, NEVER, TRIM_THRESHOLD, keep_freed_memory

FAULTS_OF_A_SECOND_BLOCK = """
import resource, sys
import torch
from example_trainer.malloc import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("no mallopt")
torch.ones(64 << 20, dtype=torch.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(48 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.services
@pytest.mark.skipif(sys.platform != "linux", reason="page faults of glibc's malloc")
def test_a_block_in_memory_that_was_freed_costs_no_page_faults() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS_OF_A_SECOND_BLOCK, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert faults("keep") * 5 < faults("plain")


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
