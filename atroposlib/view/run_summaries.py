"""What the page says of runs: the list, searched and sorted; one run's head and details; where its accuracy stands."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from atroposlib.view.run_data.accuracy import best_of, by_environment, by_version
from atroposlib.view.run_data.rows import finite

Summary = dict[str, object]
SEARCHED = ("run", "notes", "model", "recipe", "bridge", "environments", "state", "reason")
ORDERS: dict[str, Callable[[Summary], object]] = {
    "run": lambda run: run["run"],
    "state": lambda run: state_of(run),
    "steps": lambda run: run["steps_done"],
    "reward": lambda run: _inside(run, "latest", "reward_mean"),
    "best": lambda run: _inside(run, "best", "accuracy"),
    "last": lambda run: _inside(run, "latest", "accuracy"),
    "model": lambda run: _model(run),
    "started": lambda run: run["started"],
}


def listed_runs(runs: Sequence[Summary], words: str, order: str) -> list[Summary]:
    """Return the runs that have every word somewhere, in this order: numbers from the largest, text from A; with `-`
    before it from the other end. What has no value comes last. Without an order they stay as they are.
    """
    wanted = words.casefold().split()
    found = [run for run in runs if all(word in _text(run) for word in wanted)]
    for run in found:
        run["state"] = state_of(run)
    if not order:
        return found
    key = ORDERS.get(order.removeprefix("-"), ORDERS["started"])
    known = [run for run in found if key(run) is not None]
    is_text = any(isinstance(key(run), str) for run in known)
    known.sort(key=lambda run: str(key(run)).casefold() if is_text else float(str(key(run))))
    if is_text == order.startswith("-"):
        known.reverse()
    return known + [run for run in found if key(run) is None]


def state_of(run: Summary) -> str:
    """Return the state; `finished` for a run that has made all its steps, or ended early because --stop-when-flat said
    so.
    """
    has_made_all = run["steps_done"] and run["steps_done"] == run["planned_steps"]
    return "finished" if run["state"] == "ended" and (has_made_all or run["ended_well"]) else str(run["state"])


def standing(evaluations: Sequence[dict[str, object]]) -> dict[str, object]:
    """Return the accuracy by version, and its `before` training, at its `best` and in the `last` evaluation."""
    found = by_version(evaluations)
    best, trained = best_of(evaluations), [each for each in found if each.version > 0]
    return {
        "versions": [list(each) for each in found],
        "apart": {env: [list(each) for each in mine] for env, mine in by_environment(evaluations).items()},
        "before": next((each.accuracy for each in found if each.version == 0), None),
        "best": best if trained else None,
        "last": trained[-1]._asdict() if trained else None,
    }


def about(run: Summary, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the head of a run's page, and its details, as pairs of a name and a value."""
    environments = run["environments"]
    facts = [
        ("Model", _model(run)),
        ("Recipe", run["recipe"]),
        ("Environment", ", ".join(map(str, environments)) if isinstance(environments, list) else None),
        ("Bridge", settings.get("bridge.kind") or run["bridge"]),
        ("Learning rate", settings.get("trainer.lr", run["lr"])),
        ("Algorithm", settings.get("trainer.algorithm")),
        ("Seed", run["seed"]),
    ]
    problems, command = run["problems"], run["command"]
    details = [
        ("Command", shlex.join(map(str, command)) if isinstance(command, list) else None),
        ("Directory", run["path"]),
        ("Machine", _machine(run["machine"])),
        ("Commit", run["commit"]),
        ("Ended", _date(run["ended"])),
        ("Problems", "; ".join(map(str, problems)) if isinstance(problems, list) else None),
        *sorted((name, value) for name, value in settings.items() if "." in name),
    ]
    return {
        name: [pair for pair in pairs if pair[1] not in (None, "")]
        for name, pairs in (("facts", facts), ("details", details))
    }


def _known(pairs: Sequence[tuple[str, object]]) -> list[tuple[str, object]]:
    return [(name, value) for name, value in pairs if value not in (None, "")]


def _machine(machine: object) -> str | None:
    if not isinstance(machine, dict):
        return None
    memory, cores, gpus = finite(machine.get("memory_bytes")), machine.get("cores"), machine.get("gpus")
    parts = [
        machine.get("host"),
        machine.get("processor"),
        f"{cores} cores" if cores else None,
        f"{memory / 2**30:.0f} GiB of memory" if memory is not None else None,
        *(gpus if isinstance(gpus, list) else []),
    ]
    return ", ".join(str(part) for part in parts if part)


def _date(seconds: object) -> str | None:
    with suppress(ValueError, OverflowError, OSError):  # a year that no calendar has
        if isinstance(seconds, int | float):
            return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return None


def _model(run: Summary) -> str | None:
    return str(run["model"]).rstrip("/").rpartition("/")[2] if run["model"] else None


def _inside(run: Summary, part: str, key: str) -> object:
    found = run[part]
    return found.get(key) if isinstance(found, dict) else None


def _text(run: Summary) -> str:
    return " ".join([*(str(run[key]) for key in SEARCHED), state_of(run)]).casefold()
