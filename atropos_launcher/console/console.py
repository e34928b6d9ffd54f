"""What a person sees of a run: one line per event, with the time of day."""

import errno
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from atropos_launcher.console.rate_limit import Repeated
from atropos_launcher.console.sample_text import latest_sample
from atropos_launcher.run_file.servers import NAME as SERVER
from atropos_launcher.run_file.servers import is_server
from atropos_launcher.run_file.teacher import TEACHER
from atropos_launcher.service import TRAINER, is_trainer
from atropos_launcher.services.event_text import text
from atropos_launcher.services.events import (
    Died,
    Ending,
    Event,
    Interrupted,
    LogLine,
    NotUp,
    Outlived,
    Up,
)
from atroposlib.logs import keep_exit_status
from atroposlib.processes.log_files import printable

TROUBLE = r"(WARNING|ERROR|CRITICAL) "
STEPS = r"Step [0-9]+/|Trained model: |Bitwise identical: "
TRAINER_BRIDGE = r"\[Bridge\] (✓|Mapped|Started|Policy version)|Parity: "
VLLM_BRIDGE = r"\[vLLM Patch\] ✓|Uvicorn running"
SAMPLE_EVERY = 5  # steps
FULL = (errno.ENOSPC, errno.EDQUOT)
_TROUBLE = re.compile(TROUBLE)
_STEP = re.compile(r"Step ([0-9]{1,9})/")


def shown_lines(with_bridge: bool) -> dict[str, str]:
    """By service, where what is shown of a line begins; of an environment, whatever its name, the key is empty, and of
    all vLLM servers "vllm".
    """
    return {
        "": rf"{TROUBLE}|Held-out accuracy",
        "api": TROUBLE,
        "trainer": rf"{TROUBLE}|{STEPS}" + (f"|{TRAINER_BRIDGE}" if with_bridge else ""),
        SERVER: r"ERROR " + (f"|{VLLM_BRIDGE}" if with_bridge else ""),  # until it is up, it warns of its own settings
    }


class PlainConsole:
    """Lines for a terminal, a file or a pipe. What services wrote has no control characters any more. A live console
    writes them elsewhere.
    """

    def __init__(
        self, run_dir: Path, shown: Mapping[str, str], out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self._run_dir = run_dir
        self._shown = {name: re.compile(pattern) for name, pattern in shown.items()}
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._repeated = Repeated()
        keep_exit_status()
        self._are_up: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to give back."""

    def __call__(self, event: Event) -> None:
        """A listener of the supervisor. Raises OSError when nobody reads any more."""
        if isinstance(event, LogLine):
            self._show(event)
        elif isinstance(event, Died | NotUp | Outlived):
            shown = [f"    {printable(line)}" for line in event.last_lines]
            self.put_error("\n".join(["", f"{text(event)} Last lines of {event.log}:", *shown]))
            self._are_up -= {event.service} if isinstance(event, Died) else set()
            if isinstance(event, Died) and event.restart_in_s is not None:
                self.say(f"Restarting {event.service} in {event.restart_in_s:.0f} s")
        else:
            if isinstance(event, Ending):
                for line in self._repeated.rest():
                    self.say(line)
            self.say(text(event))
            if isinstance(event, Up):
                self._are_up.add(event.service)
            if isinstance(event, Interrupted):
                self.say(f"Results so far are in {self._run_dir}")

    def say(self, line: str) -> None:
        """One line of the launcher's own."""
        self.put(f"{time.strftime('%H:%M:%S')} {line}")

    def put(self, line: str) -> None:
        """A line as it is."""
        with _lost_on_a_full_disk():
            print(line, file=self._out, flush=True)

    def put_error(self, text: str) -> None:
        """Print why the run may end, with lines of a log."""
        with _lost_on_a_full_disk():
            print(text, file=self._err, flush=True)

    def _show(self, line: LogLine) -> None:
        pattern = self._shown.get(_kind(line.service)) or self._shown.get("")
        match = pattern.search(line.text) if pattern else None
        if match is None and line.service in self._are_up and "deprecated" not in line.text:
            match = _TROUBLE.search(line.text)
        if match is None:
            return
        shown: str | None = f"{line.service} {printable(line.text[match.start() :])}"
        if _TROUBLE.match(match[0]):
            shown = self._repeated.thinned(str(shown))
        if shown is not None:
            self.say(shown)
        step = _STEP.match(match[0])
        if line.service == "trainer" and step and (step[1] == "1" or int(step[1]) % SAMPLE_EVERY == 0):
            for sample in latest_sample(self._run_dir):
                self.say(sample)


@contextmanager
def _lost_on_a_full_disk() -> Iterator[None]:
    """A console that is a file on a full disk loses lines, and the run continues; any other failure is raised."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


def _kind(service: str) -> str:
    """Return the service whose way of showing lines it shares: the one vLLM server, or the one trainer."""
    return SERVER if is_server(service) or service == TEACHER else TRAINER if is_trainer(service) else service


def is_terminal(out: TextIO) -> bool:
    """Return whether bars can be drawn there: by a process in the foreground, on a terminal that can move its
    cursor.
    """
    if not out.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    try:
        return os.tcgetpgrp(out.fileno()) == os.getpgrp()
    except OSError:  # not our session's
        return False
