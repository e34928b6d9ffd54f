"""What a client sent as JSON, as the types that were meant, or one line that says what it should have been.

Used for every request body of ours; imports neither vLLM nor torch. Names, values and errors are quoted shortened
and in ASCII.
"""

import math
import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

INT64 = range(-(2**63), 2**63)
MAX_DEPTH = 64  # as deep as vLLM takes a JSON schema
MAX_POLICY_VERSION = 2**53 - 1  # the largest that every reader of JSON takes for itself
MAX_LEASE_S = 300.0

PRINTABLE = "[ -~]{1,128}"  # a name: it is written to logs and repeated in messages
Name = Annotated[str, msgspec.Meta(pattern=rf"\A{PRINTABLE}\Z")]
Lease = Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_S)]
PolicyVersion = Annotated[int, msgspec.Meta(ge=0, le=MAX_POLICY_VERSION)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair: JSON can write one alone, UTF-8 cannot


class WrongValue(ValueError):
    """A value that is not what its name stands for; the message has name, value and what was expected."""


def printable(text: str, limit: int) -> str:
    """`text` as at most `limit` printable ASCII characters."""
    text = text[:limit].encode("ascii", "backslashreplace").decode()
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return text if len(text) < limit else text[: limit - 3] + "..."


def encodable(text: str) -> str:
    """`text` with each half of a surrogate pair, which UTF-8 cannot express, as JSON writes it, such as \\ud800."""
    return text.encode("utf-8", "backslashreplace").decode()


def all_encodable(value: object) -> Any:
    """`value` with each text in its lists and mappings `encodable`, keys too."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {all_encodable(key): all_encodable(each) for key, each in value.items()}
    return [all_encodable(each) for each in value] if isinstance(value, list | tuple) else value


def brief(value: object) -> str:
    """A client's value, to be quoted in a message."""
    return printable(reprlib.repr(value), 80)


def typed_body(what: str, body: object, kind: type[S]) -> S:
    """`body` as the structure `kind`. Raises WrongValue for a field that is missing, unknown or not as annotated."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    if not isinstance(body, dict):
        raise WrongValue(f"{what}={brief(body)}: expected an object with the fields {sorted(fields)}")
    missing = {name for name, field in fields.items() if field.required} - set(body)
    if wrong := sorted(missing | set(body) - set(fields)):
        raise WrongValue(f"{what}: missing or unknown fields {brief(wrong)}; expected {sorted(fields)}")
    return kind(
        **{
            name: (typed_body if hasattr(fields[name].type, "__struct_fields__") else typed_value)(
                f"{what}: {name}", value, fields[name].type
            )
            for name, value in body.items()
        }
    )


def typed_value(name: str, value: object, expected: object) -> Any:
    """`value` as `expected`, with whole floats taken as integers where those are wanted. Raises WrongValue."""
    if (fault := _fault(value)) is not None:
        raise WrongValue(f"{name}={brief(value)}: {fault}")
    try:
        return _convert(value, expected)
    except (
        Exception
    ) as error:  # msgspec's, or the verdict of a structure of vLLM's, which is not a ValueError in every release
        raise WrongValue(f"{name}={brief(value)}: {printable(str(error), 500)}") from error


def _convert(value: object, expected: object) -> object:
    try:
        return msgspec.convert(value, expected, str_keys=True)
    except msgspec.ValidationError:
        return msgspec.convert(_with_whole_floats_as_integers(value), expected, str_keys=True)


def _with_whole_floats_as_integers(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and int(value) in INT64:
        return int(value)
    if isinstance(value, list):
        return [_with_whole_floats_as_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_whole_floats_as_integers(item) for key, item in value.items()}
    return value


def _fault(value: object, depth: int = 0) -> str | None:
    """Return what in `value` neither MessagePack nor any of our types can hold, whatever its type should be."""
    if depth > MAX_DEPTH:
        return f"expected at most {MAX_DEPTH} levels of nesting"
    if isinstance(value, float) and not math.isfinite(value):
        return f"expected finite numbers, got {value}"
    if isinstance(value, int) and value not in INT64:
        return f"expected integers of 64 bits, got {brief(value)}"
    if isinstance(value, str) and not value.isascii() and (bad := _SURROGATE.search(value)) is not None:
        return f"expected Unicode text, got the lone surrogate {bad[0]!a}"
    inner = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        if type(item) is int and item in INT64:  # a prompt has many of them
            continue
        if (fault := _fault(item, depth + 1)) is not None:
            return fault
    return None
