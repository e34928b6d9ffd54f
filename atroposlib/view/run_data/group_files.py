"""The groups of one run: which rows of samples*.jsonl and held_out*.jsonl match a filter, in which order, and what the
trainer did with them (trained.jsonl).

All of it is answered from the indexes; only a search for text and the rows of one page are read from the files.
"""

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atroposlib.row_files.packed_rows import SUFFIX
from atroposlib.view.run_data import rows, text_search
from atroposlib.view.run_data.jsonl_index import Indexer, JsonlIndex, Numbers, Segment, stem_of
from atroposlib.view.run_data.run_files import RunFiles

LOOK_EVERY_S = 0.25
FIRST_BYTES = 8 << 20  # indexed before a request for a new file is answered
SEARCH_S = 0.4  # of one request
MAX_SEARCHES = 8
MAX_ROWS = 2_500_000  # of a file
MAX_INTERVALS = 2000
SORTS = ("newest", "oldest", "score", "spread")
SOURCES = {"samples": rows.sample_numbers, "held_out": rows.held_out_numbers}

Positions = NDArray[np.intp]


@dataclass(frozen=True)
class Filter:
    """Selects rows; a field that is None admits any."""

    step: int | None = None
    version: int | None = None
    env: str | None = None
    dropped: bool | None = None
    failed: bool = False
    truncated: bool = False
    signal: bool | None = None
    wrong: bool = False
    min_score: float | None = None
    max_score: float | None = None
    q: str = ""


@dataclass(frozen=True)
class Place:
    """A row of a file: its entry in the index."""

    path: Path
    entry: np.void

    @property
    def name(self) -> str:
        """The name of the file without its endings."""
        return stem_of(self.path)


@dataclass
class Page:
    """Some of the rows that match. With `complete` false, more may be found."""

    total: int
    complete: bool
    places: list[Place]


@dataclass
class _Matches:
    """Positions in one segment, in the file's order."""

    index: JsonlIndex
    segment: Segment
    positions: Positions


@dataclass
class _Search:
    """Remembers what a search for text has looked at: of each segment, the positions that matched."""

    found: dict[Segment, Positions] = field(default_factory=dict)


