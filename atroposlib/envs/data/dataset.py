"""Rows to make questions of, from a file (.jsonl, .json, .csv, .parquet), a directory or the Hugging Face hub.

    source ──▶ rows ──columns──▶ items to train on | held out, by a seed ──▶ ItemStream: item 0, 1, 2, ... without end

An author's configuration has a field of `DatasetConfig`, whose settings are then flags (`--env.data.source`). Errors
name the file, the line and the column, and the columns that there are. The hub is read by a child process
(`hub_download.py`) that is killed at its deadline: the hub's client retries for minutes, and no thread can be stopped.
"""

import asyncio
import codecs
import contextlib
import csv
import io
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, Field

from atroposlib.config import Config, InputPathText, Reads, to_read
from atroposlib.envs.data.data_report import DataReport, note_report, note_stream, question_key
from atroposlib.envs.errors import DataError
from atroposlib.errors import reading
from atroposlib.files import expect_readable
from atroposlib.logs import get_logger
from atroposlib.processes.async_child import start_group

log = get_logger(__name__)

T = TypeVar("T")

HUB_CHILD = Path(__file__).with_name("hub_download.py")
TRAIN, TEST = "train", "test"
# What happens to held-out questions that are trained on, too.
Overlap = Literal["refuse", "leave_out", "allow"]
OVERLAP = (
    "Held-out questions that are also trained on: refuse the data, leave_out those questions of the training part, or"
    " allow them."
)
HELD_OUT = "--env.heldout_size or --env.final_heldout_size"  # the larger one counts
TRIES = 1000  # generated questions until one is not held out
# The value of an item that is its question, by the names in use; the whole item without any of them.
QUESTION_NAMES = ("question", "problem", "prompt", "instruction", "query", "messages")


