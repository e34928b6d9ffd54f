"""`atropos verify RUN`: whether a run with --deterministic is as its trainer wrote it, from its directory alone."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from atropos_launcher.arguments import Parser, add_runs
from atropos_launcher.runs import find_run, latest_run
from atroposlib.errors import NOT_COMPARED, one_line_errors


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser(
        "verify",
        "Check each step of a run with --deterministic by its digests: its groups, its weights where they are kept, and"
        " the receipt. Other metrics have no digest. Nothing is computed again; `atropos reproduce` does that. Exit"
        " status 0 if all is as it was written, 1 if not, 2 if that cannot be said.",
    )
    command.add_argument("run", nargs="?", metavar="RUN", help="name or directory of a run (default: the newest)")
    add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    """Print what was changed. Returns 0 if nothing was, 1 if something was, and exits with 2 if that cannot be said."""
    options = parser().parse_args(argv)
    with one_line_errors("atropos verify", exit_status=NOT_COMPARED):
        return verify(options)


def verify(options: Namespace) -> int:
    """Check a run. Returns the exit status. Raises AtroposError."""
    from atropos_launcher.checks.repeated import faults, models_of, steps_of
    from atroposlib.processes.log_files import printable

    run = find_run(options.runs, options.run) if options.run else latest_run(options.runs)
    steps = steps_of(run)
    is_whole = True
    for fault in faults(run):
        print(printable(f"{run}: {fault}"), file=sys.stderr, flush=True)
        is_whole = False
    if not is_whole:
        return 1
    models = len(list(models_of(run, steps)))
    kept = f"{models} model{'' if models == 1 else 's'}"
    print(f"{run}: {len(steps)} steps and {kept} as they were written; chain {steps[max(steps)].chain}")
    return 0
