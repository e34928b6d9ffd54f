"""The most memory that was in use while a command ran, sampled once per second, or as told, in a thread."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

import psutil

from atropos_launcher.placement.this_machine import MIB, printed_by

INTERVAL_S = 1.0


class PeakMemory:
    """`nbytes` is the largest of what `sample` returned until the block ended; 0 if it never did."""

    def __init__(self, sample: Callable[[], int], interval_s: float | None = None) -> None:
        self.nbytes = 0
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._sample = sample
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="PeakMemory", daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        while True:
            self.nbytes = max(self.nbytes, self._sample())
            if self._stop.wait(self._interval_s):
                return


def of_gpus(names: Sequence[str]) -> int:
    """Bytes in use on the fullest of these GPUs, named by index or UUID, other users' processes included; 0 where the
    driver does not tell.
    """
    listed = printed_by("nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits") or ""
    rows = [line.split(", ") for line in listed.splitlines() if line.count(", ") == 2]
    used = [
        int(mib) * MIB
        for index, uuid, mib in rows
        if mib.isdecimal() and any(name == index or uuid.startswith(name) for name in names)
    ]
    return max(used, default=0)


def of_processes(pid: int) -> int:
    """Resident bytes of a process and its descendants; pages that they share count in each."""
    total = 0
    with suppress(psutil.Error):
        tree = psutil.Process(pid)
        for each in [tree, *tree.children(recursive=True)]:
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total
