"""What only the values of a group tell: lengths that must agree, finite numbers, ids in the vocabulary; and the bytes that are stored.

A group is decoded once, to be checked. What is stored are its bytes as they came, in the format in which it was posted, with nulls
appended to make an item of fourteen keys; a body with other fields besides is taken apart and spliced anew. /batch splices items into
batches.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from atroposlib.api.decoding import BodyDecoder, RefusedBody, refuse_non_finite, shown
from atroposlib.api.wire import PostedData, ScoredData
from atroposlib.groups import CHECKED_FIELDS, Needs, Untrainable, check

NULL = {False: b"null", True: b"\xc0"}  # JSON, MessagePack
_ITEM = [name for name in ScoredData.__struct_fields__ if name != "policy_versions"]
_CODEC: dict[bool, Any] = {False: msgspec.json, True: msgspec.msgpack}
_FIXMAP = 0x80  # MessagePack's first byte of a map of n <= 15 keys is this + n


def _raw_item(packed: bool, versions: bool) -> type[msgspec.Struct]:
    fields = [(name, msgspec.Raw, msgspec.Raw(NULL[packed])) for name in _ITEM]
    return msgspec.defstruct("Item", fields + ([("policy_versions", msgspec.Raw, msgspec.Raw(NULL[packed]))] if versions else []))


def _plain_group() -> type[PostedData]:
    """PostedData that refuses unknown fields and tells absent ones from null."""
    fields = [(field.name, field.type | UnsetType, UNSET) for field in msgspec.structs.fields(PostedData) if not field.required]
    return cast(type[PostedData], msgspec.defstruct("PlainGroup", fields, bases=(PostedData,), forbid_unknown_fields=True))


PlainGroup = _plain_group()
_OPTIONAL = [name for name in _ITEM if name not in ("tokens", "masks", "scores")]
_SPLICERS = {
    (packed, versions): _CODEC[packed].Decoder(_raw_item(packed, versions)).decode for packed in (False, True) for versions in (False, True)
}
_LIST_SPLICERS = {packed: _CODEC[packed].Decoder(list[msgspec.Raw]).decode for packed in (False, True)}
_plain_group_of = {packed: _CODEC[packed].Decoder(PlainGroup).decode for packed in (False, True)}
_plain_groups_of = {packed: _CODEC[packed].Decoder(list[PlainGroup]).decode for packed in (False, True)}  # type: ignore[valid-type]
_group: BodyDecoder[PostedData] = BodyDecoder(PostedData)
_groups: BodyDecoder[list[PostedData]] = BodyDecoder(list[PostedData])


def read_group(body: bytes, packed: bool) -> tuple[PostedData, bytes]:
    """A posted group, and the item that a trainer gets. Raises RefusedBody (422)."""
    try:
        return _with_item(_plain_group_of[packed](body), body, packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        pass  # it has fields of its own, or is refused below
    data, verbatim = _group.decode_verbatim(body, packed)
    return _with_item(data, body if verbatim else _CODEC[packed].encode(data), packed)


def read_groups(body: bytes, packed: bool) -> list[tuple[PostedData, bytes]]:
    """The groups of a posted list, and the item of each. Raises RefusedBody (422)."""
    try:
        groups, verbatim = _plain_groups_of[packed](body), True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        groups, verbatim = _groups.decode_verbatim(body, packed)
    bodies = map(bytes, _LIST_SPLICERS[packed](body)) if verbatim else map(_CODEC[packed].encode, groups)
    return [_with_item(data, each, packed) for data, each in zip(groups, bodies, strict=True)]


def _with_item(data: PostedData, body: bytes, packed: bool) -> tuple[PostedData, bytes]:
    """The group, and its bytes as an item: the keys that it lacks appended as nulls where that is all that is to do, else spliced anew."""
    item = _extended(data, body, packed) if isinstance(data, PlainGroup) else None
    for name in (*_OPTIONAL, "idempotency_key"):
        if getattr(data, name) is UNSET:
            setattr(data, name, None)
    if data.policy_versions is None:
        data.policy_versions = UNSET
    return data, item or bytes(_CODEC[packed].encode(_SPLICERS[packed, data.policy_versions is not UNSET](body)))


def _extended(data: PostedData, body: bytes, packed: bool) -> bytes | None:
    """None for a body that says more than an item may."""
    if data.idempotency_key is not UNSET or data.policy_versions is None:  # type: ignore[comparison-overlap]
        return None
    absent = tuple(name for name in _OPTIONAL if getattr(data, name) is UNSET)
    if not packed:
        return b"".join((memoryview(body)[: body.rindex(b"}")], _nulls(absent, packed), b"}"))
    keys = len(_ITEM) + (data.policy_versions is not UNSET)
    if body[0] != _FIXMAP + keys - len(absent):  # a key twice, or an unusual header
        return None
    return b"".join(((_FIXMAP + keys).to_bytes(1, "big"), memoryview(body)[1:], _nulls(absent, packed)))


@functools.cache
def _nulls(names: tuple[str, ...], packed: bool) -> bytes:
    """Further keys of an object that has some, each null."""
    if packed:
        return b"".join(msgspec.msgpack.encode(name) + NULL[packed] for name in names)
    return b"".join(b',"%s":null' % name.encode() for name in names)


def with_weight(item: bytes, packed: bool, weight: float) -> bytes:
    """The item with `group_overrides.staleness_weight`."""
    codec = _CODEC[packed]
    content = codec.decode(item)
    content["group_overrides"] = (content["group_overrides"] or {}) | {"staleness_weight": weight}
    return bytes(codec.encode(content))


def as_json(item: bytes) -> bytes:
    """A MessagePack item as JSON."""
    return msgspec.json.encode(msgspec.msgpack.decode(item))


def flaw(item: bytes, packed: bool, needs: Needs) -> str | None:
    """Why the trainer cannot use a stored group, or None."""
    try:
        check(_CODEC[packed].decode(item), needs)
    except Untrainable as error:
        return str(error)
    return None


def check_group(data: PostedData, *, packed: bool, max_sequences: int, needs: Needs) -> list[str]:
    """Raises RefusedBody (422) for what no trainer can use, or what the registered one cannot.

    Returns warnings about lengths that clients are known to get wrong.
    """
    count = len(data.tokens)
    if count == 0:
        raise RefusedBody(422, "a group needs at least one sequence", location=("tokens",), value="[]")
    if count > max_sequences:
        raise RefusedBody(422, f"a group of {count} sequences; at most {max_sequences} are taken (--max-sequences)", location=("tokens",))
    _same_count("masks", data.masks, count)
    _same_count("scores", data.scores, count)
    lengths = [len(sequence) for sequence in data.tokens]
    _same_lengths("masks", data.masks, lengths)
    for name, values in (("ref_logprobs", data.ref_logprobs), ("inference_logprobs", data.inference_logprobs)):
        if values:  # environments send [] for "none"
            _same_count(name, values, count)
            _same_lengths(name, values, lengths)
    if isinstance(data.policy_versions, list):
        _same_count("policy_versions", data.policy_versions, count)
    _check_messages(data.messages or [])
    try:
        check({name: getattr(data, name) or None for name in CHECKED_FIELDS}, needs)
    except Untrainable as error:
        raise RefusedBody(422, error.message, location=error.where, kind="untrainable") from None
    if packed:  # JSON cannot say what is refused here
        _check_numbers(data)
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
                    422, "Message must have 'role' and 'content' fields", location=("messages", index, position), value=shown(message)
                )


def _check_numbers(data: ScoredData) -> None:
    """Nothing that JSON has no word for: NaN and infinity anywhere, bytes and the like in free-form fields."""
    rows = [data.scores, *(data.advantages or []), *(data.ref_logprobs or []), *(data.inference_logprobs or [])]
    rows += [top for sequence in data.distill_logprobs or [] for top in sequence]
    if not all(math.isfinite(sum(row)) for row in rows):  # a sum may overflow, so look closer
        refuse_non_finite(msgspec.to_builtins(data))
    for name in ("messages", "generation_params", "overrides", "group_overrides", "images"):
        try:
            tree = getattr(data, name)
            msgspec.json.encode(tree)
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            raise RefusedBody(422, f"{name} has a value that JSON cannot say: {error}", location=(name,)) from None
        refuse_non_finite({name: tree})
        _refuse_bytes(name, tree)


def _refuse_bytes(name: str, tree: Any) -> None:
    open_nodes = [tree]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, dict):
            if not all(isinstance(key, str) for key in node):
                raise RefusedBody(422, f"{name} holds a key that is no string, which JSON cannot say", location=(name,))
            open_nodes += node.values()
        elif isinstance(node, list):
            open_nodes += node
        elif not isinstance(node, (str, int, float, type(None))):
            raise RefusedBody(422, f"{name} holds {type(node).__name__}, which JSON cannot say", location=(name,))


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
