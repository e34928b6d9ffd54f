"""Imports of libraries with very many objects: torch, transformers, vLLM."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import meanwhile what takes seconds. The collector would take a fifth of them to look again and again through
    objects that stay. It passes over all that was made, also later, and in forks, which so share its memory.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