class DatasetConfig(Config):
    """Settings of a dataset."""

    source: Annotated[str, Reads(lambda source: is_local(source)), AfterValidator(to_read)] = Field(
        default="",
        description="Name of a hub dataset, a .jsonl, .json, .csv or .parquet file, or a directory of train and test.",
    )
    test_source: InputPathText | None = Field(
        default=None, description="File to evaluate with; else part of source is held out."
    )
    columns: dict[str, str] = Field(
        default={}, description='The column of each value that the environment reads: {"question": "prompt"}.'
    )
    name: str = Field(default="default", description="Configuration of the hub dataset.")
    split: str = Field(default=TRAIN, description="Split of the hub dataset to train on.")
    test_split: str = Field(
        default=TEST, description="Split of the hub dataset to evaluate with; without it part of split is held out."
    )
    hub_timeout: float = Field(default=60.0, gt=0, description="Seconds to wait for the hub.")
    overlap: Overlap = Field(default="refuse", description=OVERLAP)

    async def load(self, held_out: int, seed: int) -> "ItemSet[dict[str, Any]]":
        """Items to train on and at most `held_out` to measure with, each a dictionary with the keys of `columns`, or
        with every column if there are none. Raises DataError.
        """
        if not self.source:
            raise DataError("no dataset is named: pass --env.data.source with a file or the name of a hub dataset")
        remedy = "check the name and the network, or pass a local file"
        if is_local(self.source):
            tables = local_tables(Path(self.source), Path(self.test_source) if self.test_source else None)
        else:
            tables = await hub_tables(self.source, self.name, self.hub_timeout, remedy, (self.split, self.test_split))
            if self.test_source:
                tables = Tables(tables.source, tables.train, read_rows(Path(self.test_source)))
        return tables.items(
            lambda row: row.picked(self.columns), held_out, seed, overlap=self.overlap, flag="--env.data.overlap"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Values by column, and where they stand: the file and the line."""

    where: str
    values: dict[str, Any]

    def picked(self, columns: Mapping[str, str]) -> dict[str, object]:
        """The values of the mapped columns by their new names; of all if there is no mapping. Raises DataError."""
        return {name: self.value(column) for name, column in columns.items()} or self.values

    def value(self, column: str) -> Any:
        """Raises DataError for a column that is not there, or has no value here."""
        if column not in self.values:
            raise DataError(f"{self.where} has no column {column!r}; it has {', '.join(self.values) or 'none'}")
        if self.values[column] is None:
            raise DataError(f"{self.where} has no value in column {column!r}")
        return self.values[column]


@dataclass(frozen=True)  # without slots, which a generic alias cannot set: ItemSet[str](...)
class ItemSet(Generic[T]):
    """Items to train on and, disjoint from them, to measure with."""

    train: list[T]
    held_out: list[T]
    report: DataReport | None = None  # of the look at the data

    def stream(self, seed: int) -> "ItemStream[T]":
        """Return the items to train on, without end."""
        return ItemStream(self.train, seed)


@dataclass(frozen=True, slots=True)
class Flaw:
    """A record that makes no item: it is left out, and counted by its kind."""

    kind: str


class ItemStream(Generic[T]):
    """Items without end: all of them again and again, each time in another order that `seed` fixes."""

    def __init__(self, items: Sequence[T], seed: int) -> None:
        self._seed = seed
        self._start(items)
        note_stream(self)

    def _start(self, items: Sequence[T]) -> None:
        self.items = items
        self._generator = random.Random(self._seed)
        self._epochs: list[list[T]] = []

    def leave_out(self, places: set[int]) -> None:
        """Never give the items at these places of `items`."""
        self._start([item for place, item in enumerate(self.items) if place not in places])

    def __getitem__(self, number: int) -> T:
        """Item `number`: 0, 1, 2, ..."""
        epoch, place = divmod(number, len(self.items))
        while len(self._epochs) <= epoch:
            self._epochs.append(self._generator.sample(self.items, len(self.items)))
        return self._epochs[epoch][place]


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of a source; `test` is None where part of `train` is to be held out."""

    source: str
    train: list[Row]
    test: list[Row] | None

    def items(
        self,
        item: Callable[[Row], T | Flaw],
        held_out: int,
        seed: int,
        overlap: Overlap = "refuse",
        flag: str = "--env.overlap",
    ) -> ItemSet[T]:
        """Each row as an item, at most `held_out` of them held out, by `seed`. Raises DataError, also for held-out
        questions that are trained on unless `overlap`, which `flag` sets, says otherwise.
        """
        report = DataReport(self.source, len(self.train) + len(self.test or []))
        train = _without_flaws(self.train, item, report)
        test = None if self.test is None else _without_flaws(self.test, item, report)
        report.check_left_out(
            report.records - len(train) - len(test or []), "check the columns, or leave these records out"
        )
        if test is None:
            return split(train, held_out, seed, self.source, report)
        measured = _apart(random.Random(seed).sample(test, min(held_out, len(test))), report)
        train = _disjoint(train, measured, report, overlap, flag)
        return _reported(train, measured, report)


def _without_flaws(rows: Sequence[Row], item: Callable[[Row], T | Flaw], report: DataReport) -> list[T]:
    found: list[T] = []
    for row in rows:
        made = item(row)
        if isinstance(made, Flaw):
            report.add(made.kind, "left out", row.where)
        else:
            found.append(made)
    return found


def split(items: Sequence[T], held_out: int, seed: int, source: str, report: DataReport | None = None) -> ItemSet[T]:
    """`items` shuffled by `seed`, the first questions of them held out: as many as `held_out_count` says. A question
    that comes several times is on one side. Raises DataError where it does.
    """
    report = report or DataReport(source, len(items))
    shuffled = random.Random(seed).sample(list(items), len(items))
    keys = [hash(question_of(item)) for item in shuffled]
    chosen = dict.fromkeys(keys)  # each question once, in this order
    measured = set(itertools.islice(chosen, held_out_count(held_out, len(chosen), source)))
    train, trained, tested, seen = [], [], [], set[int]()
    for key, item in zip(keys, shuffled, strict=True):
        if key not in measured:
            train.append(item)
            trained.append(key)
        elif key not in seen:
            tested.append(item)
        else:
            report.add("more copies of held-out questions", "left out", shown_question(item))
        seen.add(key)
    _note_copies(train, trained, report)
    return _reported(train, tested, report)


def held_out_count(limit: int, questions: int, source: str) -> int:
    """Return how many of the `questions` of a source to hold out: `limit`, but at most half, as the others are trained
    on. Raises DataError for a source without any.
    """
    if not questions:
        raise DataError(f"{source} has no questions to train on")
    held_out = min(limit, questions // 2)
    if held_out < limit:
        log.warning(
            "Of the %d questions of %s, %d are held out, not %d (%s): at least half are trained on",
            *(questions, source, held_out, limit, HELD_OUT),
        )
    return held_out


def held_apart(items: Sequence[T], limit: int, seed: int, source: str) -> tuple[list[T], list[T]]:
    """Items to measure with, as many as `held_out_count` says, and the others to train on, shuffled by `seed`; without
    those that ask what a held-out one does. Raises DataError where no others are left.
    """
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    count = held_out_count(limit, len(shuffled), source)
    held_out, others = shuffled[:count], shuffled[count:]
    asked = {question_of(item) for item in held_out}
    train = [item for item in others if question_of(item) not in asked]
    if not train:
        raise DataError(f"{source} has no question to train on that is not held out, too: give other questions")
    if len(train) < len(others):
        log.warning("%d copies of held-out questions of %s are not trained on", len(others) - len(train), source)
    return held_out, train


def not_held_out(make: Callable[[], T], held_out: Sequence[object]) -> T:
    """Return the first question that `make` gives and that is not held out. Raises DataError if the first TRIES are."""
    for _ in range(TRIES):
        if (question := make()) not in held_out:
            return question
    raise DataError(
        f"{TRIES} generated questions in a row are among the {len(held_out)} that are held out: lower {HELD_OUT}, or"
        " allow more different questions"
    )


def question_of(item: object) -> str:
    """Return a key that tells an item's question from others; see `question_key`."""
    question = getattr(item, "question", None)
    if isinstance(item, Mapping):
        question = next((item[name] for name in QUESTION_NAMES if item.get(name)), item)
    return question_key(question if isinstance(question, str) else _as_text(item if question is None else question))


def shown_question(item: object) -> str:
    """An item for people."""
    question = getattr(item, "question", None)
    if isinstance(item, Mapping):
        question = next((item[name] for name in QUESTION_NAMES if item.get(name)), None)
    return question if isinstance(question, str) else _as_text(item)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _reported(train: list[T], held_out: list[T], report: DataReport) -> ItemSet[T]:
    report.train, report.held_out = len(train), len(held_out)
    note_report(report)
    return ItemSet(train, held_out, report)


def _apart(items: Sequence[T], report: DataReport) -> list[T]:
    """Each question once."""
    found: dict[str, T] = {}
    for item in items:
        if found.setdefault(question_of(item), item) is not item:
            report.add("more copies of held-out questions", "left out", shown_question(item))
    return list(found.values())


def _disjoint(train: list[T], held_out: Sequence[T], report: DataReport, overlap: Overlap, flag: str) -> list[T]:
    """`train`, where `overlap` wants it without the held-out questions. Raises DataError if it refuses them."""
    measured, keys = {hash(question_of(item)) for item in held_out}, [hash(question_of(item)) for item in train]
    shared = {place for place, key in enumerate(keys) if key in measured}
    done = {"refuse": "refused", "leave_out": "left out of the training part", "allow": f"allowed by {flag}"}[overlap]
    kind = "held-out questions in the training part"
    for place in sorted(shared):
        report.add(kind, done, shown_question(train[place]))
    if shared and overlap == "refuse":
        raise DataError(
            f"{report.source}: {report.findings[kind].line()}. An accuracy on them shows what was learned by heart:"
            f" pass {flag} leave_out to train without them, or {flag} allow"
        )
    places = [place for place in range(len(train)) if overlap == "allow" or place not in shared]
    if not places:
        raise DataError(f"{report.source}: every training question is held out, too; give other files")
    kept = [train[place] for place in places]
    _note_copies(kept, [keys[place] for place in places], report)
    return kept


def _note_copies(train: Sequence[object], keys: Sequence[int], report: DataReport) -> None:
    """Questions that come again are kept: their author may have meant it."""
    seen = set[int]()
    for item, key in zip(train, keys, strict=True):
        if key in seen:
            report.add("repeated training questions", "kept", shown_question(item))
        seen.add(key)


# --- files ------------------------------------------------------------------------------------------------------------


def is_local(source: str) -> bool:
    """Return whether a source is a path rather than a name at the hub."""
    path = Path(source)
    return path.suffix in READERS or path.exists() or source.startswith((".", "/", "~"))


def local_tables(path: Path, test_path: Path | None = None) -> Tables:
    """A directory with a file `train` and perhaps one `test`, a file with another to measure with, or one file of which
    part is held out. Raises DataError.
    """
    path = Path(os.path.expanduser(path))
    source = str(path)
    if path.is_dir():
        path, test_path = _in(path, TRAIN) or path / f"{TRAIN}.jsonl", test_path or _in(path, TEST)
    return Tables(
        source, read_rows(path), None if test_path is None else read_rows(Path(os.path.expanduser(test_path)))
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, by its ending; of any other ending than those of READERS, one JSON object per line. Raises
    DataError.
    """
    with reading(f"cannot read {path}", DataError):
        rows = list(READERS.get(path.suffix, _jsonl)(expect_readable(path)))
    if not rows:
        raise DataError(f"{path} contains no rows")
    return rows


def _in(folder: Path, name: str) -> Path | None:
    return next((path for ending in READERS if (path := folder / f"{name}{ending}").is_file()), None)


def numbered_lines(path: Path) -> list[tuple[int, bytes]]:
    """Return the lines of a file that are not blank, with their numbers, without a byte order mark. Only ends of lines
    end them: a text also ends at characters that a string in JSON may have.
    """
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in numbered_lines(path):
        with reading(f"{path}:{number} is not JSON", DataError, remedy="write one object per line"):
            value = msgspec.json.decode(line)
        yield _row(f"{path}:{number}", value)


def _json(path: Path) -> Iterator[Row]:
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    with reading(f"{path} is not JSON", DataError):
        values = msgspec.json.decode(text)
    if not isinstance(values, list):
        raise DataError(f"{path} is not a list of objects; write [{{...}}, {{...}}], or one object per line as .jsonl")
    for number, value in enumerate(values, start=1):
        yield _row(f"{path}, object {number}", value)


def _csv(path: Path) -> Iterator[Row]:
    lines = csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True)
    with reading(f"{path} is not CSV", DataError, also=(csv.Error,)):
        names = next(lines, [])
        for values in lines:
            where = f"{path}:{lines.line_num}"
            if values and len(values) != len(names):
                raise DataError(f"{where} has {len(values)} values for the {len(names)} columns {', '.join(names)}")
            if values:
                yield Row(where, dict(zip(names, values, strict=True)))


def _parquet(path: Path) -> Iterator[Row]:
    path.open("rb").close()  # the library's own errors about files are long
    from datasets import Dataset

    with (
        tempfile.TemporaryDirectory(prefix="atropos-parquet-") as cache,
        _as_data_error(f"cannot read {path}"),
    ):
        values = Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True).to_list()
    for number, value in enumerate(values, start=1):
        yield _row(f"{path}, row {number}", value)


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


@contextlib.contextmanager
def _as_data_error(what: str) -> Iterator[None]:
    """Turn whatever a library raises into a DataError that names the root cause."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        raise DataError(f"{what}: {' '.join(str(cause).split())[:300] or type(cause).__name__}") from error


def _row(where: str, value: object) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where} is not an object with columns: found {' '.join(repr(value).split())[:120]}")
    return Row(where, value)


# --- the hub ----------------------------------------------------------------------------------------------------------


async def hub_tables(
    dataset: str, name: str, deadline_s: float, remedy: str, splits: tuple[str, str] = (TRAIN, TEST)
) -> Tables:
    """The splits of a hub dataset to train on and to measure with; of one that has only one of them part is held out.

    Raises DataError when the hub does not give them within `deadline_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="atropos-hub-") as folder:
        log.info("Loading %s (%s) from the Hugging Face hub, at most %.0f s", dataset, name, deadline_s)
        start = time.monotonic()
        await _run_hub_child([dataset, name, folder, *splits], deadline_s, remedy)
        found = [
            [Row(f"{dataset}, {split} row {number}", row.values) for number, row in enumerate(_jsonl(path), start=1)]
            for split, path in zip(splits, (Path(folder) / f"{kind}.jsonl" for kind in (TRAIN, TEST)), strict=True)
            if path.exists()
        ]
        log.info("Loaded %d rows from %s in %.1f s", sum(map(len, found)), dataset, time.monotonic() - start)
        return Tables(dataset, found[0], found[1] if len(found) == 2 else None)


async def _run_hub_child(arguments: list[str], deadline_s: float, remedy: str) -> None:
    child, group = await start_group(
        sys.executable, str(HUB_CHILD), *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await child.communicate()
    except TimeoutError:
        raise DataError(
            f"the hub did not deliver {arguments[0]} within {deadline_s:.0f} s (hub_timeout); {remedy}"
        ) from None
    finally:
        group.signal(signal.SIGKILL)
        await child.wait()
    if child.returncode != 0:
        reason = next(
            (line for line in reversed(said.decode(errors="replace").splitlines()) if line.strip()), "no reason given"
        )
        raise DataError(f"the hub did not deliver {arguments[0]}: {reason.strip()[:300]}; {remedy}")
