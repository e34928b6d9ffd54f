"""`atropos gpu-check`: every check of Atropos that needs a GPU, and a table of the results.

Each weight bridge in a short training run, whose parity probe compares vLLM with the trainer after the first syncs;
and bit-exactness: batch m against n, prefill against decode, trainer against both, then a strict training run. The
table shows each run's last step: reward, tokens per second, stall. Checks that need more GPUs than there are are
listed, not run. Exit status 0 if every check that fits this machine passes, 1 if one fails, 2 without a GPU.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from example_trainer.gpus import visible_gpus
from example_trainer.launcher.arguments import Parser, add_runs
from example_trainer.launcher.folders import PACKAGES
from example_trainer.launcher.log_files import last_lines, printable
from example_trainer.launcher.machine import gpu_names, installed
from example_trainer.launcher.train import find_model

LIMIT_S, GRACE_S = 1200, 20
LINES_SHOWN = 5
STEP = re.compile(r"Step [0-9]+/.*")
BITS = "tests/integration/test_bit_exact.py"


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    gpus: int
    name: str
    command: tuple[str, ...]  # of `atropos`, or of pytest
    visible: str | None = None  # GPUs, where not all

    @property
    def is_test(self) -> bool:
        """Whether pytest runs it."""
        return self.command[0] == BITS

    @property
    def shown(self) -> str:
        """As a person would type it."""
        first = ("python", "-m", "pytest", "-q") if self.is_test else ("atropos",)
        alone = (f"CUDA_VISIBLE_DEVICES={self.visible}",) if self.visible else ()
        return shlex.join([*alone, *first, *self.command])

    def run(self, log: Path) -> int:
        """Its exit status, 124 where it took too long."""
        module = ["pytest", "-q"] if self.is_test else ["example_trainer.launcher"]
        visible = {"CUDA_VISIBLE_DEVICES": self.visible} if self.visible else {}
        path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **visible, "PYTHONPATH": path},
                cwd=PACKAGES,
            )
            try:
                return process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                return 124
            finally:
                end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """A launcher ends its own services when it is told to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def checks(stamp: str, runs: Path, model: str) -> list[Check]:
    """Every check. The doctor looks at `model`; training takes the quickstart's. 3 steps are 4 policy versions."""

    def training(recipe: str, name: str, *flags: str) -> tuple[str, ...]:
        task = ("--dataset", "arithmetic", "--steps", "3", "--run-name", f"{stamp}-{name}", "--runs", str(runs))
        return ("train", recipe, *task, *flags)

    return [
        Check(1, "doctor", ("doctor", "--mode", "single_copy", "--model", model)),
        Check(1, "single copy by CUDA IPC", training("gsm8k_single_copy", "single-copy")),
        Check(1, "LoRA adapters", training("gsm8k_lora", "lora")),
        Check(1, "LoRA adapters, restart", training("gsm8k_lora_restart", "lora-restart")),
        Check(1, "reload", training("gsm8k_reload", "reload")),
        Check(1, "restart", training("gsm8k_restart", "restart")),
        Check(1, "broadcast over Gloo, one GPU", training("gsm8k_broadcast", "gloo"), "0"),
        Check(1, "bit-exact, trainer against sampler", (BITS, "-k", "bits")),
        Check(1, "bit-exact training", training("gsm8k_broadcast", "exact", "--batch-invariant"), "0"),
        Check(2, "broadcast over NCCL", training("gsm8k_broadcast", "nccl")),
    ]


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser("gpu-check", "Run every check that needs a GPU, and print a table of the results.")
    command.add_argument("--only", default="", metavar="WORD", help="run only the checks whose name contains WORD")
    command.add_argument("--list", action="store_true", help="list names, GPUs and commands; run nothing")
    add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    """Run the checks. Returns the exit status."""
    options = parser().parse_args(argv)
    stamp = f"gpu-check-{time.strftime('%Y%m%d-%H%M%S')}"
    if options.list:
        listed = checks(stamp, options.runs, "MODEL")
        print(
            "\n".join(f"{check.gpus} | {check.name} | {check.shown}" for check in listed if options.only in check.name)
        )
        return 0
    gpus = visible_gpus(os.environ)
    if not gpus:
        print("gpu-check: no GPU on this machine (nvidia-smi lists none): nothing was checked", file=sys.stderr)
        return 2
    runs = options.runs.absolute()
    folder = runs / stamp
    folder.mkdir(parents=True)
    model = find_model(None, dry_run=False)
    chosen = [check for check in checks(stamp, runs, model) if options.only in check.name]
    results = [result(check, len(gpus), folder) for check in chosen]
    text = table(results, shlex.join(["atropos", "gpu-check", *argv]))
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return int(any("FAILED" in row for row in results))


def result(check: Check, gpus: int, folder: Path) -> str:
    """The row of one check, which is run if there are GPUs enough."""
    if check.gpus > gpus:
        return f"| {check.name} | not run: needs {check.gpus} GPUs | | |"
    if check.is_test and not (PACKAGES / BITS).is_file():
        return f"| {check.name} | not run: needs a checkout | | |"
    log = folder / f"{re.sub(r'[^A-Za-z0-9]', '-', check.name)}.log"
    say(f"{check.name} (at most {LIMIT_S} s, log {log}): {check.shown}")
    started = time.monotonic()
    status = check.run(log)
    took_s = time.monotonic() - started
    came = "passed" if status == 0 else f"FAILED, status {status}"
    say(f"    {came} after {took_s:.0f} s")
    if status != 0:
        print(*(f"    {printable(line)}" for line in last_lines(log, LINES_SHOWN)), sep="\n")
    steps = STEP.findall(log.read_text(encoding="utf-8", errors="replace"))
    return f"| {check.name} | {came} | {took_s:.0f} s | {printable(steps[-1]).replace('|', ',') if steps else ''} |"


def table(rows: Sequence[str], command: str) -> str:
    """Markdown: machine, command, versions, and the rows."""
    versions = f"PyTorch {installed('torch')}, vLLM {installed('vllm')}"
    head = [*gpu_names(), "", f"Command: `{command}`", versions, "", "| check | result | took | last step |"]
    return "\n".join([*head, "|---|---|---|---|", *rows]) + "\n"


def say(line: str) -> None:
    """One line on the console with the time of day."""
    print(time.strftime("%H:%M:%S"), line, flush=True)
