"""notes.json of a run directory: a note and tags that a person gives a run. It is all that the window writes."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from atroposlib.files import write_whole
from atroposlib.view.run_data.files import note, read_small, reason_of

FILE = "notes.json"
MAX_BYTES = 16 << 10  # of the file, and of a request
MAX_NOTE, MAX_TAGS, MAX_TAG = 2000, 20, 40  # characters, tags, characters

Tag = Annotated[str, Meta(min_length=1, max_length=MAX_TAG)]


class Notes(Struct, forbid_unknown_fields=True):
    """What a person says of a run."""

    note: Annotated[str, Meta(max_length=MAX_NOTE)] = ""
    tags: Annotated[list[Tag], Meta(max_length=MAX_TAGS)] = []


def read_notes(run: Path, problems: list[str]) -> dict[str, object]:
    """Return the notes of a run, empty without a file; why it cannot be read is a problem."""
    found = Notes()
    try:
        found = parsed(read_small(run / FILE, MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RecursionError) as error:
        note(problems, f"{FILE} cannot be read: {reason_of(error)}")
    return {"note": found.note, "tags": found.tags}


def parsed(content: bytes) -> Notes:
    """The notes that JSON says. Raises ValueError, whose message names what is too long or of another kind."""
    found = msgspec.json.decode(content, type=Notes)
    if not all(text.isprintable() for text in (found.note.replace("\n", ""), *found.tags)):
        raise ValueError("notes and tags have printable characters only")
    found.tags = list(dict.fromkeys(found.tags))
    return found


def write_notes(run: Path, notes: Notes) -> None:
    """Replace notes.json, whole or not at all. Raises OSError, NotRegularFile."""
    write_whole(run / FILE, msgspec.json.encode(notes) + b"\n")
