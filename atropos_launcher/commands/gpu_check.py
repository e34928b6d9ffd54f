"""`atropos gpu-check`: every check of Atropos that needs a GPU, and a table of the results.

    atropos gpu-check                 on a machine with GPUs
    atropos gpu-check --out h100 --rows reload,LoRA --skip-passed
                                      some rows, in addition to those that h100/table.md has
    atropos gpu-check --rehearse      the same rows on a CPU: NCCL is Gloo, CUDA IPC is shared memory

gpu_rows.py has the rows. Each shows its time, its peak memory, whether every word of the weights arrived (the digest),
and its last step. Checks that need more GPUs than there are, or a model that is not here, are listed, not run. The
table is written after each row (gpu_table.py). Once it has all rows, it leaves a record that the doctor reads. Exit
status 0 if every check that fits this machine passes, 1 if one of this call fails, 2 without a GPU.
"""

import os
import re
import shlex
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atropos_launcher.arguments import Parser, add_runs
from atropos_launcher.checks.gpu_record import RECORD, GpuRecord, UserCache, write_gpu_record
from atropos_launcher.checks.gpu_rows import LARGE, Check, Models, checks
from atropos_launcher.checks.gpu_table import Result, Table
from atropos_launcher.checks.model_files import read_model
from atropos_launcher.checks.peak_memory import PeakMemory, of_gpus, of_processes
from atropos_launcher.console.start_model import unpack_start_model
from atropos_launcher.paths import PACKAGES
from atropos_launcher.placement.this_machine import gpu_names
from atropos_launcher.plan.site import find_model
from atroposlib.config import load_config
from atroposlib.errors import reading
from atroposlib.extras import installed_version
from atroposlib.files import make_private_directory
from atroposlib.flags import ConfigError
from atroposlib.processes.child_group import ChildGroup
from atroposlib.processes.log_files import last_lines, printable
from example_trainer.settings.gpus import visible_gpus

PROG = "atropos gpu-check"
LIMIT_S, GRACE_S = 1200, 20
LINES_SHOWN = 5
LAST = re.compile(r"(?:Step [0-9]+/|Drill: ).*")
ARRIVED = re.compile(r"Digest: every word |\b0 of \d+ tensors differ")
DIFFERS = re.compile(r"of the tensors that vLLM computes with are not|\b[1-9]\d* of \d+ tensors differ")
NO_UPDATE = "no update"  # in the line of a step whose weights did not change
GB = 10**9