class GroupFiles:
    """See the module's head. Methods may be called from any thread."""

    def __init__(self, run: RunFiles, indexer: Indexer) -> None:
        self._run, self._indexer = run, indexer
        self.environments = rows.Environments()
        self._indexes: dict[str, dict[str, JsonlIndex]] = {}
        self._looked: dict[str, float] = {}
        self._searches: OrderedDict[tuple[str, Filter], _Search] = OrderedDict()
        self._lock = threading.Lock()

    def indexes(self, source: str) -> list[JsonlIndex]:
        """Return the index of each file of a source: "samples", "held_out" or "trained".

        The indexes know what was written until now.
        """
        with self._lock:
            known = self._indexes.setdefault(source, {})
            if time.monotonic() - self._looked.get(source, -LOOK_EVERY_S) >= LOOK_EVERY_S:
                paths = self._run.files(source)
                for name in known.keys() - {path.name for path in paths}:
                    self._indexer.forget(known.pop(name))
                packed = sum(path.suffix == SUFFIX for path in paths)
                for path in paths:
                    is_new = path.name not in known
                    index = known.setdefault(path.name, self._new_index(source, path, packed))
                    if is_new if index.is_packed else index.advance(FIRST_BYTES):
                        self._indexer.add(index)
                self._looked[source] = time.monotonic()
            return list(known.values())

    def path(self, source: str, stem: str) -> Path | None:
        """The file of a source by the index's name."""
        found = (index.path for index in self.indexes(source) if index.name == stem)
        return next(found, None)

    def forget(self) -> None:
        """Give the indexes' memory back."""
        with self._lock:
            for index in (index for known in self._indexes.values() for index in known.values()):
                self._indexer.forget(index)
            self._indexes, self._looked = {}, {}
            self._searches.clear()

    @property
    def rows(self) -> int:
        """Return how many rows the indexes hold."""
        with self._lock:
            return sum(index.rows for known in self._indexes.values() for index in known.values())

    @property
    def problems(self) -> list[str]:
        """List what is wrong with the files that were looked at."""
        with self._lock:
            found = [line for known in self._indexes.values() for index in known.values() for line in index.problems]
        return found + self._run.removed("samples") + self._run.removed("trained")

    @property
    def indexed(self) -> float:
        """The share of the bytes that is indexed: 0 before anybody asked, 1 at the end."""
        with self._lock:
            extents = [index.extent for known in self._indexes.values() for index in known.values()]
        size = sum(size for _, size in extents)
        return (sum(done for done, _ in extents) / size if size else 1.0) if extents else 0.0

    def page(self, source: str, wanted: Filter, sort: str, offset: int, limit: int) -> Page:
        """The rows offset to offset + limit of those that match, in this order."""
        indexes = self.indexes(source)
        complete = not any(index.is_behind for index in indexes)
        matches = list(self._matches(source, indexes, wanted))
        if wanted.q:
            matches, is_through = self._searched(source, wanted, matches)
            complete = complete and is_through
        total = sum(len(match.positions) for match in matches)
        return Page(total, complete, _picked(matches, sort, offset, limit))

    def trained(self, sampled: Sequence[tuple[int, int]]) -> list[Place | None]:
        """Find the row of trained.jsonl, if there is one, of each (group, step at which it was sampled)."""
        known = self._trained_rows(np.unique(np.array([group for group, _ in sampled if group], "u8")))
        return [_next_step(known.get(group, []), step) for group, step in sampled]

    def _trained_rows(self, groups: NDArray[np.uint64]) -> dict[int, list[Place]]:
        """The rows of these groups in the order of their steps: groups of the same tokens have the same name."""
        found: dict[int, list[Place]] = {}
        for index in self.indexes("trained") if len(groups) else []:
            for segment in reversed(index.segments):
                for entry in segment.rows[np.isin(segment.rows["group"], groups)]:
                    found.setdefault(int(entry["group"]), []).append(Place(index.path, entry))
        for places in found.values():
            places.sort(key=_step)
        return found

    def knows_trained(self) -> bool:
        """Return whether the trainer has written which groups it trained on."""
        return any(index.rows for index in self.indexes("trained"))

    def held_out_versions(self) -> list[dict[str, object]]:
        """Count the answers, and the wrong ones, of each evaluation; oldest first."""
        counts: dict[tuple[int, int], list[int]] = {}
        for index in self.indexes("held_out"):
            for segment in reversed(index.segments):
                wrong = (segment.rows["flags"] & rows.WRONG) != 0
                keys = np.stack([segment.rows["version"], segment.rows["env"]], axis=1)
                kinds, inverse = np.unique(keys, axis=0, return_inverse=True)
                for number, (version, env) in enumerate(kinds.tolist()):
                    mine = inverse.reshape(-1) == number
                    entry = counts.setdefault((version, env), [0, 0])
                    entry[0] += int(mine.sum())
                    entry[1] += int(wrong[mine].sum())
        return [
            {"version": version, "env": self.environments.names[env], "answers": answers, "wrong": wrong}
            for (version, env), (answers, wrong) in sorted(counts.items())
        ]

    def by_environment(self) -> dict[str, list[tuple[int, float]]]:
        """Return the mean score of each environment at each step that came next, oldest first."""
        segments = [segment.rows for index in self.indexes("samples") for segment in index.segments]
        known = [each[(each["step"] != rows.NONE) & ~np.isnan(each["mean"])] for each in segments]
        entries = np.concatenate([np.zeros(0, rows.GROUP), *known])
        keys, inverse = np.unique(np.stack([entries["env"], entries["step"]], axis=1), axis=0, return_inverse=True)
        groups = np.bincount(inverse.reshape(-1), minlength=len(keys))
        means = np.bincount(inverse.reshape(-1), entries["mean"], len(keys)) / groups
        found: dict[str, list[tuple[int, float]]] = {}
        for (env, step), mean in zip(keys.tolist(), means.tolist(), strict=True):
            found.setdefault(self.environments.names[env], []).append((step + 1, mean))
        return dict(sorted(found.items()))

    def latest_version(self) -> int | None:
        """The newest policy version with held-out rows."""
        segments = (segment for index in self.indexes("held_out") for segment in index.segments)
        return max((int(segment.rows["version"].max()) for segment in segments if len(segment.rows)), default=None)

    def sampling(self, first: float, last: float) -> list[tuple[float, float]]:
        """The times between `first` and `last` at which some group was being sampled, in Unix seconds."""
        starts, ends = [], []
        for index in self.indexes("samples"):
            for segment in index.segments:
                start, end = segment.rows["started"], segment.rows["time"]
                mine = (end >= first) & (start <= last) & (start <= end)
                starts.append(np.maximum(start[mine], first))
                ends.append(np.minimum(end[mine], last))
        return _union(np.concatenate(starts), np.concatenate(ends)) if starts else []

    def _new_index(self, source: str, path: Path, packed: int) -> JsonlIndex:
        """Compressed files, of which there are `packed`, share the rows of one that is not."""
        most = MAX_ROWS // packed if path.suffix == SUFFIX else MAX_ROWS
        if source == "trained":
            return JsonlIndex(path, rows.TRAINED, rows.trained_numbers, most)
        return JsonlIndex(path, rows.GROUP, partial(SOURCES[source], environments=self.environments), most)

    def _matches(self, source: str, indexes: Sequence[JsonlIndex], wanted: Filter) -> Iterator[_Matches]:
        """Newest file and newest rows first."""
        trained = self._trained_in(wanted.step) if source == "samples" and wanted.step is not None else None
        left_out = self._left_out() if source == "samples" and wanted.dropped is not None else None
        env = None if wanted.env is None else self.environments.known(wanted.env)
        if wanted.env is not None and env is None:
            return
        for index in sorted(indexes, key=lambda index: _newest_time(index.segments), reverse=True):
            for segment in index.segments:
                mask = _mask(segment.rows, wanted, env)
                if wanted.step is not None:
                    mask &= _is_of_step(segment.rows, wanted.step, trained)
                if left_out is not None:
                    is_dropped = (segment.rows["flags"] & rows.DROPPED) != 0
                    mask &= (is_dropped | np.isin(segment.rows["group"], left_out)) == wanted.dropped
                if len(positions := np.flatnonzero(mask)):
                    yield _Matches(index, segment, positions)

    def _trained_in(self, step: int) -> dict[int, list[Place]] | None:
        """The groups of a step, each with all its rows; None where no file names them."""
        if not self.knows_trained():
            return None
        found = [segment.rows for index in self.indexes("trained") for segment in index.segments]
        return self._trained_rows(_groups([each["group"][each["step"] == step] for each in found]))

    def _left_out(self) -> NDArray[np.uint64]:
        found = [segment.rows for index in self.indexes("trained") for segment in index.segments]
        return _groups([each["group"][(each["flags"] & rows.LEFT_OUT) != 0] for each in found])

    def _searched(self, source: str, wanted: Filter, matches: list[_Matches]) -> tuple[list[_Matches], bool]:
        """Return the matches with the text, as far as the time of one request allows, and whether that was enough."""
        with self._lock:
            search = self._searches.setdefault((source, wanted), _Search())
            self._searches.move_to_end((source, wanted))
            while len(self._searches) > MAX_SEARCHES:
                self._searches.popitem(last=False)
        alive = {match.segment for match in matches}
        for gone in [segment for segment in search.found if segment not in alive]:
            search.found.pop(gone, None)  # grown, or of a file that was replaced
        needle, until = text_search.Needle(wanted.q), time.monotonic() + SEARCH_S
        for match in matches:
            if match.segment not in search.found:
                found = text_search.search(match.index.path, match.segment, match.positions, needle)
                search.found[match.segment] = found
                if time.monotonic() >= until:
                    break
        done = [(match, search.found[match.segment]) for match in matches if match.segment in search.found]
        kept = [_Matches(match.index, match.segment, found) for match, found in done if len(found)]
        return kept, len(done) == len(matches)


