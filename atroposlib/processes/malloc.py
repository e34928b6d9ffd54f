"""What glibc's malloc does with memory that a process on a CPU frees.

glibc gives a block above its mmap threshold (at most 32 MB) back to the system as soon as it is free. The next one is
made of new pages, which the system fills with zeros. Gradients and activations are such blocks: each step of
SmolLM2-135M gives back and takes 1.5 to 2 GB.
"""

import ctypes
from typing import Any

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, as malloc.h numbers them
NEVER = -1  # a threshold that nothing reaches


def keep_freed_memory(library: Any = None) -> bool:
    """Have malloc keep what is freed from now on for blocks to come. Return whether the C library took both settings,
    which musl and macOS do not have; another malloc that was preloaded may ignore them. `library`: by default the one
    that this process has loaded.
    """
    mallopt = getattr(library or ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, NEVER))


def give_back_freed_memory() -> None:
    """Give the system all that is free, for a process that is about to need it; the next step takes new pages."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
