"""What `atropos scale` asks of a run's launcher, and what the launcher answers: two files beside the run's records.

.scale          the command writes how many servers there are to be
.scale-answer   the launcher writes what it has done about it, line by line, until it is done
"""

import secrets
from typing import TypeVar

import msgspec

from atropos_launcher.services.records import ForeignRecord, Records

T = TypeVar("T")
REQUEST, ANSWER = ".scale", ".scale-answer"


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How many vLLM servers a run is to have."""

    id: str
    vllm: int

    @classmethod
    def of(cls, vllm: int) -> "ScaleRequest":
        """Make a request that differs from every earlier one."""
        return cls(secrets.token_hex(8), vllm)


class ScaleAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What the launcher has done about the request of this id; `error` says why it stopped."""

    id: str
    lines: list[str] = []
    done: bool = False
    error: str = ""


def write_request(records: Records, request: ScaleRequest) -> None:
    """Ask. Raises OSError."""
    records.write_file(REQUEST, msgspec.json.encode(request))


def write_answer(records: Records, answer: ScaleAnswer) -> None:
    """Answer. Raises OSError."""
    records.write_file(ANSWER, msgspec.json.encode(answer))


def read_request(records: Records) -> ScaleRequest | None:
    """Return the last request; None where there is none. Raises ForeignRecord."""
    return _read(records, REQUEST, ScaleRequest)


def read_answer(records: Records) -> ScaleAnswer | None:
    """Return the last answer; None where there is none. Raises ForeignRecord."""
    return _read(records, ANSWER, ScaleAnswer)


def _read(records: Records, name: str, kind: type[T]) -> T | None:
    content = records.read_file(name)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ForeignRecord(records.folder / name, f"it is no {kind.__name__}") from None
