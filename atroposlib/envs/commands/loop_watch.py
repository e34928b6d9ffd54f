"""Tells the log when code of an environment holds its event loop: nothing is sampled, and no heartbeat sent, meanwhile.

    event loop ── a mark twice a second ──▶ LoopWatch ◀── thread: is the mark old? ──▶ log: how long, and at which line

A `score` that computes or waits without `await` does this.
"""

import asyncio
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Self

from atroposlib.envs.authors.author_errors import is_authors
from atroposlib.logs import get_logger

log = get_logger(__name__)

MARK_EVERY_S = 0.5
TOLD_AFTER_S = 5.0


class LoopWatch:
    """Watches the event loop in which it is entered, until it is left. `held_after_s` is what may pass unsaid."""

    def __init__(self, held_after_s: float = TOLD_AFTER_S) -> None:
        self._held_after_s = held_after_s
        self._marked_at = time.monotonic()
        self._loop_thread = threading.get_ident()
        self._left = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._told = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._mark(), name="loop watch")
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._left.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _mark(self) -> None:
        while True:
            held_s = time.monotonic() - self._marked_at
            if self._told:
                log.warning("The event loop runs again after %.1f s", held_s)
            self._marked_at, self._told = time.monotonic(), False
            await asyncio.sleep(MARK_EVERY_S)

    def _watch(self) -> None:
        while not self._left.wait(MARK_EVERY_S):
            held_s = time.monotonic() - self._marked_at
            if held_s < self._held_after_s or self._told:
                continue
            self._told = True
            log.warning(
                "The event loop has stood still for %.1f s%s: nothing is sampled and no heartbeat sent meanwhile. Code"
                " that computes or waits for long belongs in `await asyncio.to_thread(...)`",
                held_s,
                _place_of(sys._current_frames().get(self._loop_thread)),
            )


def _place_of(frame: FrameType | None) -> str:
    """` at my_env.py:17 in score`: the innermost line of the author's that runs; else the innermost at all."""
    lines = traceback.extract_stack(frame) if frame is not None else []
    own = [line for line in lines if is_authors(line.filename)] or lines
    return f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
