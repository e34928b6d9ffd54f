"""From the bytes of a request to a checked structure, or to a refusal that names the value and where it stands.

    body ── gunzip, bounded ──▶ JSON ── msgspec, typed ──▶ Struct ── lengths, finiteness ──▶ accepted

The fast path decodes once. A body that fails is parsed a second time by Python's lenient reader, only to tell what is wrong with it.
"""

import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from atroposlib.api.wire import ScoredData

T = TypeVar("T")
Location = tuple[str | int, ...]
_PATH_PART = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+)\]|(\[\.\.\.\])")
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
    """Decodes JSON to one type: strictly first, then with numeric strings and integral floats taken as numbers."""

    def __init__(self, of: type[T]) -> None:
        self._strict = msgspec.json.Decoder(of)
        self._lax = msgspec.json.Decoder(of, strict=False)

    def decode(self, body: bytes) -> T:
        """Raises RefusedBody (422)."""
        try:
            return self._strict.decode(body)
        except msgspec.ValidationError:
            return self._coerced(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_json(body, error) from None

    def _coerced(self, body: bytes) -> T:
        try:
            decoded = self._lax.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_of_type(body, error) from None
        _refuse_non_finite(msgspec.to_builtins(decoded))  # a string "nan" becomes a number here
        return decoded


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


# --- what only the values tell ------------------------------------------------------------------------------------------


def check_group(data: ScoredData) -> list[str]:
    """Raises RefusedBody (422) for lengths that disagree; returns warnings about those that clients are known to get wrong."""
    count = len(data.tokens)
    if count == 0:
        raise RefusedBody(422, "a group needs at least one sequence", location=("tokens",), value="[]")
    _same_count("masks", data.masks, count)
    _same_count("scores", data.scores, count)
    lengths = [len(sequence) for sequence in data.tokens]
    _same_lengths("masks", data.masks, lengths)
    for name, values in (("ref_logprobs", data.ref_logprobs), ("inference_logprobs", data.inference_logprobs)):
        if values:  # environments send [] for "none"
            _same_count(name, values, count)
            _same_lengths(name, values, lengths)
    if data.policy_versions is None:
        data.policy_versions = msgspec.UNSET
    elif data.policy_versions is not msgspec.UNSET:
        _same_count("policy_versions", data.policy_versions, count)
    _check_messages(data.messages or [])
    return list(_suspicions(data, lengths))


def _same_count(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise RefusedBody(422, f"{len(values)} entries for {count} sequences in tokens", location=(name,), kind="unequal_lengths")


def _same_lengths(name: str, values: Sequence[Sequence[Any]], lengths: Sequence[int]) -> None:
    for index, (inner, length) in enumerate(zip(values, lengths, strict=True)):
        if len(inner) != length:
            raise RefusedBody(
                422, f"{len(inner)} entries for the {length} tokens of this sequence", location=(name, index), kind="unequal_lengths"
            )


def _check_messages(conversations: Sequence[Sequence[dict[str, Any]]]) -> None:
    for index, conversation in enumerate(conversations):
        for position, message in enumerate(conversation):
            if "role" not in message or "content" not in message:
                raise RefusedBody(
                    422, "Message must have 'role' and 'content' fields", location=("messages", index, position), value=_shown(message)
                )


def _suspicions(data: ScoredData, lengths: Sequence[int]) -> Iterator[str]:
    """Optional fields that do not agree with tokens: passed on, since trainers may not read them."""
    if data.advantages and [len(inner) for inner in data.advantages] != lengths:
        yield "advantages do not have one value a token"
    for name, values in (
        ("messages", data.messages),
        ("overrides", data.overrides),
        ("distill_token_ids", data.distill_token_ids),
        ("distill_logprobs", data.distill_logprobs),
    ):
        if values and len(values) != len(lengths):
            yield f"{name} do not have one entry a sequence"


# --- what is wrong with a body -------------------------------------------------------------------------------------------


def _not_of_type(body: bytes, error: Exception) -> RefusedBody:
    tree = _leniently(body)
    if tree is _UNREADABLE:
        return _not_json(body, error)
    if (found := _non_finite(tree)) is not None:
        return found
    message, _, path = str(error).partition(" - at `$")
    location = tuple(field or (int(index) if index else "...") for field, index, _ in _PATH_PART.findall(path))
    return RefusedBody(422, message, location=location, value=_shown(_at(tree, location)), kind="type_error")


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


def _refuse_non_finite(tree: Any) -> None:
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


def _shown(value: Any) -> str:
    """ASCII, short, and cheap for a large value."""
    if isinstance(value, (dict, list)):
        return f"{'object' if isinstance(value, dict) else 'array'} of {len(value)} entries"
    text = ascii(value) if not isinstance(value, int) or value.bit_length() < 256 else "an integer of more than 256 bits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
