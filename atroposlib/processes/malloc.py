"""What glibc's malloc does with memory that a process on a CPU frees.

glibc gives a block above its mmap threshold (at most 32 MB) back to the system as soon as it is free, and smaller ones
once enough of them is free at the end of its heap. The next block is made of new pages, which the system fills with
zeros. A trainer's gradients and activations are such blocks: each step of SmolLM2-135M gives back and takes 1.5 to
2 GB. So are the logits and probabilities of a pass of vLLM: three of 12.6 MB for 64 rows of that model's vocabulary.
"""

import ctypes
from typing import Any

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # parameters of mallopt, as malloc.h numbers them
NEVER = -1  # a threshold that nothing reaches
BLOCK = 32 << 20  # bytes: the highest mmap threshold that glibc takes


def keep_freed_memory(library: Any = None) -> bool:
    """Have malloc keep what is freed from now on for blocks to come. Return whether the C library took both settings,
    which musl and macOS do not have; another malloc that was preloaded may ignore them. `library`: by default the one
    that this process has loaded.
    """
    return _set(library, (MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER))


def keep_freed_blocks(library: Any = None) -> bool:
    """Have malloc keep up to eight freed blocks of BLOCK bytes, or smaller ones, for blocks to come, and give greater
    ones back. Return what keep_freed_memory does.
    """
    return _set(library, (MMAP_THRESHOLD, BLOCK), (TRIM_THRESHOLD, 8 * BLOCK))


def _set(library: Any, *settings: tuple[int, int]) -> bool:
    mallopt = getattr(library or ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(what, value) for what, value in settings)


def give_back_freed_memory() -> None:
    """Give the system all that is free, for a process that is about to need it; the next step takes new pages."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
