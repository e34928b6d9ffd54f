"""Posted groups: from the bytes of a body to `PostedData` and the item that a trainer gets.

    body ── split into fields ──▶ values counted ──▶ each field decoded to its type ──▶ PostedData
                                                  └── bytes of the fields, nulls for the absent ──▶ item

A body is bounded by what it would build as well as by its bytes. Only a field that fails is read again, so that
refusing costs no more than accepting. Items keep the format and the bytes in which their fields were posted. Large
bodies are read on a thread, field by field, so that the event loop waits for one field at most.
"""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Raw

from atroposlib.api.groups.decoding import (
    UNREADABLE,
    RefusedBody,
    at,
    booleans_counted,
    kind_message_and_location,
    not_finite,
    refuse_unsayable,
    shown,
    unreadable,
)
from atroposlib.groups import Location
from atroposlib.wire.batching import IF_POSTED, PostedData, ScoredData

MAX_ARRAYS = 2**20  # of numbers, of all groups of a body: about 80 bytes of memory each
MAX_VALUES = 2**19  # of any kind in the free-form fields of a body, which take as much, and longer to build
MAX_LISTED = 2**14  # groups of a list, all of which are stored in one step of the event loop
_FLOAT_BYTES = 4  # of a number as it is usually posted; in memory it takes 32
_LOOKED_AT = 1024  # numbers
SMALL_BYTES = 65_536  # of a field that is cheap to look through

T = TypeVar("T")
_CODEC: dict[bool, ModuleType] = {False: msgspec.json, True: msgspec.msgpack}
_NULL = {False: Raw(b"null"), True: Raw(b"\xc0")}
_ITEM = [name for name in ScoredData.__struct_fields__ if name not in IF_POSTED]
_REQUIRED = [field.name for field in msgspec.structs.fields(PostedData) if field.required]
_FREE = (
    "messages",
    "generation_params",
    "overrides",
    "group_overrides",
    "images",
    "finish_reasons",
    "failed",
    "routed_experts",
    "ordinal",
)
_TYPES = {field.name: field.type for field in msgspec.structs.fields(PostedData)}
_NUMBERS = frozenset(_TYPES) - {*_FREE, "idempotency_key"}
_NESTED = frozenset({"distill_token_ids", "distill_logprobs", "version_spans"})  # arrays of arrays of arrays
_FLOATS = {"scores": 1, "advantages": 2, "ref_logprobs": 2, "inference_logprobs": 2, "distill_logprobs": 3}  # depths

_BYTE = re.compile(r"\(byte (\d+)\)$")
_NOT_FINITE = re.compile(rb"-?(?:NaN|Infinity)")
_NUMBER_NAMES = {b"NaN": "nan", b"-NaN": "nan", b"Infinity": "inf", b"-Infinity": "-inf"}
_ZEROS = ((b"-Infinity", b"0"), (b"Infinity", b"0"), (b"NaN", b"0"))
_MARK = "\u2063not a finite number\u2063"  # the key of an object that stands where NaN or Infinity stood
_MARKED = msgspec.json.encode({_MARK: 0})
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ABOVE_FIXINT = bytes(range(0x80, 0x100))


def _loosely(kind: object) -> object:
    """The type with any scalar where it has numbers."""
    if get_origin(kind) is list:
        return list[_loosely(get_args(kind)[0])]  # type: ignore[misc]
    options = [option for option in get_args(kind) if get_origin(option) is list]
    return _loosely(options[0]) if options else int | float | str | bool


# every field of a posted group as its bytes; absent ones are the null of the format
_FIELDS = {
    packed: msgspec.defstruct("Fields", [(name, Raw) if name in _REQUIRED else (name, Raw, null) for name in _TYPES])
    for packed, null in _NULL.items()
}
_split_one = {packed: _CODEC[packed].Decoder(_FIELDS[packed]).decode for packed in (False, True)}
_split_list = {
    packed: _CODEC[packed].Decoder(Annotated[list[_FIELDS[packed]], Meta(max_length=MAX_LISTED)]).decode  # type: ignore
    for packed in (False, True)
}
_strict = {
    packed: {name: _CODEC[packed].Decoder(kind).decode for name, kind in _TYPES.items()} for packed in (False, True)
}
_lax = {name: msgspec.json.Decoder(kind, strict=False).decode for name, kind in _TYPES.items()}
_scalars = {
    packed: {name: _CODEC[packed].Decoder(_loosely(_TYPES[name])).decode for name in _NUMBERS}
    for packed in (False, True)
}
_rows_of = _CODEC[True].Decoder(list[Raw]).decode


def read_groups(body: bytes, packed: bool, *, in_list: bool) -> list[tuple[PostedData, bytes]]:
    """The posted group, or the groups of a posted list, each with the item that a trainer gets.

    Raises RefusedBody (422, 413).
    """
    fields, mark = _split(body, packed, (_split_list if in_list else _split_one)[packed])
    reader, groups = _Reader(len(body), packed, mark), []
    for index, one in enumerate(fields if in_list else [fields]):
        try:
            groups.append(reader.read(one))
        except RefusedBody as refusal:
            raise refusal.within(index) if in_list else refusal from None
    if mark is not None:  # it stood in a field that is not read
        raise not_finite(mark)
    return groups


