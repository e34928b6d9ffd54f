"""`atropos status`: one line per service, and how finished runs ended.

Health: "healthy" answers its health address, "no answer" does not (yet), "running" has no address, "stopped" was
stopped by a signal, "dead" is gone.
"""

from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from atropos_launcher import arguments
from atropos_launcher.runs import ended_runs, find_run, outcome, progress, recorded_runs
from atropos_launcher.services.health import answers
from atropos_launcher.services.records import ForeignRecord, Record, Records
from atroposlib.processes.log_files import last_word, printable

ENDED_SHOWN = 10
WORDS_SHOWN = 120
LEFT_BEHIND = "  (its launcher is gone: `atropos stop` ends what it left)"


def parser() -> arguments.Parser:
    command = arguments.Parser("status", "Show what runs and its progress. Without RUN: every run, finished ones too.")
    command.add_argument("run", nargs="?", metavar="RUN", help="name or directory of a run")
    arguments.add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    options = parser().parse(argv)
    print("\n".join(_one(options) if options.run else _all(options.runs)))
    return 0


def _one(options: Namespace) -> list[str]:
    run = find_run(options.runs, options.run)
    return _running(run) if Records(run).exist() else [_ended(run)]


def _all(runs: Path) -> list[str]:
    running, ended = recorded_runs(runs), ended_runs(runs)
    if not running and not ended:
        return [f"There is no run in {printable(str(runs.absolute()))}"]
    more = [f"... and {len(ended) - ENDED_SHOWN} older runs in {runs}"] if len(ended) > ENDED_SHOWN else []
    return [
        *(line for run in running for line in _running(run)),
        *map(_ended, ended[:ENDED_SHOWN]),
        *more,
    ]


def _ended(run: Path) -> str:
    return f"{printable(str(run))}  {outcome(run)}"


def _running(run: Path) -> list[str]:
    records = Records(run)
    try:
        services, launcher = records.services(), records.launcher()
    except ForeignRecord as error:
        return [f"{printable(str(run))}  {error}"]
    with ThreadPoolExecutor() as pool:
        health = list(pool.map(_health, services))
    width = max((len(service.name) for service in services), default=0)
    return [
        f"{printable(str(run))}  {progress(run)}" + ("" if launcher else LEFT_BEHIND),
        *(_line(run, service, how, width) for service, how in zip(services, health, strict=True)),
    ]


def _health(service: Record) -> str:
    if not service.is_alive:
        return "dead"
    if service.is_stopped:
        return "stopped"
    if not service.url:
        return "running"
    return "healthy" if answers(service.url) else "no answer"


def _line(run: Path, service: Record, health: str, width: int) -> str:
    port = urlsplit(service.url).netloc.rpartition(":")[2] or "-"
    word = printable(last_word(run / f"{service.name}.log"))[:WORDS_SHOWN]
    return f"  {service.name:<{width}} pid {service.pid:<8} port {port:<6} {health:<10} {word}".rstrip()
