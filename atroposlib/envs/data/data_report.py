"""What a look at the data found when it was loaded: on the log, and in the run's run.json.

    loaders (`dataset.py`, `problems.py`) ──▶ DataReport: records, parts, findings with counts and examples
    EnvRun.set_up ──▶ noted_data(): the reports and streams of one setup ──▶ prompts over the limit ──▶ log, run.json

A finding is a kind of record that a run should not meet in silence: empty, twice there, held out and trained on, one
whose answer cannot be graded, or whose prompt is too long.
"""

import contextlib
import fcntl
import json
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from atroposlib.envs.errors import DataError, RecordError
from atroposlib.errors import reading
from atroposlib.files import write_whole
from atroposlib.logs import get_logger

log = get_logger(__name__)

EXAMPLES = 3  # of a finding, that are kept
EXAMPLE_CHARS = 120
MOST_LEFT_OUT = 0.5  # of the records; above it, rather the wrong column or file is read

SIGNS = {
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-"),
    **dict.fromkeys(map(ord, "\u2018\u2019\u00b4`"), "'"),
    **dict.fromkeys(map(ord, "\u201c\u201d\u00ab\u00bb"), '"'),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad")),  # which nobody sees
}
# The end of a sentence or clause, and quotation marks; not the point of 3.5, the comma of 1,000, the factorial of 5!
PUNCTUATION = re.compile(r'[.,;:?"]+!*(?!\w)|(?<=\w\w)(?<![0-9])!+(?!\w)|"')
BLANKS = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")  # but for those between two numbers


def question_key(text: str) -> str:
    """Equal for questions that differ in case, blanks, punctuation or the form of their characters alone (NFKC)."""
    text = text if text.isascii() else unicodedata.normalize("NFKC", text.translate(SIGNS)).translate(SIGNS)
    return BLANKS.sub("", PUNCTUATION.sub("", text.casefold()).strip())


@dataclass
class Finding:
    """Records of one kind: what is done about them, how many there are, and the first few."""

    kind: str
    done: str
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str) -> None:
        """One more record."""
        self.count += 1
        if len(self.examples) < EXAMPLES:
            text = " ".join(example.split())
            self.examples.append(text if len(text) <= EXAMPLE_CHARS else f"{text[:EXAMPLE_CHARS]}...")

    def line(self) -> str:
        """`2 with an empty answer (left out): a.jsonl:3; a.jsonl:7`."""
        return f"{self.count} {self.kind} ({self.done}): {'; '.join(self.examples)}"


@dataclass
class DataReport:
    """Counts the records of one source, and what was found in them."""

    source: str
    records: int = 0
    train: int = 0
    held_out: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)
    looked_at: dict[str, str] = field(default_factory=dict)  # what was checked only in part, and how much of it

    def add(self, kind: str, done: str, example: str) -> None:
        """A record of `kind`."""
        self.findings.setdefault(kind, Finding(kind, done)).add(example)

    def check_left_out(self, count: int, remedy: str) -> None:
        """Raise DataError where most records had to be left out: then it is not the records that are wrong."""
        if count > MOST_LEFT_OUT * self.records:
            raise DataError(
                f"{count} of the {self.records} records of {self.source} cannot be used: {self._found}; {remedy}"
            )

    @property
    def _found(self) -> str:
        return "; ".join(finding.line() for finding in self.findings.values())

    def tell(self) -> None:
        """Log it: a line, and one for each finding."""
        parts = [f"{self.records} records, {self.train} to train on, {self.held_out} held out"]
        parts += [f"{name}: {part}" for name, part in self.looked_at.items()]
        log.info("Data of %s: %s", self.source, "; ".join(parts))
        for finding in self.findings.values():
            log.warning("Data of %s: %s", self.source, finding.line())

    def as_json(self) -> dict[str, object]:
        """For run.json."""
        return asdict(self) | {"findings": [asdict(finding) for finding in self.findings.values()]}


class Stream(Protocol):
    """An `ItemStream`."""

    items: Sequence[Any]

    def leave_out(self, places: set[int]) -> None: ...


@dataclass
class LoadedData:
    """Holds what was loaded in one setup."""

    reports: list[DataReport] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)


_loaded: ContextVar[LoadedData | None] = ContextVar("loaded", default=None)


@contextlib.contextmanager
def noted_data() -> Iterator[LoadedData]:
    """Notes what is loaded inside."""
    found = LoadedData()
    token = _loaded.set(found)
    try:
        yield found
    finally:
        _loaded.reset(token)


def note_report(report: DataReport) -> None:
    """A source was loaded; outside of a setup nobody hears of it."""
    if (loaded := _loaded.get()) is not None:
        loaded.reports.append(report)


def note_stream(stream: Stream) -> None:
    """Items are trained on."""
    if (loaded := _loaded.get()) is not None:
        loaded.streams.append(stream)


def write_reports(path: Path, env: str, reports: Sequence[DataReport]) -> None:
    """Add what an environment found to the run's record, whose other entries stay. Raises RecordError."""
    with reading(f"cannot add the data's report to {path}", RecordError), _alone_in(path.parent):
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        record.setdefault("data", {})[env] = [report.as_json() for report in reports]
        write_whole(path, json.dumps(record, indent=1).encode() + b"\n")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """While this lasts, no other environment of the run writes there."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
