"""From the bytes of a request to a typed structure, or to a refusal that names the value and where it stands.

    body ── gunzip, bounded ──▶ JSON or MessagePack ── msgspec, typed ──▶ Struct ── group_checks.py ──▶ accepted

The fast path decodes once. A body that fails is parsed a second time by Python's lenient reader, only to tell what is wrong with it.
"""

import json
import math
import re
import zlib
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
Location = tuple[str | int, ...]
_PATH_PART = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+)\]|(\[\.\.\.\])")
_MISSING = re.compile(r"missing required field `(\w+)`")
_SHOWN = 80  # characters of a refused value that are repeated to its sender


class RefusedBody(Exception):
    """A request body that is not taken: HTTP status, position, explanation and (shortened) value."""

    def __init__(self, status: int, message: str, *, location: Location = (), value: str | None = None, kind: str = "value_error") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.location = location
        self.value = value
        self.kind = kind

    def within(self, *outer: str | int) -> "RefusedBody":
        """The same refusal seen from further out, such as from a list."""
        return RefusedBody(self.status, self.message, location=(*outer, *self.location), value=self.value, kind=self.kind)

    def line(self) -> str:
        """Position and explanation, such as `scores[1]: nan is not a finite number`."""
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{_shown_key(part)}" for part in self.location).lstrip(".")
        return f"{where}: {self.message}" if where else self.message

    def reply(self) -> dict[str, Any]:
        """The JSON body of the reply, in the shape that FastAPI gives its own refusals."""
        location = [part if isinstance(part, int) else _shown_key(part) for part in self.location]
        detail = {"type": self.kind, "loc": ["body", *location], "msg": self.line()}
        return {"detail": [detail if self.value is None else {**detail, "input": self.value}]}


