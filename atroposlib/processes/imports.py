"""Imports of libraries with very many objects: torch, transformers, vLLM. Python's garbage collector would take a fifth
of their time to look again and again through objects that stay.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import meanwhile what takes seconds."""
    gc.disable()
    try:
        yield
    finally:
        collect_again()


def collect_again() -> None:
    """Turn the collector on, where it is off. It passes over all that was made by then, also in forks, which so share
    its memory.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
