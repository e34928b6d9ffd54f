"""`atropos stop`: ends what a launcher started, and nothing else on the machine. First the launcher, then the processes
of its records, each checked by its start time.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from atropos_launcher import arguments
from atropos_launcher.console.console import PlainConsole
from atropos_launcher.runs import NoSuchRun, find_run, recorded_runs
from atropos_launcher.services.records import Record, Records, RunInUse
from atropos_launcher.services.shared_memory import SharedMemory
from atropos_launcher.services.stop_services import end
from atroposlib.errors import AtroposError, reading
from atroposlib.logs import print_error
from atroposlib.processes.log_files import printable

LAUNCHER_S = 15.0  # it ends its services in at most 7 s
POLL_S = 0.1
KERNEL_S = 30.0  # in which it ends what was killed: gigabytes are given back, on a machine that may be busy


class CannotStop(AtroposError):
    """The records cannot be read or changed, or a process outlives SIGKILL."""


def parser() -> arguments.Parser:
    command = arguments.Parser("stop", "End a run and all its services. Without RUN: the running one.")
    command.add_argument("run", nargs="?", metavar="RUN", help="name or directory of a run")
    command.add_argument("--all", action="store_true", help="every run")
    arguments.add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    command = parser()
    options = command.parse(argv)
    if options.run and options.all:
        command.error(f"either {options.run} or --all")
    running = recorded_runs(options.runs)
    if options.run:
        chosen = [find_run(options.runs, options.run)]
    elif len(running) > 1 and not options.all:
        names = " ".join(run.name for run in running)
        raise NoSuchRun(f"several runs have services; name one, or --all: {names}")
    else:
        chosen = running
    if not chosen:
        print(f"No run has services: nothing in {printable(str(options.runs))}/*/pids")
    return max([_stop(run) for run in chosen], default=0)


def _stop(run: Path) -> int:
    """Exit status; a run that cannot be stopped does not keep the next one running."""
    try:
        stop(run)
    except AtroposError as error:
        print_error("atropos stop", error)
        return error.exit_status
    return 0


def stop(run: Path) -> None:
    """End the run in this directory. Raises CannotStop, ForeignRecord and RunInUse."""
    console, shown = PlainConsole(run, {}), printable(str(run))
    records = Records(run)
    if not records.exist():
        print(f"{shown} has no services recorded: it ended by itself or never ran")
        return
    with reading(f"cannot stop {shown}", CannotStop):
        _take_over(records, console)
        memory = SharedMemory(records)
        memory.read()
        left = end(records, records.services(), memory, console, KERNEL_S)
    if left:
        raise CannotStop(
            f"{', '.join(left)} of {shown} is still there {KERNEL_S:.0f} s after SIGKILL: the kernel has not ended it;"
            " run this command again"
        )
    console.say(f"Everything of {shown} has ended")


def _take_over(records: Records, console: PlainConsole) -> None:
    """End the launcher, and claim what it leaves. Raises RunInUse."""
    deadline = time.monotonic() + LAUNCHER_S
    told: Record | None = None
    while True:
        launcher = records.launcher()
        if launcher and launcher != told:
            told = launcher
            shown = printable(str(records.run_dir))
            console.say(
                f"Ending the launcher of {shown} (pid {launcher.pid}), which ends its services (at most"
                f" {LAUNCHER_S:.0f} s)"
            )
            _signal(launcher, signal.SIGTERM)
        elif launcher and time.monotonic() > deadline:
            _signal(launcher, signal.SIGKILL)
            console.say(f"Killed the launcher, still running after {LAUNCHER_S:.0f} s")
        try:
            records.claim()
            return
        except RunInUse:
            if time.monotonic() > deadline + 1:
                raise
        time.sleep(POLL_S)


def _signal(launcher: Record, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(launcher.pid, number)
