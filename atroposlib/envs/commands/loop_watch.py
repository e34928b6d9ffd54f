"""Tells the log when code of an environment holds its event loop: nothing is sampled, and no heartbeat sent, meanwhile.

    event loop ── a mark ten times a second ──▶ LoopWatch ◀── thread: is the mark old? at which line? ──▶ log

A `score` that computes or waits without `await` does this, in one long hold or in many short ones: what counts is how
long a line has held the loop within a minute.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections import defaultdict
from types import FrameType
from typing import Self

from atroposlib.envs.authors.author_errors import is_authors
from atroposlib.logs import get_logger

log = get_logger(__name__)

LOOK_EVERY_S = 0.1
LATE_S = 0.3  # the age of a mark from which the loop counts as held
WINDOW_S = 60.0
TOLD_AFTER_S = 3.0  # within a window, for a line of the author's
OTHERS_TOLD_AFTER_S = 10.0  # for one of a library, which a busy machine may slow down
SELECT = ("select", "_run_once")  # the loop waits, and is not held


class HeldLines:
    """Adds up how long each line has held the loop within a window, and says when that is worth a line."""

    def __init__(self, held_after_s: float, others_after_s: float) -> None:
        self._held_after_s, self._others_after_s = held_after_s, others_after_s
        self._held_s: defaultdict[str, float] = defaultdict(float)
        self._due_s: dict[str, float] = {}
        self._since = 0.0

    def note(self, place: str, is_own: bool, held_s: float, now: float) -> float | None:
        """`place` was seen to hold the loop for `held_s` more. Return for how long it has, if that is to be told: the
        next time at twice as much.
        """
        if now - self._since > WINDOW_S:
            self._held_s.clear()
            self._since = now
        self._held_s[place] += held_s
        due = self._due_s.get(place, self._held_after_s if is_own else self._others_after_s)
        if self._held_s[place] < due:
            return None
        self._due_s[place] = 2 * due
        return self._held_s[place]


class LoopWatch:
    """Watches the event loop in which it is entered, until it is left. `held_after_s` is what may pass unsaid."""

    def __init__(self, held_after_s: float = TOLD_AFTER_S) -> None:
        self._lines = HeldLines(held_after_s, max(held_after_s, OTHERS_TOLD_AFTER_S))
        self._marked_at = time.monotonic()
        self._loop_thread = threading.get_ident()
        self._left = threading.Event()
        self._task: asyncio.Task[None] | None = None

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
            self._marked_at = time.monotonic()
            await asyncio.sleep(LOOK_EVERY_S)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._left.wait(LOOK_EVERY_S):
            since, looked_at = looked_at, time.monotonic()
            if looked_at - self._marked_at < LATE_S:
                continue
            self._look(sys._current_frames().get(self._loop_thread), looked_at - max(since, self._marked_at), looked_at)

    def _look(self, frame: FrameType | None, held_s: float, now: float) -> None:
        lines = traceback.extract_stack(frame) if frame is not None else []
        if not lines or lines[-1].name in SELECT:
            return
        own = [line for line in lines if is_authors(line.filename)]
        line = own[-1] if own else lines[-1]
        told_s = self._lines.note(f"{line.filename}:{line.lineno} in {line.name}", bool(own), held_s, now)
        if told_s is not None:
            log.warning(
                "The event loop has stood still for %.1f s of the last minute at %s:%s in %s: nothing is sampled and no"
                " heartbeat sent meanwhile. Code that computes or waits for long belongs in"
                " `await asyncio.to_thread(...)` of an `async def`",
                told_s,
                line.filename,
                line.lineno,
                line.name,
            )
