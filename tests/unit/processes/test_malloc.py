"""What malloc does with memory that a process frees: kept in it, so that the next step or pass faults no pages."""

import functools
import platform
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.processes.malloc import (
    BLOCK,
    MMAP_MAX,
    MMAP_THRESHOLD,
    NEVER,
    TRIM_THRESHOLD,
    keep_freed_blocks,
    keep_freed_memory,
)

FAULTS_OF_A_SECOND_BLOCK = """
import ctypes, resource, sys
import numpy as np
from atroposlib.processes.malloc import give_back_freed_memory, keep_freed_blocks, keep_freed_memory

how, first, second = sys.argv[1], int(sys.argv[2]) << 20, int(sys.argv[3]) << 20
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a page is 4 KB
if how != "plain" and not (keep_freed_blocks if how == "keep blocks" else keep_freed_memory)():
    sys.exit("no mallopt")
np.ones(first, np.uint8)
if how == "give back":
    give_back_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(second, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.services
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="page faults of glibc's malloc")
def test_a_block_in_memory_that_was_freed_costs_no_page_faults() -> None:
    @functools.cache
    def faults(how: str, *megabytes: int) -> int:
        command = [sys.executable, "-c", FAULTS_OF_A_SECOND_BLOCK, how, *map(str, megabytes)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert faults("keep", 64, 48) * 5 < faults("plain", 64, 48)
    assert faults("keep", 64, 48) * 5 < faults("give back", 64, 48)
    assert faults("keep blocks", 24, 20) * 5 < faults("plain", 24, 20)
    assert faults("keep", 64, 48) * 5 < faults("keep blocks", 64, 48)  # those above 32 MB are given back


@pytest.mark.parametrize(("answer", "kept"), [(1, True), (0, False)])
@pytest.mark.parametrize(
    ("keep", "settings"),
    [
        (keep_freed_memory, [(MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER)]),
        (keep_freed_blocks, [(MMAP_THRESHOLD, BLOCK), (TRIM_THRESHOLD, 8 * BLOCK)]),
    ],
)
def test_malloc_is_told_both_and_what_it_refuses_is_known(
    keep: Callable[[Any], bool], settings: list[tuple[int, int]], answer: int, kept: bool
) -> None:
    told: list[tuple[int, int]] = []

    def mallopt(what: int, value: int) -> int:
        told.append((what, value))
        return answer

    assert keep(SimpleNamespace(mallopt=mallopt)) is kept
    assert told == (settings if answer else settings[:1])


def test_a_c_library_without_the_choice_is_left_alone() -> None:
    assert not keep_freed_memory(SimpleNamespace())
