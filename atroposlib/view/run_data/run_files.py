"""One run directory as typed values: what it is, how far it has come, its metrics, evaluations, settings and logs.

Every file may be missing, damaged, growing, or somebody else's: whatever is wrong becomes a sentence in `problems`.
"""

import datetime
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from atroposlib.logs import escape
from atroposlib.processes.identity import boot_id, is_alive
from atroposlib.row_files.kept_rows import REMOVED
from atroposlib.row_files.packed_rows import SUFFIX
from atroposlib.view.run_data.accuracy import best_of
from atroposlib.view.run_data.files import note, read_small, read_tail, reason_of
from atroposlib.view.run_data.metric_rows import (
    MetricRows,
    Number,
    finite_number,
    json_object,
    read_metrics,
    trainer_steps,
)
from atroposlib.view.run_data.notes import read_notes
from atroposlib.view.run_data.run_end import LAUNCHER, end_of
from atroposlib.view.run_data.settings_files import SettingsFiles

SMALL_BYTES = 1 << 20  # of run.json
EVALUATION_BYTES = 16 << 20
TAIL_BYTES = 64 << 10
LOG_BYTES = 256 << 10
LOG_LINES = 2000
LINE_CHARACTERS = 4000  # of a log
MAX_BARS = 50
WITH_A_RECIPE = ("train", "fine-tune")  # subcommands whose next word names it


class Start(Struct):
    """One start of a run, of run.json."""

    time: str | None = None
    command: list[str] = []
    seed: int | None = None
    model: str | None = None
    commit: str | None = None
    planned_steps: int | None = None
    machine: object = None


class RemovedRows(Struct):
    """START_removed.json."""

    rows: Annotated[int, Meta(ge=0, lt=1 << 62)]
    bytes: Annotated[int, Meta(ge=0, lt=1 << 62)]
    last_step: Annotated[int, Meta(ge=0, lt=1 << 62)] | None = None


class RunRecord(Struct):
    """run.json; `held_out` stands there once the last start has come to an end of its own."""

    starts: list[Start] = []
    planned_steps: int | None = None
    held_out: Raw | UnsetType = UNSET


class StartBar(Struct):
    """Says what a service does, and how far it is; `done` and `total` are null where nobody knows."""

    name: str
    note: str = ""
    done: float | None = None
    total: float | None = None


class Starting(Struct):
    """starting.json."""

    bars: list[StartBar] = []


class ProcessRecord(Struct):
    """pids/launcher, as the launcher writes it."""

    pid: Annotated[int, Meta(gt=1, lt=2**22)]
    start: Annotated[int, Meta(ge=0, lt=1 << 62)]
    boot: str


