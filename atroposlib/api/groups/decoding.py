"""From the bytes of a request to a typed structure, or to a refusal that names the value and where it stands.

    body ── gunzip, bounded ──▶ JSON or MessagePack ── msgspec, typed ──▶ Struct ── group_checks.py ──▶ accepted

Bodies of groups may be large and are read in posted_groups.py; all others are small JSON, read here by `decode_body`.
"""

import json
import math
import re
import zlib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from atroposlib import groups
from atroposlib.config import check_name
from atroposlib.groups import SHOWN, Location

T = TypeVar("T")
_PATH_PART = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+)\]|(\[\.\.\.\])")
_MISSING = re.compile(r"missing required field `(\w+)`")
MAX_DEPTH = 128  # arrays and objects within one another, far from where any reader of JSON gives up
MAX_GZIP_MEMBERS = 20_000  # 64 KiB each, as bgzip writes them, are more than a body may hold
_ZEROS = re.compile(rb"\0*")
_GZIP_STEP = 512  # compressed bytes of a member that are tried first


class RefusedBody(Exception):
    """A request body that is refused: HTTP status, position, explanation and (shortened) value."""

    def __init__(
        self, status: int, message: str, *, location: Location = (), value: str | None = None, kind: str = "value_error"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.location = location
        self.value = value
        self.kind = kind

    def within(self, *outer: str | int) -> "RefusedBody":
        """The same refusal, with its position in the enclosing value, such as a list."""
        return RefusedBody(
            self.status, self.message, location=(*outer, *self.location), value=self.value, kind=self.kind
        )

    def line(self) -> str:
        """Position and explanation, such as `scores[1]: nan is not a finite number`."""
        where = "".join(
            f"[{part}]" if isinstance(part, int) else f".{_shown_key(part)}" for part in self.location
        ).lstrip(".")
        return f"{where}: {self.message}" if where else self.message

    def reply(self) -> dict[str, Any]:
        """The JSON body of the reply, in the shape that FastAPI gives its own refusals."""
        location = [part if isinstance(part, int) else _shown_key(part) for part in self.location]
        detail = {"type": self.kind, "loc": ["body", *location], "msg": self.line()}
        return {"detail": [detail if self.value is None else {**detail, "input": self.value}]}


def decode_body(body: bytes, kind: type[T]) -> T:
    """A small JSON body as a record: strictly first, then accepting as numbers what older clients send.

    Raises RefusedBody (422).
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        return _coerced(body, kind)
    except UNREADABLE as error:
        raise _refusal(body, error) from None


def _coerced(body: bytes, kind: type[T]) -> T:
    """With strings as numbers, and booleans as 0 and 1 in the fields that hold numbers."""
    try:
        tree = msgspec.json.decode(body)  # all of it: the error may be in front of half a surrogate pair
    except UNREADABLE as error:
        raise _refusal(body, error) from None
    uncounted = set(tree) if isinstance(tree, dict) else set()
    while True:
        try:
            decoded = msgspec.convert(tree, kind, strict=False)
            break
        except msgspec.ValidationError as error:
            _, message, location = kind_message_and_location(error)
            field = next((part for part in reversed(location) if isinstance(part, str)), None)
            if "got `bool`" not in message or field not in uncounted:
                raise _refusal(body, error) from None
            uncounted.remove(field)
            refuse_unsayable({field: tree[field]})  # nor what nests too deep
            tree[field] = booleans_counted(tree[field])
    refuse_unsayable(msgspec.to_builtins(decoded))  # a string "nan" becomes a number here
    return decoded


def booleans_counted(node: object) -> object:
    """The value with 0 and 1 in place of booleans. Raises RecursionError if it nests too deep."""
    if isinstance(node, list):
        return [booleans_counted(inner) for inner in node] if _MAY_HOLD_BOOLEANS & set(map(type, node)) else node
    if isinstance(node, dict):
        return {key: booleans_counted(value) for key, value in node.items()}
    return int(node) if isinstance(node, bool) else node


def gunzip(body: bytes, limit: int) -> bytes:
    """The decompressed bytes. Raises RefusedBody: 400 for a corrupt or truncated stream, 413 above `limit` bytes.

    Each member is fed in steps that double: zlib copies the bytes behind its end, which are then no more than its own.
    """
    view, start = memoryview(body), 0
    plain: list[bytes] = []
    size = members = 0
    while start < len(body):
        members += 1
        stream, step = zlib.decompressobj(wbits=31), _GZIP_STEP
        while not stream.eof:
            if start == len(body) or members > MAX_GZIP_MEMBERS:
                raise RefusedBody(400, "Invalid gzip payload")
            try:
                plain.append(stream.decompress(view[start : start + step], limit - size + 1))
            except zlib.error:
                raise RefusedBody(400, "Invalid gzip payload") from None
            size += len(plain[-1])
            if size > limit:
                raise too_large(limit)
            start = min(len(body), start + step)
            step *= 2
        start -= len(stream.unused_data)
        start = _ZEROS.match(body, start).end()  # type: ignore[union-attr]  # members may be padded by zeros
    return b"".join(plain)


def check_names(**names: str) -> None:
    """Names by their fields, checked where they come in: a journal may hold older ones. Raises RefusedBody (422)."""
    for field, name in names.items():
        try:
            check_name(name)
        except ValueError as error:
            raise RefusedBody(422, str(error), location=(field,), value=shown(name)) from None


def too_large(limit: int) -> RefusedBody:
    """The refusal of a body of more than `limit` bytes."""
    return RefusedBody(
        413, f"the body is larger than {limit} bytes; post its groups in several requests", kind="too_large"
    )


# --- what is wrong with a body --------------------------------------------------------------------------------------

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)  # what msgspec raises


def _refusal(body: bytes, error: Exception) -> RefusedBody:
    """NaN and Infinity are not JSON, but clients written in Python send them: these get the position."""
    try:
        tree = json.loads(body)
        refuse_unsayable(tree)
    except RefusedBody as found:
        return found
    except (ValueError, RecursionError):
        return unreadable(error)
    if not isinstance(error, msgspec.ValidationError):
        return unreadable(error)
    kind, message, location = kind_message_and_location(error)
    value = None if kind == "missing" else shown(at(tree, location))
    return RefusedBody(422, message, location=location, value=value, kind=kind)


def kind_message_and_location(error: Exception) -> tuple[str, str, Location]:
    """The kind, the text and the position of msgspec's error."""
    message, _, path = str(error).partition(" - at `$")
    location = tuple(field or (int(index) if index else "...") for field, index, _ in _PATH_PART.findall(path))
    missing = _MISSING.search(message)
    if missing:
        return "missing", message, (*location, missing[1])
    if message == "Number out of range":
        return "finite_number", "a number that large is not finite", location
    return "type_error", message or type(error).__name__, location


def unreadable(error: Exception, packed: bool = False) -> RefusedBody:
    """The refusal of a body that is not MessagePack (`packed`) or JSON: it ends too early, or has meaningless bytes."""
    name, kind = ("MessagePack", "msgpack_invalid") if packed else ("JSON", "json_invalid")
    return RefusedBody(422, f"the body is not {name}: {error or type(error).__name__}", kind=kind)


_MAY_HOLD_BOOLEANS = frozenset({bool, list, dict})
_SAYABLE = frozenset({str, int, bool, type(None)})  # beside arrays, objects and finite floats


def not_finite(number: str, location: Location = ()) -> RefusedBody:
    """The refusal of `number`: nan, inf or -inf."""
    return RefusedBody(422, f"{number} is not a finite number", location=location, value=number, kind="finite_number")


def refuse_unsayable(tree: object, mark: str | None = None) -> None:
    """Raises RefusedBody (422) for the first value that JSON cannot say, that nests too deep, or has a key `mark`.

    Without recursion, since the sender chooses the depth, and without memory for each value.
    """
    path: list[Any] = []
    levels: list[Iterator[tuple[Any, Any]]] = [iter([(None, tree)])]
    while levels:
        for key, node in levels[-1]:
            kind = type(node)
            if kind is dict or kind is list or kind is tuple:
                path.append(key)
                if kind is dict and not all(type(name) is str and name != mark for name in node):
                    raise RefusedBody(
                        422, mark or "a key is not a string, which JSON cannot express", location=tuple(path[1:])
                    )
                if len(path) > MAX_DEPTH:
                    raise RefusedBody(
                        422, f"arrays and objects are nested deeper than {MAX_DEPTH}", location=tuple(path[1:9])
                    )
                levels.append(iter(node.items() if kind is dict else enumerate(node)))
                break
            if kind is float:
                if not math.isfinite(node):
                    raise not_finite(str(node), (*path, key)[1:])
            elif kind not in _SAYABLE:
                raise RefusedBody(422, f"{kind.__name__} cannot be expressed in JSON", location=(*path, key)[1:])
        else:
            levels.pop()
            if path:
                path.pop()


def at(tree: object, location: Location) -> Any:
    """Return what stands at a position; None where the position is not exact (inside a free-form object)."""
    for part in location:
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree


def _shown_key(key: str) -> str:
    """A field name as it is; a name that its sender chose is shortened to printable ASCII."""
    return key if key.isascii() and key.isprintable() and len(key) <= SHOWN else ascii(key)[:SHOWN]


def shown(value: object) -> str:
    """ASCII, short, and cheap for a large value."""
    if isinstance(value, (dict, list)):
        return f"{'object' if isinstance(value, dict) else 'array'} of {len(value)} entries"
    return groups.shown(value)
