"""Runs a command that plays EPISODES episodes, counts those that it wrote, and reports their rate.

    python -m benchmarks.peers.arms.episodes EPISODES FOLDER COMMAND ...

FOLDER is where the command writes JSON lines: traces of verifiers, one an episode, or groups of an environment.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.trainer_step import answer


def scores_of(row: dict[str, Any]) -> list[float]:
    """The rewards in a line of either kind. Verifiers weights and adds those of a trace. Raises SystemExit for an
    episode that failed: nobody would measure it on purpose.
    """
    if "scores" in row:
        return [float(score) for score in row["scores"]]
    for trace in row["traces"]:
        if trace.get("errors"):
            raise SystemExit(f"an episode failed: {trace['errors'][-1]['message']}")
    return [
        sum(reward["score"] * reward.get("weight", 1.0) for reward in trace["rewards"].values())
        for trace in row["traces"]
    ]


def main(episodes: int, folder: Path, command: list[str]) -> None:
    """Run it, and read what it wrote."""
    start = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - start
    files = [path for path in folder.rglob("*.jsonl") if path.stat().st_size]
    scores = [
        score for path in files for line in path.read_text().splitlines() for score in scores_of(json.loads(line))
    ]
    if len(scores) != episodes:
        raise SystemExit(f"{folder} has {len(scores)} episodes instead of {episodes}")
    answer(episodes_per_s=episodes / seconds, mean_reward=sum(scores) / len(scores))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
