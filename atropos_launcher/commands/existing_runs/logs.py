"""`atropos logs`: the last lines of a run's services, and new ones as they are written."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from atropos_launcher import arguments
from atropos_launcher.runs import NoSuchRun, find_run, latest_run
from atropos_launcher.services.records import Records
from atroposlib.processes.log_files import Follower, last_lines, printable

POLL_S = 0.3


def parser() -> arguments.Parser:
    command = arguments.Parser(
        "logs", "Show the last lines of a run's services, or of one. Without RUN: the running one, or the newest."
    )
    command.add_argument("names", nargs="*", metavar="RUN SERVICE", help="a run, one of its services, or both")
    command.add_argument("-f", "--follow", action="store_true", help="keep printing new lines until the run ends")
    command.add_argument(
        "-n", "--lines", type=arguments.whole_number, default=20, metavar="N", help="number of lines (default: 20)"
    )
    arguments.add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    command = parser()
    options = command.parse(argv)
    if len(options.names) > 2:
        command.error(f"RUN and SERVICE only, got {' '.join(options.names)}")
    logs = _logs(options.runs, options.names)
    width = max(len(log.stem) for log in logs)
    followers = {log: Follower(log) for log in logs}
    for log in logs:
        _show(log, last_lines(log, options.lines, followers[log].offset), width)
    if options.follow:
        _follow(followers, width)
    return 0


def _logs(runs: Path, names: Sequence[str]) -> list[Path]:
    """List the logs of one service or of all. A single name is a run's, or else a service's. Raises NoSuchRun."""
    run, service = latest_run(runs) if not names else None, names[1] if len(names) == 2 else None
    if run is None:
        try:
            run = find_run(runs, names[0])
        except NoSuchRun:
            if service is not None:
                raise
            run, service = latest_run(runs), names[0]
    files = (log for log in sorted(run.glob("*.log")) if log.is_file() and not log.is_symlink())
    logs = {log.stem: log for log in files if log.stem.isprintable()}
    if service is not None and service not in logs:
        known = " ".join(logs) or "none"
        raise NoSuchRun(
            f"{printable(service)} is neither a run nor a service of {printable(str(run))}, which has {known}"
        )
    if not logs:
        raise NoSuchRun(f"{printable(str(run))} has no logs")
    return [logs[service]] if service is not None else list(logs.values())


def _follow(followers: dict[Path, Follower], width: int) -> None:
    """Until nothing of the run is left."""
    records = Records(next(iter(followers)).parent)
    runs = True
    while runs:
        runs = records.exist() and any(record.is_alive for record in records.read().values())
        for log, follower in followers.items():
            _show(log, follower.new_lines() if runs else follower.rest(), width)
        if runs:
            time.sleep(POLL_S)


def _show(log: Path, lines: Iterable[str], width: int) -> None:
    for line in lines:
        print(f"{log.stem:<{width}} | {printable(line)}", flush=True)
