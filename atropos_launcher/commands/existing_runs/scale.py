"""`atropos scale vllm N`: gives a running run more vLLM servers, or fewer, while its trainer goes on."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from atropos_launcher import arguments
from atropos_launcher.paths import named
from atropos_launcher.runs import NoSuchRun, find_run, recorded_runs
from atropos_launcher.service import is_trainer
from atropos_launcher.services.records import Records
from atropos_launcher.services.scale_request import ScaleAnswer, ScaleRequest, read_answer, write_request
from atroposlib.errors import AtroposError, reading
from atroposlib.logs import print_error
from atroposlib.processes.log_files import printable

POLL_S = 0.3
HEARD_S = 60.0  # in which the launcher has begun, unless it still does what was asked before


class CannotScale(AtroposError):
    """The launcher refused, did not answer, or is gone."""


def parser() -> arguments.Parser:
    command = arguments.Parser(
        "scale",
        "Give a running run more vLLM servers, or fewer. A new one gets the policy at the next sync, and requests once"
        " its weights are the trainer's; one that leaves answers first what it has begun. Without RUN: the one that"
        " runs.",
    )
    command.add_argument("service", choices=["vllm"], help="the service to scale")
    command.add_argument("count", type=arguments.whole_number, metavar="N", help="how many servers the run shall have")
    command.add_argument("run", nargs="?", metavar="RUN", help="name or directory of a run")
    arguments.add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    options = parser().parse(argv)
    run = find_run(options.runs, options.run) if options.run else _running(options.runs)
    try:
        scale(run, options.count)
    except AtroposError as error:
        print_error("atropos scale", error)
        return error.exit_status
    return 0


def scale(run: Path, count: int) -> None:
    """Have the launcher of a run change its number of vLLM servers, and print what it does. Raises CannotScale."""
    records, asked, shown = Records(run), ScaleRequest.of(count), 0
    expect_trainer(run, records)
    with reading(f"cannot ask the launcher of {printable(str(run))}", CannotScale):
        write_request(records, asked)
    print(f"Asking the launcher of {printable(str(run))} for {count} vLLM server(s)", flush=True)
    began = time.monotonic()
    while True:
        answer = read_answer(records)
        if answer is None or answer.id != asked.id:
            answer = ScaleAnswer(asked.id)
        for line in answer.lines[shown:]:
            print(printable(line), flush=True)
        shown = len(answer.lines)
        if answer.error:
            raise CannotScale(answer.error)
        if answer.done:
            return
        if records.launcher() is None:
            raise CannotScale(f"{printable(str(run))} has ended")
        if not answer.lines and time.monotonic() - began > HEARD_S:
            raise CannotScale(
                f"the launcher has not begun within {HEARD_S:.0f} s: it is stopped, or busy with an earlier"
                " `atropos scale`, and does this one next (launcher.log says)"
            )
        time.sleep(POLL_S)


def expect_trainer(run: Path, records: Records) -> None:
    """Raise CannotScale for a run that has no launcher to ask, or no trainer that would feed a server."""
    shown, name = printable(str(run)), printable(shlex.quote(named(run)))
    if not records.exist():
        raise CannotScale(f"{shown} is not running: `atropos train --resume {name}` continues it")
    if records.launcher() is None:
        raise CannotScale(f"the launcher of {shown} is gone: `atropos stop {name}` ends what it left")
    names = [record.name for record in records.services()]
    if names and not any(map(is_trainer, names)):
        raise CannotScale(f"{shown} has no trainer that would feed a server: it runs {', '.join(names)}")


def _running(runs: Path) -> Path:
    """Return the run that has services. Raises NoSuchRun unless there is one."""
    running = recorded_runs(runs)
    if len(running) != 1:
        names = " ".join(run.name for run in running)
        raise NoSuchRun(
            f"several runs have services; name one: {names}"
            if running
            else f"no run has services in {printable(str(runs.absolute()))}"
        )
    return running[0]
