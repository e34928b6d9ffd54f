"""What each route of the window answers: a function of the runs and the request, whose value becomes JSON."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import Request

from atroposlib.view import group_view
from atroposlib.view.run_data import dead_letters, notes
from atroposlib.view.run_data.compared import differences
from atroposlib.view.run_data.group_files import SORTS, SOURCES, Filter, Place
from atroposlib.view.run_data.jsonl_index import line_from, lines_at
from atroposlib.view.run_data.rows import (
    HELD_OUT,
    NONE,
    TRAINED_ROW,
    HeldOut,
    Sample,
    Trained,
    group_number,
    read_sample,
)
from atroposlib.view.run_data.run_files import LOG_LINES
from atroposlib.view.run_data.runs import Run, Runs
from atroposlib.view.run_summaries import about, listed_runs, standing
from atroposlib.view.token_text import find_tokenizer
from atroposlib.wire.metric_words import CHARTS, METRIC_WORDS

DEAD_LETTERS = "dead_letters"
MAX_ROWS = 200  # of a list
MAX_COMPARED = 20  # runs
MAX_PIECES = 100_000  # of the samplers' times in a timeline: steps of somebody else's run may all last for ever
MAX_TEXT = 200  # characters of a search
DAMAGED = "this row cannot be read"

T = TypeVar("T")


class NotFound(Exception):
    """There is no such thing; the message says what was asked for."""


class BadRequest(Exception):
    """A parameter has an impossible value; the message names it."""


def list_runs(runs: Runs, request: Request) -> dict[str, object]:
    found = []
    for run in runs.all().values():
        summary = run.files.summary()
        summary["indexed_frac"] = round(run.groups.indexed, 3)
        summary["problems"] += run.groups.problems
        found.append(summary)
    words = request.query_params.get("q", "")[:MAX_TEXT]
    return {"runs": listed_runs(found, words, request.query_params.get("sort", ""))}


def metrics(runs: Runs, request: Request) -> dict[str, object]:
    run = _run(runs, request)
    after = _whole(request, "after") or 0
    table = run.files.metrics(after, request.query_params.get("generation"))
    return {
        "columns": table.columns,
        "rows": table.rows,
        "next": table.next,
        "generation": table.generation,
        "reset": table.reset,
        "more": table.more,
        **({} if after else {"words": METRIC_WORDS, "charts": msgspec.to_builtins(CHARTS)}),
    }


def keep_notes(content: bytes, runs: Runs, request: Request) -> dict[str, object]:
    """Replace the notes of a run."""
    run = _run(runs, request)
    try:
        kept = notes.parsed(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the notes cannot be kept: {error}") from None
    notes.write_notes(run.files.path, kept)
    return {"notes": msgspec.to_builtins(kept)}


def evaluations(runs: Runs, request: Request) -> dict[str, object]:
    rows = _run(runs, request).files.evaluations()
    return {"rows": rows, **standing(rows)}


def timeline(runs: Runs, request: Request) -> dict[str, object]:
    run = _run(runs, request)
    steps = run.files.timeline(_whole(request, "from"), _whole(request, "to"))
    ends = [part[key] for step in steps for part in step["trainer"] for key in ("start", "end")]
    runs.use(run)
    sampler = run.groups.sampling(min(ends), max(ends)) if ends else []  # in order, and none in another
    until, left = [last for _, last in sampler], MAX_PIECES
    for step in steps:
        start = min((part["start"] for part in step["trainer"]), default=math.inf)
        end = max((part["end"] for part in step["trainer"]), default=-math.inf)
        found: list[list[float]] = []
        at = bisect_right(until, start)
        while at < len(sampler) and sampler[at][0] < end and len(found) < left:
            found.append([max(sampler[at][0], start), min(sampler[at][1], end)])
            at += 1
        step["sampler"], left = found, left - len(found)
    return {"steps": steps}


def settings(runs: Runs, request: Request) -> dict[str, object]:
    files = _run(runs, request).files
    resolved = files.resolved_settings()
    return {"settings": files.settings(), "resolved": resolved, **about(files.summary(), resolved)}


def compare(runs: Runs, request: Request) -> dict[str, object]:
    """The settings in which several runs differ."""
    labels = request.query_params.getlist("run")[:MAX_COMPARED]
    known = [run.files for label in labels if (run := runs.get(label)) is not None]
    differing, compared = differences(known)
    return {"runs": [run.label for run in known], "differing": differing, "compared": compared}


def environments(runs: Runs, request: Request) -> dict[str, object]:
    """The mean score of each environment's groups that were sampled for each step."""
    run = _run(runs, request)
    runs.use(run)
    return {"apart": run.groups.by_environment()}


