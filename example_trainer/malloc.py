"""What the C library's malloc does with memory that a trainer on a CPU frees.

glibc gives a large block back to the system as soon as it is free, and takes new pages, which the system fills with
zeros, for the next one. Gradients and activations are such blocks: each step of SmolLM2-135M gives back and takes 1.5
to 2 GB.
"""

import ctypes
from typing import Any

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, as malloc.h numbers them
NEVER = -1  # a threshold that nothing reaches


def keep_freed_memory(library: Any = None) -> bool:
    """Have malloc keep what is freed from now on for blocks to come; False where the C library has no such choice, and
    then nothing changes. `library`: by default the one that this process has loaded.
    """
    mallopt = getattr(library or ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(what, value) for what, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER)))
