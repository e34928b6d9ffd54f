"""`atropos reproduce RUN` repeats a run with --deterministic and compares every step; `--step N` computes one step
again, without sampling.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from atropos_launcher.arguments import Parser, add_runs
from atropos_launcher.runs import find_run
from atroposlib.errors import NOT_COMPARED, AtroposError, one_line_errors


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser(
        "reproduce",
        "Repeat a run with --deterministic and compare it, bit for bit: exit status 0 if it is equal, 1 if not, 2 if"
        " that cannot be said. It starts what the run's own files name, so repeat only runs whose authors you trust."
        " Other flags are those of `atropos train`, such as --vllm.count 3.",
    )
    command.add_argument("run", metavar="RUN", help="name or directory of a run")
    command.add_argument(
        "--step", type=int, metavar="N", help="compute step N again from the checkpoint before it; samples nothing"
    )
    command.add_argument("--run-name", metavar="NAME", help="name of the repetition (default: RUN-again)")
    add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    """Repeat, compare, and say the first difference. Returns the exit status, and exits with 2 for an error."""
    options, flags = parser().parse_known_args(argv)
    with one_line_errors("atropos reproduce", exit_status=NOT_COMPARED):
        return reproduce(options, flags)


def reproduce(options: Namespace, flags: Sequence[str]) -> int:
    """Repeat the run, or a step of it. Returns the exit status. Raises AtroposError."""
    from atropos_launcher.checks.repeated import steps_of

    run = find_run(options.runs, options.run)
    steps_of(run)
    if options.step is not None:
        if flags:
            parser().error(f"--step samples nothing, and takes no {flags[0]}")
        words = ["-m", "example_trainer.recompute", "--run", str(run), "--step", str(options.step)]
        os.execv(sys.executable, [sys.executable, *words])
    name = options.run_name or f"{run.name}-again"
    again = options.runs / name
    if again.exists():
        raise AtroposError(f"{again} is there already: remove it, or give another --run-name")
    return repeat(run, again, flags)


def repeat(run: Path, again: Path, flags: Sequence[str]) -> int:
    """Train as `run` was trained, into `again`, and compare. Returns the exit status."""
    from atropos_launcher.checks.repeated import difference
    from atropos_launcher.commands.train import main as train
    from atroposlib.processes.log_files import printable

    words = [str(run / "run.yaml"), "--run-name", again.name, "--runs", str(again.parent), *flags]
    if status := train(words):
        return max(status, NOT_COMPARED)
    found = difference(run, again)
    print(printable(f"{run} and {again}: {'equal' if found is None else found}"))
    if found is not None:
        for line in machines(run, again):
            print(printable(line))
    return 0 if found is None else 1


def machines(run: Path, again: Path) -> list[str]:
    """Say what the receipts of two runs tell of their machines, where that is not the same."""
    import msgspec

    from atroposlib.errors import reading
    from example_trainer.output.step_chain import RECEIPT

    receipts = []
    for folder in (run, again):
        path = folder / RECEIPT
        if not path.is_file():
            return []
        with reading(f"cannot read {path}", AtroposError, also=(msgspec.DecodeError,)):
            receipts.append(msgspec.json.decode(path.read_bytes()))
    names = ("processor", "device", "gradient_kernels", "vector_instructions", "versions")
    return [
        f"{name.replace('_', ' ')} differ: {receipts[0].get(name)} and {receipts[1].get(name)}"
        for name in names
        if receipts[0].get(name) != receipts[1].get(name)
    ]
