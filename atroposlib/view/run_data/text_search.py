"""Finds a text in the rows of a segment: in messages, references and reasons, not in token ids or field names.

The bytes of the file are searched first. Only rows that contain the text somewhere are decoded. Case is ignored for
ASCII letters.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from atroposlib.view.run_data.files import opened_text, read_at
from atroposlib.view.run_data.jsonl_index import Segment

MAX_DEPTH = 20


class Texts(msgspec.Struct):
    """Holds what is searched of a row."""

    messages: object = None
    reference: object = None
    dropped: object = None


_TEXTS = msgspec.json.Decoder(Texts)


class Needle:
    """A text to search for, and how JSON may spell it."""

    def __init__(self, text: str) -> None:
        self.text = text.lower()
        spellings = (json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        self._bytes = {spelling.encode(errors="replace").lower() for spelling in spellings}

    def may_be_in(self, data: bytes) -> bool:
        """Return whether JSON text that is in lower case may hold it."""
        return any(spelling in data for spelling in self._bytes)

    def is_in(self, line: bytes) -> bool:
        """Return whether a row holds the text."""
        if not self.may_be_in(line.lower()):
            return False
        try:
            row = _TEXTS.decode(line)
        except (ValueError, RecursionError):
            return False
        return any(
            self.text in text.lower()
            for value in (row.messages, row.reference, row.dropped)
            for text in _strings(value)
        )


def search(path: Path, segment: Segment, positions: NDArray[np.intp], needle: Needle) -> NDArray[np.intp]:
    """Return the positions whose rows hold the text; none if the file is gone."""
    try:
        with opened_text(path) as text:
            data = read_at(text, segment.start, segment.end - segment.start)
    except OSError:
        return positions[:0]
    if not needle.may_be_in(data.lower()):
        return positions[:0]
    entries = segment.rows[positions]
    starts = (entries["offset"] - np.uint64(segment.start)).tolist()
    places = zip(positions.tolist(), starts, entries["length"].tolist(), strict=True)
    found = [position for position, start, length in places if needle.is_in(data[start : start + length])]
    return np.array(found, np.intp)


def _strings(value: object, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
    elif depth < MAX_DEPTH:
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for child in children:
            yield from _strings(child, depth + 1)
