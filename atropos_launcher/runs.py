"""The runs of a directory, by default ./runs: which have services, and how the others ended."""

import difflib
from pathlib import Path

from atropos_launcher import paths
from atropos_launcher.services.records import FOLDER
from atropos_launcher.services.run_log import why_it_ended
from atroposlib.errors import WRONG_USE, AtroposError
from atroposlib.files import is_open
from atroposlib.processes.log_files import last_lines, printable

RUNS = paths.RUNS


class NoSuchRun(AtroposError):
    """A name that is neither a run's nor a directory's, or none where there are several."""

    exit_status = WRONG_USE


def find_run(runs: Path, name: str) -> Path:
    """A run by its name, or its directory. Raises NoSuchRun."""
    for path in (runs / name, Path(name)):
        if path.is_dir():
            return expect_open(path)
    alike = difflib.get_close_matches(name, [run.name for run in _directories(runs)], 1)
    meant = f"; did you mean {alike[0]}?" if alike else ""
    raise NoSuchRun(f"no such run: neither {printable(str(runs / name))} nor {printable(name)} is a directory{meant}")


def expect_open(run: Path) -> Path:
    """The directory of a run, if this user may read it. Raises NoSuchRun."""
    if is_open(run):
        return run
    shown = printable(str(run))
    raise NoSuchRun(f"{shown} may be read by its owner alone, who can let you with `chmod go+rx {shown}`")


def recorded_runs(runs: Path) -> list[Path]:
    """List the runs that have services, newest first."""
    recorded = [run for run in _directories(runs) if (run / FOLDER).is_dir()]
    return sorted(recorded, key=lambda run: (run / FOLDER).stat().st_mtime, reverse=True)


def ended_runs(runs: Path) -> list[Path]:
    """List the runs that have no services any more, newest first."""
    ended = [run for run in _directories(runs) if not (run / FOLDER).exists() and any(run.glob("*.log"))]
    return sorted(ended, key=_started, reverse=True)


def latest_run(runs: Path) -> Path:
    """The one that runs, or else the newest. Raises NoSuchRun."""
    runs_here = [*recorded_runs(runs), *ended_runs(runs)]
    if not runs_here:
        raise NoSuchRun(f"there is no run in {printable(str(runs.absolute()))}")
    return runs_here[0]


def progress(run: Path) -> str:
    """`20/20 steps, 96.9 %`: how far it has come, and its last held-out accuracy."""
    if is_evaluation(run):
        return "evaluation"
    done, total = steps_done(run), steps_total(run)
    if not done and total is None:
        return "no step yet"
    accuracy = _last_value(run / "evaluations.jsonl", "accuracy")
    steps = f"{done}/{total} steps" if total is not None else f"{done} steps"
    return steps + (f", {100 * accuracy:.1f} %" if accuracy is not None else "")


def outcome(run: Path) -> str:
    """Describe how a run ended that has no services any more."""
    done, why = steps_done(run), why_it_ended(run)
    if done and (done == steps_total(run) or ended_well(run)):
        return f"finished: {progress(run)}"
    if is_evaluation(run):
        return "evaluation" + (f" that ended: {printable(why)}" if why else ", finished")
    return f"ended {f'after {progress(run)}' if done else 'before its first step'}" + (
        f": {printable(why)}" if why else ""
    )


def is_evaluation(run: Path) -> bool:
    """Return whether `atropos evaluate` made it, which has no trainer."""
    return (run / "run.yaml").is_file() and not (run / "trainer.yaml").exists()


def ended_well(run: Path) -> bool:
    """Return whether its last start came to an end of its own, which --stop-when-flat puts before the last step."""
    from msgspec import UNSET

    from atroposlib.view.run_data.run_files import RunFiles

    return RunFiles(run, run.name).record().held_out is not UNSET


def steps_done(run: Path) -> int:
    return int(_last_value(run / "metrics.jsonl", "step") or 0)


def steps_total(run: Path) -> int | None:
    """Read the number of steps from the resolved run, or from the trainer's own configuration."""
    import yaml

    from atroposlib.yaml_text import read_yaml

    for name, key in (("run.yaml", "steps"), ("trainer.yaml", "training_steps")):
        try:
            settings = read_yaml("\n".join(last_lines(run / name, 10_000)))
        except yaml.YAMLError:
            continue
        if isinstance(settings, dict) and isinstance(settings.get(key), int):
            return int(settings[key])
    return None


def _last_value(rows: Path, key: str) -> float | None:
    """The last number of this name in a file of JSON lines."""
    from atroposlib.view.run_data.run_files import last_values

    return last_values(rows, (key,)).get(key)


def _directories(runs: Path) -> list[Path]:
    """List the directories that this user may read. A name with control characters is nobody's: on a terminal or in
    a list it could look like another.
    """
    if not runs.is_dir():
        return []
    return [path for path in runs.iterdir() if path.is_dir() and path.name.isprintable() and is_open(path)]


def _started(run: Path) -> float:
    """When its last start was, by run.yaml: a plot or a note changes the directory of an old run. The time of the
    directory where it has none.
    """
    settings = run / "run.yaml"
    return (settings if settings.exists() else run).stat().st_mtime