@dataclass(frozen=True)
class Place:
    """Describes where the checks run."""

    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them; none in a rehearsal
    folder: Path  # of logs and table
    runs: Path

    @property
    def rehearses(self) -> bool:
        return not self.gpus


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser("gpu-check", "Run every check that needs a GPU, and print a table of the results.")
    command.add_argument("--only", default="", metavar="WORD", help="run only the checks whose name contains WORD")
    command.add_argument(
        "--rows",
        metavar="A,B",
        help="run only these checks: names, or parts of names, which stand for every check whose name contains them",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory of the table and the logs, made if missing; a table of this machine that is there already keeps"
        " its other rows (default: RUNS/gpu-check-DATE-TIME)",
    )
    command.add_argument(
        "--skip-passed", action="store_true", help="do not run what the table in --out says has passed"
    )
    command.add_argument("--list", action="store_true", help="list names, GPUs and commands; run nothing")
    command.add_argument(
        "--rehearse", action="store_true", help="run the same checks on the CPU, over Gloo, with shorter steps"
    )
    command.add_argument(
        "--model",
        metavar="MODEL",
        help="directory or Hugging Face id of the model to train (default: the quickstart's, which needs no hub)",
    )
    command.add_argument(
        "--large-model",
        metavar="MODEL",
        help="directory or Hugging Face id of the model of the check with tensor parallelism, 1.5B to 3B (default:"
        f" {LARGE} if the hub's cache on this machine has it; else that check is not run)",
    )
    add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    """Run the checks. Returns the exit status. Raises ConfigError."""
    options = parser().parse_args(argv)
    if options.skip_passed and options.out is None:
        raise ConfigError("--skip-passed needs --out DIR, the directory whose table says what has passed")
    stamp = f"gpu-check-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = options.runs.absolute()
    named = Models(options.model or "MODEL", options.large_model or LARGE)
    every = _every(stamp, options.runs, named, options.rehearse)
    chosen = _chosen(every, options)
    if options.list:
        gpus = [str(index) for index in range(max(check.gpus for check in every))]
        print(*(f"{each.gpus} | {each.name} | {each.shown(gpus)}" for each in chosen), sep="\n")
        return 0
    gpus = [] if options.rehearse else visible_gpus(os.environ)
    if not gpus and not options.rehearse:
        print(
            "gpu-check: no GPU on this machine (nvidia-smi lists none): nothing was checked. --rehearse runs the same"
            " checks on the CPU",
            file=sys.stderr,
        )
        return 2
    place = Place(tuple(gpus), (options.out or runs / stamp).absolute(), runs)
    with reading(f"making {place.folder}", ConfigError, remedy="name another directory with --out"):
        make_private_directory(place.folder)
    table = Table(place.folder / "table.md", shlex.join(["atropos", "gpu-check", *argv]), place.rehearses)
    model = find_model(options.model)
    if options.model is None:
        unpack_start_model(Path(model))
    models = Models(model, find_large(options.large_model))
    every = _every(stamp, runs, models, place.rehearses)
    return check_all(every, _chosen(every, options), table, place, skip_passed=options.skip_passed)


def check_all(every: Sequence[Check], chosen: Sequence[Check], table: Table, place: Place, *, skip_passed: bool) -> int:
    """Run the chosen of all checks, and write the table after each. Returns the exit status."""
    order = [check.name for check in every]
    results = dict(table.earlier)

    def ordered() -> list[Result]:
        others = [name for name in results if name not in order]  # of another version
        return [results[name] for name in [*order, *others] if name in results]

    table.write(ordered())
    for check in chosen:
        if skip_passed and check.name in results and results[check.name].passed:
            say(f"{check.name}: passed before, by {table.path}")
            continue
        results[check.name] = result(check, place)
        table.write(ordered())
    print(table.text(ordered()), end="")
    if not place.rehearses and set(order) <= set(results):
        keep(ordered(), place)
    return int(any(results[check.name].failed for check in chosen))


def find_large(model: str | None) -> str | None:
    """The large model that was named, or the default one if its weights are here: nothing is downloaded unasked."""
    if model is not None:
        return find_model(model)
    return LARGE if read_model(LARGE) else None


def result(check: Check, place: Place) -> Result:
    """One check, which is run if this machine has what it needs."""
    lacks = [f"{check.gpus} GPUs"] if not place.rehearses and check.gpus > len(place.gpus) else []
    lacks += ["a checkout"] if check.needs_checkout and not (PACKAGES / "tests").is_dir() else []
    lacks += ["a model: --large-model"] if check.needs_model else []
    if lacks:
        return Result(check.name, f"not run: needs {' and '.join(lacks)}")
    log = place.folder / f"{re.sub(r'[^A-Za-z0-9]', '-', check.name)}.log"
    say(f"{check.name} (at most {LIMIT_S} s, log {log}): {check.shown(place.gpus)}")
    started = time.monotonic()
    status, peak = run(check, place, log)
    took = f"{time.monotonic() - started:.0f} s"
    said = log.read_text(encoding="utf-8", errors="replace")
    trainer = place.runs / (check.run or "") / "trainer.log"
    verdict = digest_of(said + (trainer.read_text(encoding="utf-8", errors="replace") if trainer.is_file() else ""))
    last = (LAST.findall(said) or [""])[-1]
    if status != 0:
        came = f"FAILED, {'not done in time' if status == 124 else f'status {status}'}"
    elif verdict == "differs" or (check.has_digest and verdict == ""):
        came = f"FAILED, {'weights differ' if verdict else 'no digest was compared'}"
    elif NO_UPDATE in last:
        came = f"FAILED, {NO_UPDATE}: the same weights were sent again"
    else:
        came = "passed"
    say(f"    {came} after {took}")
    if came != "passed":
        print(*(f"    {printable(line)}" for line in last_lines(log, LINES_SHOWN)), sep="\n")
    return Result(check.name, came, took, f"{peak / GB:.1f} GB", verdict, last)