def with_weight(item: bytes, packed: bool, weight: float, limit: int | None) -> bytes:
    """The item with `group_overrides.staleness_weight`, of its oldest token, and the limit from which weights fall."""
    codec = _CODEC[packed]
    content: dict[str, object] = codec.decode(item, type=dict[str, Raw])
    content["group_overrides"] = (codec.decode(content["group_overrides"]) or {}) | {
        "staleness_weight": weight,
        "staleness_limit": limit,
    }
    return bytes(codec.encode(content))


def as_json(item: bytes) -> bytes:
    """A MessagePack item as JSON, field by field."""
    return msgspec.json.encode(
        {
            name: Raw(msgspec.json.encode(msgspec.msgpack.decode(raw)))
            for name, raw in msgspec.msgpack.decode(item, type=dict[str, Raw]).items()
        }
    )


# --- fields ---------------------------------------------------------------------------------------------


def _split(body: bytes, packed: bool, split: Callable[[bytes], T]) -> tuple[T, str | None]:
    """The fields, and what stood in place of the mark if NaN or Infinity broke the JSON. Raises RefusedBody (422)."""
    mark = None
    while True:
        try:
            return split(body), mark
        except UNREADABLE as error:
            if packed or mark is not None or isinstance(error, msgspec.ValidationError):
                raise _refusal(error, body, packed) from None
            body, mark = _marked(body, error)


def _marked(body: bytes, error: Exception) -> tuple[bytes, str]:
    """The body with the mark for the NaN or Infinity that broke it, and 0 for later ones. Raises RefusedBody (422)."""
    place = _BYTE.search(str(error))
    start = int(place[1]) if place else len(body)
    start -= body[start - 1 : start] == b"-"
    match = _NOT_FINITE.match(body, start)
    if match is None:
        raise unreadable(error)
    rest = body[match.end() :]
    for word, zero in _ZEROS:
        rest = rest.replace(word, zero)
    return b"".join((body[:start], _MARKED, rest)), _NUMBER_NAMES[match[0]]


def _refusal(error: Exception, raw: bytes, packed: bool, *field: str) -> RefusedBody:
    if not isinstance(error, msgspec.ValidationError):
        return unreadable(error, packed).within(*field)
    kind, message, location = kind_message_and_location(error)
    value = None
    if kind == "type_error" and not packed and len(raw) <= SMALL_BYTES:
        with suppress(*UNREADABLE):  # there is something else wrong behind it
            value = shown(at(msgspec.json.decode(raw), location))
    return RefusedBody(422, message, location=(*field, *location), value=value, kind=kind)