@dataclass
class RunFiles:
    """A run directory."""

    path: Path
    label: str
    _settings: SettingsFiles = field(init=False)

    def __post_init__(self) -> None:
        self._settings = SettingsFiles(self.path)

    def summary(self) -> dict[str, Any]:
        """The run's entry in the list of runs."""
        problems: list[str] = []
        record = self.record(problems)
        last = record.starts[-1] if record.starts else Start()
        steps = last_values(self.path / "metrics.jsonl", ("step", "reward_mean", "time"), problems)
        accuracy = last_values(self.path / "evaluations.jsonl", ("accuracy",), problems).get("accuracy")
        state, reason = self.state(bool(record.starts))
        settings = self._settings.of("run", problems)
        return {
            "run": self.label,
            "path": str(self.path),
            "state": state,
            "reason": reason,
            "started": _unix(record.starts[0].time) if record.starts else None,
            "ended": self._last_word(last, steps.get("time")) if state not in ("running", "unknown") else None,
            "steps_done": int(steps.get("step") or 0),
            "planned_steps": self._planned(record, settings),
            "ended_well": record.held_out is not UNSET,
            "model": last.model,
            "recipe": _recipe(record.starts),
            "bridge": kind if isinstance(kind := _inner(settings, "bridge", "kind"), str) else None,
            "lr": finite_number(_inner(settings, "trainer", "lr")),
            "seed": last.seed,
            "commit": last.commit,
            "command": last.command,
            "machine": last.machine,
            "environments": self._environments(settings),
            "latest": {"reward_mean": steps.get("reward_mean"), "accuracy": accuracy},
            "best": best_of(self._last_evaluations()),
            "starting": self.starting() if state == "running" and not steps.get("step") else [],
            "notes": read_notes(self.path, problems),
            "problems": problems,
        }

    def record(self, problems: list[str] | None = None) -> RunRecord:
        """run.json, empty if there is none."""
        return _decoded(self.path / "run.json", RunRecord, problems) or RunRecord()

    @property
    def model(self) -> str | None:
        """Path or id of the model that was trained."""
        starts = self.record().starts
        return starts[-1].model if starts else None

    def state(self, was_started: bool) -> tuple[str, str]:
        """running, ended, failed, interrupted, killed (the launcher was, and could not say why), or unknown: the
        services were not started by a launcher. With it, why a run failed, was interrupted or killed.
        """
        launcher = _decoded(self.path / "pids" / "launcher", ProcessRecord, None)
        with suppress(OSError, ValueError):  # no /proc, or not one that we know
            if launcher is not None and launcher.boot == boot_id() and is_alive(launcher.pid, launcher.start):
                return "running", ""
        if not was_started:
            return "unknown", ""
        if end := end_of(self.log(LAUNCHER, LOG_LINES)):
            return end.how, end.why
        if launcher is not None:
            return "killed", "its launcher is gone without a word: it was killed, or the machine stopped"
        return "ended", ""

    def starting(self) -> list[dict[str, object]]:
        """What the services of a run do that has made no step yet, as its launcher keeps it in starting.json."""
        found = _decoded(self.path / "starting.json", Starting, None) or Starting()
        return [msgspec.to_builtins(bar) for bar in found.bars[:MAX_BARS]]

    def settings(self) -> dict[str, object]:
        """run.yaml with dots between its keys, and what the last start of the run says."""
        starts = self.record().starts
        last = starts[-1] if starts else Start()
        return {**self._settings.chosen(), "seed": last.seed, "model": last.model, "commit": last.commit}

    def resolved_settings(self) -> dict[str, object]:
        """The settings, with the defaults of all others that the services' files tell."""
        return {**self._settings.resolved(), **self.settings()}

    def metrics(self, after: int, generation: str | None) -> MetricRows:
        """Rows after the first `after`; all of them if `generation` is not the file's."""
        return read_metrics(self.path / "metrics.jsonl", after, generation)

    def evaluations(self) -> list[dict[str, object]]:
        """Every evaluation, oldest first."""
        data = read_tail(self.path / "evaluations.jsonl", EVALUATION_BYTES)
        return [row for row in map(json_object, data.split(b"\n")) if row is not None]

    def _last_evaluations(self) -> list[dict[str, object]]:
        with suppress(OSError):
            data = read_tail(self.path / "evaluations.jsonl", TAIL_BYTES)
            return [row for row in map(json_object, data.split(b"\n")) if row is not None]
        return []

    def timeline(self, first: int | None, last: int | None) -> list[dict[str, Any]]:
        """List what the trainer did in steps `first` to `last`, in Unix seconds. Rows without `time` have none."""
        return trainer_steps(self.path / "metrics.jsonl", first, last)

    def log_names(self) -> list[str]:
        """The services that have a log."""
        with suppress(OSError):
            return sorted(
                entry.name.removesuffix(".log")
                for entry in os.scandir(self.path)
                if entry.name.endswith(".log") and entry.name.isprintable() and entry.is_file(follow_symlinks=False)
            )
        return []

    def log(self, service: str, lines: int) -> list[str]:
        """The last lines of a service's log, with nothing in them that a terminal obeys. `service` is one of
        `log_names`.
        """
        data = read_tail(self.path / f"{service}.log", LOG_BYTES)
        found = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        shown = [escape(line.decode(errors="replace")[:LINE_CHARACTERS]) for line in found[-lines - 1 :] if line]
        return shown[-lines:]

    def files(self, start: str) -> list[Path]:
        """`START.jsonl` and every `START_X.jsonl`, the names in order; then those that are compressed, oldest first."""
        with suppress(OSError):
            names = {entry.name for entry in os.scandir(self.path)}
            plain = {name for name in names if _is_rows_file(name, start)}
            packed = {name for name in names - plain if name.endswith(SUFFIX) and _is_rows_file(name[:-3], start)}
            packed -= {f"{name}{SUFFIX}" for name in plain}  # about to replace it
            ordered = [*sorted(plain, key=lambda name: (len(name), name)), *sorted(packed)]
            return [self.path / name for name in ordered]
        return []

    def removed(self, start: str) -> list[str]:
        """Say what of `START*.jsonl` was removed to keep it within its limit (kept_rows.py), in sentences."""
        found = []
        with suppress(OSError):
            names = [entry.name for entry in os.scandir(self.path) if entry.name.endswith(REMOVED)]
            for name in sorted(names):
                file = f"{name.removesuffix(REMOVED)}.jsonl"
                if _is_rows_file(file, start):
                    found += _removed(self.path / name, file)
        return found

    def _planned(self, record: RunRecord, settings: Mapping[str, object]) -> int | None:
        starts = [start.planned_steps for start in reversed(record.starts)]
        found = [*starts, record.planned_steps, settings.get("steps")]
        return next((steps for steps in found if isinstance(steps, int) and steps >= 0), None)

    def _environments(self, settings: Mapping[str, object]) -> list[str]:
        named = settings.get("environments")
        return [str(name) for name in named] if isinstance(named, dict) else []

    def _last_word(self, last: Start, row: Number | None) -> float | None:
        """Return when the run ended, as its launcher.log and its last `row` say. The times of files, which change when
        they are copied, count where nothing else tells.
        """
        zone = str(last.time)[len("2026-11-22T19:34:50") :]
        lines = self.log(LAUNCHER, 1) if zone else []
        told = [_unix(f"{line[:19]}{zone}") for line in lines] + [finite_number(row)]
        return max((time for time in told if time is not None), default=None) or self._last_write()

    def _last_write(self) -> float | None:
        times = []
        for name in ("launcher.log", "metrics.jsonl", "run.json"):
            with suppress(OSError):
                times.append((self.path / name).lstat().st_mtime)
        return max(times, default=None)