def run(check: Check, place: Place, log: Path) -> tuple[int, int]:
    """Exit status (124 where it took too long) and peak memory in bytes: of the fullest GPU, or of the processes."""
    visible = check.visible(place.gpus)
    own = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    log.unlink(missing_ok=True)
    process = ChildGroup(
        [sys.executable, "-m", check.module, *check.command],
        log,
        _environment(os.environ, own),
        die_with=signal.SIGTERM,  # a launcher then ends its own services
        directory=PACKAGES,
    )
    sample = partial(of_processes, process.pid) if place.rehearses else partial(of_gpus, place.gpus)
    with PeakMemory(sample) as peak:
        try:
            status = process.wait(LIMIT_S)
        finally:
            process.stop(GRACE_S)
    return 124 if status is None else status, peak.nbytes


def digest_of(said: str) -> str:
    """Read from a log what it tells about the weights that vLLM computes with: `equal`, `differs`, or nothing."""
    return "differs" if DIFFERS.search(said) else "equal" if ARRIVED.search(said) else ""


def keep(results: Sequence[Result], place: Place) -> None:
    """The record that the doctor reads."""
    path = load_config(UserCache, [], prog=PROG).cache_home / RECORD
    failed = [each.name for each in results if each.failed]
    passed = sum(each.passed for each in results)
    record = GpuRecord(
        gpu_names(),
        time.strftime("%Y-%m-%d"),
        str(installed_version("vllm")),
        passed,
        failed,
        len(results) - passed - len(failed),
        str(place.folder / "table.md"),
    )
    write_gpu_record(path, record)
    say(f"Record for `atropos doctor`: {path}")


def say(line: str) -> None:
    """One line on the console with the time of day."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def _every(stamp: str, runs: Path, models: Models, rehearse: bool) -> list[Check]:
    return [check for check in checks(stamp, runs, models, rehearse) if check.on_cpu or not rehearse]


def _chosen(listed: Sequence[Check], options: Namespace) -> list[Check]:
    """Return the checks that --only and --rows leave. Raises ConfigError for a word that names no check."""
    names = [check.name for check in listed]
    if not any(options.only in name for name in names):
        raise ConfigError(f"--only {options.only}: no check's name contains it; --list lists all")
    rows = set(names) if options.rows is None else rows_named(options.rows, names)
    return [check for check in listed if options.only in check.name and check.name in rows]


def rows_named(words: str, names: Sequence[str]) -> set[str]:
    """The names that `A,B` stands for. A whole name, which may have a comma, means that check alone; another word means
    every name that contains it. Raises ConfigError.
    """
    pieces, named = [piece.strip() for piece in words.split(",")], set()
    while pieces:
        sizes = [size for size in range(len(pieces), 0, -1) if ", ".join(pieces[:size]) in names]
        size, word = (sizes or [1])[0], pieces[0]
        matching = [", ".join(pieces[:size])] if sizes else [name for name in names if word and word in name]
        if not matching:
            raise ConfigError(f"--rows {words}: no check is named {word!r}; --list lists all")
        named.update(matching)
        del pieces[:size]
    return named


def _environment(environ: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PACKAGES), environ.get("PYTHONPATH")]))
    return {**environ, **own, "PYTHONPATH": path}
