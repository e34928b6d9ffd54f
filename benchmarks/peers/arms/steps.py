"""Drives an arm that does one step for each line on its stdin (`benchmarks/trainer_step.py`), and reports its rate.

    python -m benchmarks.peers.arms.steps WORK STEPS TOKENS COMMAND ...

The first step, in which kernels are chosen and compiled, is a warm-up, reported apart.
"""

import statistics
import sys
from pathlib import Path

from benchmarks.trainer_step import Arm, answer


def main(work: Path, steps: int, tokens: int, command: list[str]) -> None:
    """One warm-up and `steps` timed steps of `tokens` tokens each."""
    arm = Arm("arm", command, work / "arm.log")
    try:
        first, *timed = [arm.step() for _ in range(steps + 1)]
    finally:
        arm.close()
    seconds = statistics.median(step["seconds"] for step in timed)
    cpu_s = statistics.median(step["cpu_seconds"] for step in timed)
    answer(
        tokens_per_s=tokens / seconds,
        tokens_per_cpu_s=tokens / cpu_s,
        first_s=first["seconds"],
        **{name: first[name] for name in ("loss", "grad_norm") if name in first},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