def _removed(path: Path, file: str) -> list[str]:
    problems: list[str] = []
    found = _decoded(path, RemovedRows, problems)
    if found is None or not found.rows:
        return problems
    until = "" if found.last_step is None else f", up to step {found.last_step}"
    return [f"{file}: the oldest {found.rows:,} rows ({found.bytes / 1e6:,.1f} MB{until}) were removed (keep_samples)"]


def last_values(path: Path, keys: Iterable[str], problems: list[str] | None = None) -> dict[str, Number]:
    """The last number of each name in a file of JSON lines."""
    try:
        lines = read_tail(path, TAIL_BYTES).split(b"\n")
    except OSError as error:
        note(problems, f"{path.name} cannot be read: {reason_of(error)}")
        return {}
    found: dict[str, Number] = {}
    wanted = set(keys)
    for row in map(json_object, reversed(lines)):
        for key in wanted - found.keys() if row else ():
            if (value := finite_number(row.get(key) if row else None)) is not None:
                found[key] = value
        if len(found) == len(wanted):
            break
    return found


def _recipe(starts: list[Start]) -> str | None:
    """The run file or recipe of the first start, by its command line."""
    words = starts[0].command if starts else []
    for command, following in pairwise([*words, ""]):
        if command == "quickstart":
            return command
        if command in WITH_A_RECIPE:
            return Path(following).stem if following and not following.startswith("-") else None
    return None


def _inner(settings: Mapping[str, object], section: str, key: str) -> object:
    inside = settings.get(section)
    return inside.get(key) if isinstance(inside, dict) else None


def _decoded(path: Path, kind: object, problems: list[str] | None) -> Any:
    """The JSON file as a record, None if there is none or it is damaged."""
    try:
        return msgspec.json.decode(read_small(path, SMALL_BYTES), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        note(problems, f"{path.name} cannot be read: {reason_of(error)}")
        return None


def _unix(time: str | None) -> float | None:
    """Seconds since 1970 of 2026-11-22T19:34:50+0000."""
    with suppress(ValueError, TypeError, OverflowError):
        return datetime.datetime.fromisoformat(str(time)).timestamp()
    return None


def _is_rows_file(name: str, start: str) -> bool:
    middle = name.removeprefix(start).removesuffix(".jsonl")
    whole = name == f"{start}{middle}.jsonl" and name.isprintable()
    return whole and (not middle or middle.startswith("_"))