class _Reader:
    def __init__(self, size: int, packed: bool, mark: str | None) -> None:
        self._packed = packed
        self._mark = mark
        self._arrays = self._values = 0
        self._may_be_many = size > min(MAX_ARRAYS, MAX_VALUES) * (1 if packed else 2)  # each takes a byte, in JSON two

    def read(self, fields: msgspec.Struct) -> tuple[PostedData, bytes]:
        null = _NULL[self._packed]
        present: dict[str, Raw] = {name: raw for name in _TYPES if (raw := getattr(fields, name)) is not null}
        if self._may_be_many:
            for name, raw in present.items():
                self._count(name, bytes(raw))
        values = {}
        for name, raw in present.items():
            values[name], present[name] = (
                self._numbers(name, raw) if name in _NUMBERS else (self._free_form(name, raw), raw)
            )
        for name in IF_POSTED:
            if values.get(name, UNSET) is None:
                del values[name]
        data = PostedData(**values)
        item = {name: present.get(name, null) for name in _ITEM}
        item |= {name: present[name] for name in IF_POSTED if name in values}
        return data, bytes(_CODEC[self._packed].encode(item))

    def _numbers(self, name: str, raw: Raw) -> tuple[Any, Raw]:
        try:
            value, coerced = _strict[self._packed][name](raw), False
        except UNREADABLE as error:
            value, coerced = self._coerced(name, raw, error), True
        if name in _FLOATS and value is not None and (self._packed or coerced):
            _refuse_non_finite((name,), value)
        return value, Raw(_CODEC[self._packed].encode(value)) if coerced else raw

    def _coerced(self, name: str, raw: Raw, error: Exception) -> object:
        if not self._packed and ("got `str`" in str(error) or "got `float`" in str(error)):
            try:
                return _lax[name](raw)
            except UNREADABLE as still:
                error = still
        if "got `bool`" in str(error):
            try:
                return msgspec.convert(
                    booleans_counted(_scalars[self._packed][name](raw)), _TYPES[name], strict=self._packed
                )
            except UNREADABLE as still:
                error = still
        raise self._refusal(name, bytes(raw), error) from None

    def _free_form(self, name: str, raw: Raw) -> Any:
        try:
            value = _strict[self._packed][name](raw)
            refuse_unsayable(value, None if self._mark is None else _MARK)
        except RefusedBody as refusal:
            found = not_finite(str(self._mark), refusal.location) if refusal.message == _MARK else refusal
            raise found.within(name) from None
        except UNREADABLE as error:
            raise self._refusal(name, bytes(raw), error) from None
        return value

    def _refusal(self, name: str, raw: bytes, error: Exception) -> RefusedBody:
        if self._mark is not None and _MARKED in raw and "got `object`" in str(error):
            return not_finite(self._mark, (name, *kind_message_and_location(error)[2]))
        return _refusal(error, raw, self._packed, name)

    def _count(self, name: str, raw: bytes) -> None:
        """Raises RefusedBody (413) before a body is built that is much larger than its bytes."""
        if name in _NUMBERS:
            left = MAX_ARRAYS - self._arrays
            self._arrays += _packed_arrays(name, raw, left) if self._packed else raw.count(b"[")
            if name in _FLOATS and self._arrays <= MAX_ARRAYS:
                numbers = _packed_numbers(raw, _FLOATS[name]) if self._packed else raw.count(b",")
                self._arrays += max(0, numbers - len(raw) // _FLOAT_BYTES)
        else:
            left = MAX_VALUES - self._values
            self._values += _packed_values(raw, left) if self._packed else _json_values(raw, left)
        if self._arrays > MAX_ARRAYS or self._values > MAX_VALUES:
            limit = f"{MAX_ARRAYS} arrays and short numbers" if name in _NUMBERS else f"{MAX_VALUES} free-form values"
            raise RefusedBody(
                413,
                f"the body has more than {limit}; post its groups in several requests",
                location=(name,),
                kind="too_large",
            )


def _refuse_non_finite(location: Location, values: list[Any]) -> None:
    """Raises RefusedBody (422) for the first number that is not finite. Sums tell where to look; they may overflow."""
    if values and isinstance(values[0], list):
        for index, inner in enumerate(values):
            _refuse_non_finite((*location, index), inner)
    elif not math.isfinite(sum(values)):
        for start in range(0, len(values), _LOOKED_AT):
            part = values[start : start + _LOOKED_AT]
            if not math.isfinite(sum(part)):
                for index, number in enumerate(part, start):
                    if not math.isfinite(number):
                        raise not_finite(str(number), (*location, index))


# --- how much a field would build -----------------------------------------------------------------------


def _json_values(raw: bytes, limit: int) -> int:
    """At least as many as the values in it, and above `limit` at most twice as many."""
    marks = _marks(raw)
    if marks > limit:  # those inside of strings are none
        strings = (raw.count(b'"') - raw.count(b'\\"')) // 2  # or more
        if strings > limit:
            return strings
        marks -= sum(_marks(string[0]) for string in _STRING.finditer(raw))
    return marks


def _marks(raw: bytes) -> int:
    return len(raw) - len(raw.translate(None, b",:[{"))


def _packed_values(raw: bytes, limit: int) -> int:
    """Count values of MessagePack, as `_json_values` does of JSON. Numbers of one byte count only in a large field."""
    if len(raw) <= SMALL_BYTES:
        return len(raw) - len(raw.translate(None, _ABOVE_FIXINT))
    count = place = 0
    while place < len(raw) and count <= limit:
        size, digits = _TOKENS[raw[place]]
        place += size + (int.from_bytes(raw[place + 1 : place + 1 + digits], "big") if digits else 0)
        count += 1
    return count


# For each first byte of a MessagePack value: its size without counted content, and the bytes of that count.
_TOKENS = [(1, 0)] * 0xA0 + [(1 + length, 0) for length in range(0x20)] + [(1, 0)] * 4
_TOKENS += [(2, 1), (3, 2), (5, 4), (3, 1), (4, 2), (6, 4)]  # from 0xC4: bytes and extensions with a count
_TOKENS += [(size, 0) for size in (5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18)]  # from 0xCA: numbers, extensions
_TOKENS += [(2, 1), (3, 2), (5, 4)]  # from 0xD9: strings
_TOKENS += [(size, 0) for size in (3, 5, 3, 5)] + [(1, 0)] * 0x20  # from 0xDC: heads of arrays and objects; small ints


def _packed_arrays(name: str, raw: bytes, limit: int) -> int:
    """Arrays in a field of numbers, by what their heads say."""
    outer = _entries(raw)
    if name not in _NESTED or outer > limit or not outer:
        return outer
    try:
        return outer + sum(map(_entries, map(bytes, _rows_of(raw))))
    except UNREADABLE as error:
        raise unreadable(error, packed=True) from None


def _packed_numbers(raw: bytes | memoryview, depth: int) -> int:
    """Numbers in arrays that are nested so deep, by what the heads of the innermost say."""
    if depth == 1 or not _entries(raw):
        return _entries(raw)
    return sum(_packed_numbers(memoryview(row), depth - 1) for row in _rows_of(raw))


def _entries(raw: bytes | memoryview) -> int:
    """Return the length of the array that begins here; 0 where none does."""
    first = raw[0]
    if first == 0xDC or first == 0xDD:
        return int.from_bytes(raw[1 : 3 if first == 0xDC else 5], "big")
    return first - 0x90 if 0x90 <= first < 0xA0 else 0