def logs(runs: Runs, request: Request) -> dict[str, object]:
    run = _run(runs, request)
    services = run.files.log_names()
    service = request.query_params.get("service")
    if service is not None and service not in services:
        raise NotFound("the run has no such log")
    lines = min(LOG_LINES, max(1, _whole(request, "lines") or 200))
    return {"services": services, "lines": [] if service is None else run.files.log(service, lines)}


def held_out(runs: Runs, request: Request) -> dict[str, object]:
    run = _run(runs, request)
    runs.use(run)
    return {"versions": run.groups.held_out_versions()}


def groups(runs: Runs, request: Request) -> dict[str, object]:
    """A page of the list."""
    run = _run(runs, request)
    source, sort = _one_of(request, "source", (*SOURCES, DEAD_LETTERS)), _one_of(request, "sort", SORTS)
    offset = _whole(request, "offset") or 0
    limit = min(MAX_ROWS, max(1, _whole(request, "limit") or 50))
    wanted = _filter(run, request, source)
    if source == DEAD_LETTERS:
        return _letters(run, wanted, sort, offset, limit)
    runs.use(run)
    page = run.groups.page(source, wanted, sort, offset, limit)
    sampled = [(int(place.entry["group"]), int(place.entry["step"])) for place in page.places]
    listed = zip(page.places, _rows(page.places, source), _trained(run, sampled), strict=True)
    found = [_entry(run, place, row, done) for place, row, done in listed]
    return {
        "total": page.total,
        "complete": page.complete,
        "indexed_frac": round(run.groups.indexed, 3),
        "environments": [name for name in run.groups.environments.names if name],
        "rows": found,
    }


def group(runs: Runs, request: Request) -> dict[str, object]:
    """The whole group."""
    run, name = _run(runs, request), request.path_params["n"]
    source, only = _one_of(request, "source", (*SOURCES, DEAD_LETTERS)), _whole(request, "rollout")
    runs.use(run)
    if source == DEAD_LETTERS:
        return _letter(run, name, only)
    stem, _, digits = name.rpartition(".")
    path = run.groups.path(source, stem)
    line = None if path is None or not _is_offset(digits) else line_from(path, int(digits))
    if line is None:
        raise NotFound("the run has no such group")
    if source == "held_out":
        found = group_view.whole_held_out(_decoded(line, HELD_OUT.decode))
        return {"n": name, "source": source, **found}
    sample: Sample = _decoded(line, read_sample)
    sampled_at = NONE if sample.head.step is None else sample.head.step
    (done,) = _trained(run, [(group_number(sample.head.group), sampled_at)])
    found = group_view.whole(sample, done, find_tokenizer(run.files.path, run.files.model), only)
    found["step"] = _step(run, found["step"], found["sampled_at_step"])
    return {"n": name, "source": source, **found}


ROUTES: dict[str, Callable[[Runs, Request], dict[str, object]]] = {
    "/api/runs": list_runs,
    "/api/compare": compare,
    "/api/runs/{run}/metrics": metrics,
    "/api/runs/{run}/evaluations": evaluations,
    "/api/runs/{run}/timeline": timeline,
    "/api/runs/{run}/settings": settings,
    "/api/runs/{run}/environments": environments,
    "/api/runs/{run}/logs": logs,
    "/api/runs/{run}/held_out": held_out,
    "/api/runs/{run}/groups": groups,
    "/api/runs/{run}/groups/{n}": group,
}


def _entry(run: Run, place: Place, row: Sample | HeldOut | None, done: Trained | None) -> dict[str, object]:
    """A row of the list; `row` is None if it cannot be read any more."""
    entry = place.entry
    sampled_at = None if entry["step"] == NONE else int(entry["step"])
    version, mean = int(entry["version"]), float(entry["mean"])
    found: dict[str, object] = {
        "n": f"{place.name}.{int(entry['offset'])}",
        "time": _known(float(entry["time"])),
        "step": _step(run, None if done is None else done.step, sampled_at),
        "sampled_at_step": sampled_at,
        "policy_version": None if version == NONE else version,
        "env": run.groups.environments.names[int(entry["env"])],
        "mean": _known(mean),
        "failed": int(entry["failed"]),
        "truncated": int(entry["truncated"]),
        "tokens": int(entry["tokens"]),
        "left_out": None if done is None else done.left_out,
        "dropped": None,
        "scores": [],
        "question": "",
        "reference": None,
    }
    return found | ({"error": DAMAGED} if row is None else group_view.listed(row))


def _step(run: Run, trained_at: int | None, sampled_at: int | None) -> int | None:
    """The step that trained on a group. An older run has no trained.jsonl: there, the one that came next."""
    if trained_at is not None or sampled_at is None or run.groups.knows_trained():
        return trained_at
    return sampled_at + 1


