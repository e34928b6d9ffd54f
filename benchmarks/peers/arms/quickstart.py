"""Ours: the quickstart, until an evaluation has reached GOAL, or for STEPS steps.

python -m benchmarks.peers.arms.quickstart WORK GOAL SEED STEPS
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.trainer_step import answer

LOOK_S = 0.5
END_S = 60.0


def main(work: Path, goal: float, seed: int, steps: int) -> None:
    """Start it, look at its evaluations, and end it once one is good enough."""
    start = time.perf_counter()
    flags = ["quickstart", "--model", str(work / "model"), "--seed", str(seed), "--steps", str(steps)]
    where = ["--env.steps_per_eval", "5", "--no-view", "--runs", str(work / "runs"), "--run-name", f"seed-{seed}"]
    process = subprocess.Popen([sys.executable, "-m", "atropos_launcher", *flags, *where], start_new_session=True)
    evaluations = work / "runs" / f"seed-{seed}" / "evaluations.jsonl"
    while process.poll() is None and best(evaluations) < goal:
        time.sleep(LOOK_S)
    seconds = time.perf_counter() - start
    found = rows(evaluations)
    process.terminate()  # a shell in the background has SIGINT ignored
    process.wait(END_S)
    reached = [row for row in found if row["accuracy"] >= goal]
    metrics = {"seconds_to_goal": seconds, "steps": reached[0]["policy_version"]} if reached else {}
    answer(accuracy=100 * max(row["accuracy"] for row in found), **metrics)


def rows(evaluations: Path) -> list[dict[str, float]]:
    """Whole lines of the file so far."""
    text = evaluations.read_text() if evaluations.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def best(evaluations: Path) -> float:
    """The highest accuracy so far."""
    return max((row["accuracy"] for row in rows(evaluations)), default=0.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
