"""What a person sees of a run: one line an event, with the time of day."""

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from example_trainer.launcher.events import (
    Died,
    Ended,
    Ending,
    Event,
    Interrupted,
    Killed,
    LogLine,
    NotUp,
    Outlived,
    Quiet,
    Restarted,
    Started,
    StillThere,
    StillWaiting,
    Up,
    Waiting,
)
from example_trainer.launcher.log_files import printable

TROUBLE = r"(WARNING|ERROR|CRITICAL) "
STEPS = r"Step [0-9]+/|Trained model: |Bitwise identical: "
TRAINER_BRIDGE = r"\[Bridge\] (✓|Mapped|Started|Policy version)|Parity: "
VLLM_BRIDGE = r"\[vLLM Patch\] ✓|Uvicorn running"


def shown_lines(with_bridge: bool) -> dict[str, str]:
    """By service, where what is shown of a line begins; of an environment, whatever its name, the key is empty."""
    return {
        "": rf"{TROUBLE}|Held-out accuracy",
        "api": TROUBLE,
        "trainer": rf"{TROUBLE}|{STEPS}" + (f"|{TRAINER_BRIDGE}" if with_bridge else ""),
        "vllm": r"ERROR " + (f"|{VLLM_BRIDGE}" if with_bridge else ""),  # its warnings are about its own settings
    }


class PlainConsole:
    """Lines for a terminal, a file or a pipe. What services wrote has no control characters any more."""

    def __init__(
        self, run_dir: Path, shown: Mapping[str, str], out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self._run_dir = run_dir
        self._shown = {name: re.compile(pattern) for name, pattern in shown.items()}
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    def __call__(self, event: Event) -> None:
        """A listener of the supervisor. Raises OSError when nobody reads any more."""
        if isinstance(event, LogLine):
            self._show(event)
        elif isinstance(event, Died | NotUp | Outlived):
            shown = [f"    {printable(line)}" for line in event.last_lines]
            print("", f"{text(event)} Last lines of {event.log}:", *shown, sep="\n", file=self._err, flush=True)
            if isinstance(event, Died) and event.restart_in_s is not None:
                self.say(f"Starting {event.service} again in {event.restart_in_s:.0f} s")
        else:
            self.say(text(event))
            if isinstance(event, Interrupted):
                self.say(f"What there is so far is in {self._run_dir}")

    def say(self, line: str) -> None:
        """One line of the launcher's own."""
        print(time.strftime("%H:%M:%S"), line, file=self._out, flush=True)

    def _show(self, line: LogLine) -> None:
        pattern = self._shown.get(line.service) or self._shown.get("")
        found = pattern.search(line.text) if pattern else None
        if found:
            self.say(f"{line.service} {printable(line.text[found.start() :])}")


def text(event: Event) -> str:  # noqa: C901  # one line an event
    """What happened, in a sentence."""
    match event:
        case Started(service, pid, log):
            return f"Started {service} (pid {pid}, log {log})"
        case Waiting(service, url, limit_s, log):
            return f"Waiting for {service} at {url}, at most {limit_s:.0f} s (log {log})"
        case StillWaiting(service, url, left_s):
            return f"Still waiting for {service} at {url}, {left_s:.0f} s left"
        case Up(service, after_s):
            return f"{service} is up after {after_s:.0f} s"
        case NotUp(service, url, limit_s):
            return f"{service} did not answer at {url} within {limit_s:.0f} s."
        case Ended(service):
            return f"{service} has ended"
        case Died(service, pid, how):
            return f"{service} (pid {pid}) died: {how}."
        case Restarted(service, pid, attempt, attempts):
            return f"Restarted {service} (pid {pid}), restart {attempt} of {attempts}"
        case Outlived(services, limit_s):
            return f"{' '.join(services)} still runs {limit_s:.0f} s after the others ended."
        case LogLine(service, line):
            return f"{service} {printable(line)}"
        case Quiet(for_s, lines):
            return f"No step for {for_s:.0f} s: {printable('. '.join(lines))}"
        case Interrupted(number):
            return f"Interrupted by {number.name}"
        case Ending(services, limit_s):
            return f"Ending {' '.join(services)} (at most {limit_s:.0f} s)"
        case Killed(services, after_s):
            return f"Killed after {after_s:.0f} s without an end: {' '.join(services)}"
        case StillThere(services):
            return f"Still there, although killed: {' '.join(services)}"