def _next_step(rows_of_group: Sequence[Place], sampled_at: int) -> Place | None:
    """The row of the first step after the one at which the group was sampled."""
    later = bisect_right(rows_of_group, sampled_at, key=_step)
    return rows_of_group[min(later, len(rows_of_group) - 1)] if rows_of_group else None


def _step(place: Place) -> int:
    return int(place.entry["step"])


def _is_of_step(entries: Numbers, step: int, trained: dict[int, list[Place]] | None) -> NDArray[np.bool_]:
    """Mark the entries trained on in this step; without trained.jsonl, those that were sampled just before it."""
    if trained is None:
        before: NDArray[np.bool_] = entries["step"] == step - 1
        return before
    mask = np.isin(entries["group"], np.array([*trained], "u8"))
    for position in np.flatnonzero(mask):
        place = _next_step(trained[int(entries["group"][position])], int(entries["step"][position]))
        mask[position] = place is not None and place.entry["step"] == step
    return mask


def _groups(found: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    return np.concatenate([np.zeros(0, np.uint64), *found])


def _mask(entries: Numbers, wanted: Filter, env: int | None) -> NDArray[np.bool_]:
    mask = np.ones(len(entries), bool)
    if env is not None:
        mask &= entries["env"] == env
    if wanted.version is not None:
        mask &= entries["version"] == wanted.version
    if wanted.failed:
        mask &= entries["failed"] > 0
    if wanted.truncated:
        mask &= entries["truncated"] > 0
    if wanted.signal is not None:
        mask &= (entries["spread"] > 0) == wanted.signal
    if wanted.wrong:
        mask &= (entries["flags"] & rows.WRONG) != 0
    if wanted.min_score is not None:
        mask &= entries["mean"] >= wanted.min_score
    if wanted.max_score is not None:
        mask &= entries["mean"] <= wanted.max_score
    return mask


def _picked(matches: list[_Matches], sort: str, offset: int, limit: int) -> list[Place]:
    """One page. The newest rows of a single file need no sorting."""
    if not matches:
        return []
    if sort == "newest" and len({id(match.index) for match in matches}) == 1:
        return _newest(matches, offset, limit)
    entries = np.concatenate([match.segment.rows[match.positions] for match in matches])
    order = _order(entries, sort)[offset : offset + limit]
    ends = np.cumsum([len(match.positions) for match in matches])
    found = []
    for place in order.tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        match = matches[number]
        position = match.positions[place - (ends[number] - len(match.positions))]
        found.append(Place(match.index.path, match.segment.rows[position]))
    return found


def _newest(matches: list[_Matches], offset: int, limit: int) -> list[Place]:
    found: list[Place] = []
    for match in matches:
        count = len(match.positions)
        if offset < count:
            chosen = match.positions[::-1][offset : offset + limit - len(found)]
            found += [Place(match.index.path, match.segment.rows[position]) for position in chosen]
        offset = max(0, offset - count)
        if len(found) >= limit:
            break
    return found


def _order(entries: Numbers, sort: str) -> NDArray[np.intp]:
    """Rows without a value come last; of equal ones the newest comes first."""
    time, offset = np.nan_to_num(entries["time"], nan=0.0), entries["offset"].astype("i8")
    value = entries["mean"] if sort == "score" else -entries["spread"]
    keys = {
        "oldest": (offset, time),
        "newest": (-offset, -time),
        "score": (-offset, -time, np.where(np.isnan(value), np.inf, value)),
        "spread": (-offset, -time, value),
    }
    order: NDArray[np.intp] = np.lexsort(keys[sort])
    return order


def _newest_time(segments: Sequence[Segment]) -> float:
    times = (float(np.nanmax(each.rows["time"])) for each in segments[:1] if not np.isnan(each.rows["time"]).all())
    return next(times, 0.0)


def _union(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Overlapping intervals as one; gaps below a two-thousandth of the whole are closed."""
    if not len(starts):
        return []
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    gap = (ends[-1] - starts[0]) / MAX_INTERVALS
    breaks = np.flatnonzero(starts[1:] > ends[:-1] + gap)
    first, last = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [len(ends) - 1]])
    return list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))
