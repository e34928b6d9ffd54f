"""The console on a terminal: the plain console's lines, and below them bars for what takes long.

The terminal's own state is never changed: the cursor stays visible, no other screen is used. So the terminal still
works after the launcher is killed. Lines are written once, above the bars, and never erased; bars are drawn by a thread
four times a second, and are gone at the end.
"""

import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO
from urllib.parse import urlsplit

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atropos_launcher.console.console import PlainConsole, shown_lines
from atropos_launcher.console.progress import Bar, RunProgress
from atropos_launcher.services.events import Event, Up

if TYPE_CHECKING:
    from atropos_launcher.plan.services import Plan

DRAW_S = 0.25
ASK_S = 1.0
NAME_WIDTH = 12
WIDEST_BAR = 30
STYLES = (
    ("ERROR ", "red"),
    ("CRITICAL ", "red"),
    ("WARNING ", "yellow"),
    ("No step for ", "yellow"),
    ("Sample: ", "cyan"),
)


class Terminal(Console):
    """Rich's, as a guest: it hides no cursor, and a terminal that is gone is an OSError, not the end of the process."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(
            file=out,
            force_terminal=True,
            force_interactive=True,
            highlight=False,
            color_system=None if os.environ.get("NO_COLOR") else "auto",
        )

    def show_cursor(self, show: bool = True) -> bool:
        return False

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich has caught


def as_guest(terminal: Terminal, drawing: Callable[[], RenderableType] | None = None) -> Live:
    """Draws when it is told to, leaves nothing, and takes neither stdout nor stderr."""
    return Live(
        console=terminal,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        get_renderable=drawing,
    )


class LiveConsole(PlainConsole):
    """Draws bars when it is used as a context manager; `queued` asks how many groups wait."""

    def __init__(
        self,
        run_dir: Path,
        with_bridge: bool,
        progress: RunProgress,
        queued: "QueuedGroups | None" = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        super().__init__(run_dir, shown_lines(with_bridge), out, err)
        self._progress = progress
        self._queued = queued
        self._api_is_up = False
        self._over = threading.Event()
        self._turn = threading.RLock()  # whose it is to write, and to change what is drawn
        self._terminal = Terminal(self._out)
        self._live = as_guest(self._terminal, self._bars)
        self._threads = [threading.Thread(target=self._draw, daemon=True)]
        if queued is not None:
            self._threads.append(threading.Thread(target=self._ask, daemon=True))

    def __enter__(self) -> Self:
        self._live.start()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with self._turn, suppress(OSError):
            self._live.stop()

    def __call__(self, event: Event) -> None:
        with self._turn:
            self._progress.see(event, time.monotonic())
            if isinstance(event, Up) and event.service == "api":
                self._api_is_up = True
            super().__call__(event)

    def put(self, line: str) -> None:
        style = next((style for mark, style in STYLES if mark in line), "")
        with self._turn:
            self._terminal.print(Text(line, style), soft_wrap=True)

    def put_error(self, text: str) -> None:
        if self._err.isatty():
            with self._turn:
                self._terminal.print(Text(text), soft_wrap=True)
        else:
            super().put_error(text)

    def _bars(self) -> Table | Text:
        """Draw what stands below the lines now."""
        with self._turn:
            if self._over.is_set():
                return Text("")
            return drawn(self._progress.bars(time.monotonic()), self._terminal.width)

    def _draw(self) -> None:
        with suppress(OSError):  # the terminal is gone: the next line says so to the supervisor
            while not self._over.wait(DRAW_S):
                with self._turn:
                    if not self._over.is_set():
                        self._live.refresh()

    def _ask(self) -> None:
        assert self._queued is not None
        while not self._over.wait(ASK_S):
            if self._api_is_up:
                queued = self._queued()
                with self._turn:
                    self._progress.queued = queued


class QueuedGroups:
    """Asks how many groups the batching API holds for the next batches; None where it does not answer."""

    def __init__(self, api: str, token: str | None = None, timeout_s: float = 2.0) -> None:
        self._address = urlsplit(api).netloc
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s

    def __call__(self) -> int | None:
        connection = http.client.HTTPConnection(self._address, timeout=self._timeout_s)
        with closing(connection), suppress(OSError, http.client.HTTPException, ValueError):
            connection.request("GET", "/status", headers=self._headers)
            answer = json.loads(connection.getresponse().read())
            if isinstance(answer, dict) and isinstance(answer.get("queue_size"), int):
                return int(answer["queue_size"])
        return None


def drawn(bars: list[Bar], width: int) -> Table:
    """A line each, no wider than the terminal: a line that wrapped could not be erased."""
    name_width = min(NAME_WIDTH, max(1, width // 4))
    table = Table.grid(padding=(0, 1))
    table.width = max(1, width - 1)
    table.add_column(no_wrap=True, width=name_width, overflow="ellipsis")
    bar_width = min(WIDEST_BAR, width // 4)
    if bar_width >= 5:
        table.add_column(width=bar_width, no_wrap=True)
    table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
    for bar in bars:
        drawing = ProgressBar(total=bar.total, completed=bar.done or 0.0, width=bar_width, pulse=bar.total is None)
        cells = [Text(bar.name), drawing, Text(bar.note)] if bar_width >= 5 else [Text(bar.name), Text(bar.note)]
        table.add_row(*cells)
    return table


def live_console(plan: "Plan", with_bridge: bool) -> LiveConsole:
    """The console of this run."""
    trainer, token = plan.trainer, plan.trainer.atropos_token
    sizes = {_group_size(environment.resolved) for environment in plan.environments.values()}
    size = sizes.pop() if len(sizes) == 1 else None
    groups = -(-trainer.batch_size * trainer.gradient_accumulation_steps // size) if size else None
    return LiveConsole(
        plan.site.run_dir,
        with_bridge,
        RunProgress(trainer.training_steps, groups),
        QueuedGroups(plan.site.api, None if token is None else token.get_secret_value()),
    )


@contextmanager
def one_bar(name: str, note: str, out: TextIO | None = None) -> Iterator["Advance"]:
    """A bar on its own, for what is done before there is a run. It is drawn from the first step on."""
    advance = Advance(name, note, out or sys.stderr)
    try:
        yield advance
    finally:
        advance.close()


class Advance:
    """Called with how much is done, of how much."""

    def __init__(self, name: str, note: str, out: TextIO) -> None:
        self._name, self._note = name, note
        self._terminal = Terminal(out)
        self._live: Live | None = None
        self._drawn = 0.0

    def __call__(self, done: int, total: int) -> None:
        if self._live is None:
            self._live = as_guest(self._terminal)
            self._live.start()
        if time.monotonic() - self._drawn > DRAW_S or done == total:
            self._drawn = time.monotonic()
            bar = Bar(self._name, done, total, f"{self._note}: {done} of {total}")
            self._live.update(drawn([bar], self._terminal.width), refresh=True)

    def close(self) -> None:
        """The bar is gone."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()


def _group_size(resolved: dict[str, object]) -> int | None:
    env = resolved.get("env")
    size = env.get("group_size") if isinstance(env, dict) else None
    return size if isinstance(size, int) and size > 0 else None