def _rows(places: list[Place], source: str) -> Iterator[Sample | HeldOut | None]:
    """Each row, one in memory at a time; None if it cannot be read any more."""
    decode: Callable[[bytes], Sample | HeldOut] = HELD_OUT.decode if source == "held_out" else read_sample
    for line in _lines(places):
        try:
            yield None if line is None else decode(line)
        except (ValueError, RecursionError):
            yield None


def _lines(places: list[Place]) -> Iterator[bytes | None]:
    """The bytes of these rows."""
    for place in places:
        where = [(int(place.entry["offset"]), int(place.entry["length"]))]
        try:
            yield next(lines_at(place.path, where))
        except OSError:
            yield None


def _trained(run: Run, sampled: list[tuple[int, int]]) -> Iterator[Trained | None]:
    """Find what the trainer wrote of each (group, step at which it was sampled)."""
    places = run.groups.trained(sampled)
    lines = _lines([place for place in places if place is not None])
    return (None if place is None else _trained_row(next(lines)) for place in places)


def _trained_row(line: bytes | None) -> Trained | None:
    try:
        return None if line is None else TRAINED_ROW.decode(line)
    except (ValueError, RecursionError):
        return None


def _letters(run: Run, wanted: Filter, sort: str, offset: int, limit: int) -> dict[str, object]:
    try:
        total, letters = dead_letters.letters(
            run.files.path, wanted.q, wanted.env, min(offset, 2**31), limit, oldest=sort == "oldest"
        )
    except dead_letters.CannotRead as error:
        return {"total": 0, "complete": True, "indexed_frac": 1.0, "rows": [], "problem": str(error)}
    rows = []
    for letter in letters:
        listed = {} if letter.group is None else group_view.listed(letter.group)
        scores = [score for score in listed.get("scores", []) if score is not None]
        rows.append(
            {
                "n": str(letter.id),
                "time": letter.at,
                "step": None,
                "policy_version": None,
                "env": letter.environment,
                "mean": float(np.mean(scores)) if scores else None,
                "scores": [],
                "question": "",
                "reference": None,
                "failed": 0,
                "truncated": 0,
                "tokens": 0,
                "left_out": None,
                **listed,
                "dropped": letter.reason,
                "error": letter.reason,
            }
        )
    return {"total": total, "complete": True, "indexed_frac": 1.0, "rows": rows}


def _letter(run: Run, name: str, only: int | None) -> dict[str, object]:
    try:
        letter = dead_letters.letter(run.files.path, int(name)) if _is_offset(name) else None
    except dead_letters.CannotRead as error:
        raise NotFound(str(error)) from None
    if letter is None:
        raise NotFound("the journal has no such dead letter")
    tokenizer = find_tokenizer(run.files.path, run.files.model)
    found = group_view.whole(letter.group or read_sample(b"{}"), None, tokenizer, only)
    about = {"n": name, "source": DEAD_LETTERS, "time": letter.at, "env": letter.environment, "error": letter.reason}
    return {**found, **about}


def _filter(run: Run, request: Request, source: str) -> Filter:
    asked = request.query_params
    is_latest = asked.get("version") == "latest"
    latest = run.groups.latest_version() if is_latest and source == "held_out" else None
    return Filter(
        step=_whole(request, "step"),
        version=latest if is_latest else _whole(request, "version"),
        env=asked.get("env") or None,
        dropped=_yes_or_no(request, "dropped"),
        failed=bool(_yes_or_no(request, "failed")),
        truncated=bool(_yes_or_no(request, "truncated")),
        signal=_yes_or_no(request, "signal"),
        wrong=bool(_yes_or_no(request, "wrong")),
        min_score=_real(request, "min_score"),
        max_score=_real(request, "max_score"),
        q=(asked.get("q") or "")[:MAX_TEXT],
    )


def _run(runs: Runs, request: Request) -> Run:
    run = runs.get(request.path_params["run"])
    if run is None:
        raise NotFound("there is no such run")
    return run


def _decoded(line: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(line)
    except (ValueError, RecursionError):
        raise NotFound(DAMAGED) from None


def _whole(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise BadRequest(f"{name} is a whole number")
    return int(text)


def _real(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRequest(f"{name} is a number")
    return value


def _yes_or_no(request: Request, name: str) -> bool | None:
    text = request.query_params.get(name)
    if not text:
        return None
    if text not in ("yes", "no"):
        raise BadRequest(f"{name} is yes or no")
    return text == "yes"


def _one_of(request: Request, name: str, known: tuple[str, ...]) -> str:
    """The first one by default."""
    text = request.query_params.get(name) or known[0]
    if text not in known:
        raise BadRequest(f"{name} is one of {', '.join(known)}")
    return text


def _is_offset(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
