"""The results of runs as Markdown: of each arm the medians and the range, and of each goal whether it is reached."""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from benchmarks.peers.comparison import Goal


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one arm: a line of the results file."""

    comparison: str
    arm: str
    run: int
    when: str
    commit: str
    processor: str
    load: float  # of the minute before
    packages: list[str]
    metrics: dict[str, float]  # its own, and those of the process group: wall_s, cpu_s, peak_gb


def table(results: Sequence[Result], goals: Iterable[Goal]) -> str:
    """One row an arm, one column a metric, and a line for each goal."""
    arms = list(dict.fromkeys(result.arm for result in results))
    names = list(dict.fromkeys(name for result in results for name in result.metrics))
    lines = ["| | runs | " + " | ".join(names) + " |", "|---|---" + "|---" * len(names) + "|"]
    for arm in arms:
        own = [result for result in results if result.arm == arm]
        cells = [_cell([result.metrics[name] for result in own if name in result.metrics]) for name in names]
        lines.append(f"| {arm} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(_told(goal, results) for goal in goals)])


def _cell(values: Sequence[float]) -> str:
    """The median, and the range where there is one."""
    if not values:
        return "none"
    median = f"{statistics.median(values):.4g}"
    return median if len(values) == 1 else f"{median} ({min(values):.4g} to {max(values):.4g})"


def _told(goal: Goal, results: Sequence[Result]) -> str:
    median = {
        arm: [result.metrics[goal.metric] for result in results if result.arm == arm and goal.metric in result.metrics]
        for arm in (goal.ours, goal.peer)
    }
    asked = f"{goal.metric}: {goal.ours} beside {goal.peer}, goal {goal.factor:g} x"
    if not all(median.values()):
        return f"{asked}: not measured"
    found = goal.reached(*(statistics.median(median[arm]) for arm in (goal.ours, goal.peer)))
    return f"{asked}: {found:.2f} x, {'reached' if found >= goal.factor else 'missed'}"