class BodyDecoder(Generic[T]):
    """Decodes JSON or MessagePack to one type: strictly first, then with what clients of the ancestor send taken as numbers."""

    def __init__(self, of: type[T]) -> None:
        self._type = of
        self._packed = msgspec.msgpack.Decoder(of)
        self._strict = msgspec.json.Decoder(of)
        self._lax = msgspec.json.Decoder(of, strict=False)

    def decode(self, body: bytes) -> T:
        """From JSON. Raises RefusedBody (422)."""
        return self.decode_verbatim(body)[0]

    def decode_verbatim(self, body: bytes, packed: bool = False) -> tuple[T, bool]:
        """What the body says, and whether it says it as it is: False where a number came as a boolean or, in JSON, as a string or 1.0.

        Raises RefusedBody (422).
        """
        try:
            return (self._packed if packed else self._strict).decode(body), True
        except msgspec.ValidationError as error:
            return self._unpacked_again(body, error) if packed else self._coerced(body), False
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise _not_msgpack(error) if packed else _not_json(body, error) from None

    def _coerced(self, body: bytes) -> T:
        try:
            decoded = self._lax.decode(body)
        except msgspec.ValidationError as error:
            decoded = self._counted(_leniently(body), error, body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_of_type(body, error) from None
        refuse_non_finite(msgspec.to_builtins(decoded))  # a string "nan" becomes a number here
        return decoded

    def _unpacked_again(self, body: bytes, error: msgspec.ValidationError) -> T:
        try:
            return self._counted(msgspec.msgpack.decode(body), error, None)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as unreadable:
            raise _not_msgpack(unreadable) from None

    def _counted(self, tree: Any, error: Exception, body: bytes | None) -> T:
        """From a tree, with booleans as 0 and 1 in the fields that hold numbers. `body` is its JSON, if that is what it was."""
        counted: set[str] = set()
        while True:
            _, message, location = _kind_message_and_location(error)
            field = next((part for part in reversed(location) if isinstance(part, str)), None)
            if "got `bool`" not in message or field is None or field in counted:
                raise _not_of_type(body, error) from None
            counted.add(field)
            for record in tree if isinstance(tree, list) else [tree]:
                if isinstance(record, dict) and field in record:
                    record[field] = _booleans_counted(record[field])
            try:
                return msgspec.convert(tree, self._type, strict=body is None)
            except (msgspec.ValidationError, RecursionError) as next_error:
                error = next_error


def _booleans_counted(node: Any) -> Any:
    if isinstance(node, list):
        return [_booleans_counted(inner) for inner in node]
    if isinstance(node, dict):
        return {key: _booleans_counted(value) for key, value in node.items()}
    return int(node) if isinstance(node, bool) else node


def gunzip(body: bytes, limit: int) -> bytes:
    """The decompressed bytes. Raises RefusedBody: 400 for a corrupt or truncated stream, 413 above `limit` bytes."""
    plain: list[bytes] = []
    size = 0
    while body:
        stream = zlib.decompressobj(wbits=31)
        try:
            plain.append(stream.decompress(body, limit - size + 1))
        except zlib.error:
            raise RefusedBody(400, "Invalid gzip payload") from None
        size += len(plain[-1])
        if size > limit:
            raise too_large(limit)
        if not stream.eof:
            raise RefusedBody(400, "Invalid gzip payload")
        body = stream.unused_data.lstrip(b"\0")  # members may follow one another, padded by zeros
    return b"".join(plain)


def too_large(limit: int) -> RefusedBody:
    """A body of more than `limit` bytes."""
    return RefusedBody(413, f"the body is larger than {limit} bytes; post its groups in several requests", kind="too_large")


# --- what is wrong with a body -------------------------------------------------------------------------------------------


def _not_of_type(body: bytes | None, error: Exception) -> RefusedBody:
    """`body` is None for MessagePack, whose values are not repeated."""
    tree = None if body is None else _leniently(body)
    if body is not None and tree is _UNREADABLE:
        return _not_json(body, error)
    if (found := _non_finite(tree)) is not None:
        return found
    kind, message, location = _kind_message_and_location(error)
    value = None if body is None or kind == "missing" else shown(_at(tree, location))
    return RefusedBody(422, message, location=location, value=value, kind=kind)


def _kind_message_and_location(error: Exception) -> tuple[str, str, Location]:
    message, _, path = str(error).partition(" - at `$")
    location = tuple(field or (int(index) if index else "...") for field, index, _ in _PATH_PART.findall(path))
    missing = _MISSING.search(message)
    return ("missing", message, (*location, missing[1])) if missing else ("type_error", message, location)


def _not_msgpack(error: Exception) -> RefusedBody:
    return RefusedBody(422, f"the body is not MessagePack: {error or type(error).__name__}", kind="msgpack_invalid")


def _not_json(body: bytes, error: Exception) -> RefusedBody:
    """NaN and Infinity are not JSON, but clients written in Python send them: these get the position."""
    tree = _leniently(body)
    if tree is not _UNREADABLE and (found := _non_finite(tree)) is not None:
        return found
    return RefusedBody(422, f"the body is not JSON: {error or type(error).__name__}", kind="json_invalid")


_UNREADABLE = object()


def _leniently(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return _UNREADABLE


def refuse_non_finite(tree: Any) -> None:
    if (found := _non_finite(tree)) is not None:
        raise found


def _non_finite(tree: Any) -> RefusedBody | None:
    """A refusal of the first number that is not finite. Without recursion: the sender chooses the depth."""
    open_nodes: list[tuple[Location, Any]] = [((), tree)]
    while open_nodes:
        location, node = open_nodes.pop()
        if isinstance(node, float) and not math.isfinite(node):
            return RefusedBody(422, f"{node} is not a finite number", location=location, value=str(node), kind="finite_number")
        if isinstance(node, dict):
            open_nodes += [((*location, key), value) for key, value in reversed(node.items())]
        elif isinstance(node, list):
            open_nodes += [((*location, index), value) for index, value in reversed(list(enumerate(node)))]
    return None


def _at(tree: Any, location: Location) -> Any:
    """What stands at a position; None where the position is not exact (inside a free-form object)."""
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
    return key if key.isascii() and key.isprintable() and len(key) <= _SHOWN else ascii(key)[:_SHOWN]


def shown(value: Any) -> str:
    """ASCII, short, and cheap for a large value."""
    if isinstance(value, (dict, list)):
        return f"{'object' if isinstance(value, dict) else 'array'} of {len(value)} entries"
    text = ascii(value) if not isinstance(value, int) or value.bit_length() < 256 else "an integer of more than 256 bits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
