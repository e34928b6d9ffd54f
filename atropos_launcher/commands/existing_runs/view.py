"""`atropos view RUN...`: a window on runs in the browser. It reads their files, and needs no running service."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from atropos_launcher.arguments import Parser, add_runs
from atropos_launcher.placement.ports import Ports
from atropos_launcher.runs import NoSuchRun, find_run
from atropos_launcher.service import Service
from atroposlib.processes.log_files import printable
from atroposlib.view.flags import HOST, PORT, add_flags

if TYPE_CHECKING:
    from atropos_launcher.placement.addresses import Site

NAME = "view"
RESTARTS = 3
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def parser() -> Parser:
    """For help and completion."""
    command = Parser(
        "view",
        "Show runs in a browser: curves, every group, every token, logs. The run may be running, finished or crashed."
        " Without RUN: every run.",
    )
    command.add_argument("run", nargs="*", metavar="RUN", help="names or directories of runs")
    add_runs(command)
    add_flags(command)
    return command


def main(argv: Sequence[str]) -> int:
    """Serve until interrupted. Returns the exit status."""
    options = parser().parse(argv)
    paths = [find_run(options.runs, name).resolve() for name in options.run]
    if not paths and not options.runs.is_dir():
        raise NoSuchRun(f"there is no directory {printable(str(options.runs.absolute()))}: name a run, or --runs DIR")
    from atroposlib.view.run_data.runs import Runs
    from atroposlib.view.serve import page_of, run

    runs = Runs(paths, None if paths else options.runs)
    run(options, runs, page_of(list(runs.all())) if paths else "")
    return 0


def beside(site: "Site", ports: Ports) -> Service:
    """The window as a service of a launcher's run, which neither waits for it nor ends with it. Raises PortTaken."""
    port = ports.first_free(PORT)
    return Service(
        name=NAME,
        command=(
            *(sys.executable, "-u", "-m", "atroposlib.view.serve", str(site.run_dir)),
            *("--beside", "--port", str(port)),
        ),
        environment=ONE_THREAD,
        health=f"http://{HOST}:{port}/health",
        restarts=RESTARTS,
        cores=site.cores.environments,
        optional=True,
    )


def page(window: Service, run_dir: Path) -> str:
    """Return the address where a browser finds the run."""
    return f"{(window.health or '').removesuffix('health')}#/run/{quote(run_dir.name, safe='')}"
