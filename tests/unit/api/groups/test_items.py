"""From the bytes of a group to the item that a trainer gets, whatever the group leaves out, says as null, or says
besides.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.api.groups.posted_groups import read_groups
from tests.unit.api.support import ITEM_KEYS, group, read_group

CODECS: dict[bool, Any] = {False: msgspec.json, True: msgspec.msgpack}
OPTIONAL = {
    "advantages": [[0.5, 1.0]],
    "ref_logprobs": [],
    "messages": [[{"role": "user", "content": '},"overrides":null'}]],
    "generation_params": {"temperature": 1.0},
    "inference_logprobs": [[1.0, -0.5]],
    "overrides": [{}],
    "group_overrides": {"a": True},
    "images": ["}"],
    "env_id": 3,
    "distill_token_ids": [[[1], [2]]],
    "distill_logprobs": [[[-1.0], [-2.0]]],
}
BESIDES = {"extra": [1, {"b": None}], "idempotency_key": "key"}
# absent, null, or there: these are in an item only if they were posted
NEWER: dict[str, Any] = {
    "policy_versions": [[1, 2]],
    "version_spans": [[[0, 1], [1, 2]]],
    "rollouts": [0],
    "finish_reasons": ["length"],
    "failed": {"timeout": 2},
}


@given(
    st.booleans(),
    st.dictionaries(st.sampled_from(sorted(OPTIONAL)), st.booleans()),
    st.dictionaries(st.sampled_from(sorted(NEWER)), st.booleans()),
    st.sets(st.sampled_from(sorted(BESIDES))),
)
def test_an_item_has_its_keys_once_each(
    packed: bool, given_fields: dict[str, bool], newer: dict[str, bool], besides: set[str]
) -> None:
    said = {name: OPTIONAL[name] if is_set else None for name, is_set in given_fields.items()}
    said |= {name: NEWER[name] if is_set else None for name, is_set in newer.items()}
    posted = group(1, 5, **said, **{name: BESIDES[name] for name in besides})
    body = CODECS[packed].encode(posted)
    expected = {name: posted.get(name) for name in ITEM_KEYS} | {name: NEWER[name] for name in newer if newer[name]}
    (_, listed) = read_groups(CODECS[packed].encode([posted, group(1)]), packed, in_list=True)[0]
    data, item = read_group(body, packed)
    for each in (item, listed):
        assert CODECS[packed].decode(each) == expected
        assert len(CODECS[packed].decode(each, type=dict[str, Any])) == len(expected)
        keys = each.count(b"ref_logprobs")  # a key that stood there twice would be two
        assert keys == 1
    assert data.env_id == posted.get("env_id")
    assert data.messages == posted.get("messages")
    assert data.idempotency_key == posted.get("idempotency_key")


@pytest.mark.parametrize("around", [(b" ", b""), (b"\n\t", b" \r\n"), (b"", b"\n")])
def test_space_around_a_group_is_no_part_of_its_item(around: tuple[bytes, bytes]) -> None:
    before, after = around
    _, item = read_group(before + msgspec.json.encode(group(1)) + after, packed=False)
    assert msgspec.json.decode(item) == {name: group(1).get(name) for name in ITEM_KEYS}
    (_, listed), _ = read_groups(
        b"[" + before + msgspec.json.encode(group(1)) + after + b"," + msgspec.json.encode(group(1)) + b"]",
        False,
        in_list=True,
    )
    assert msgspec.json.decode(listed) == msgspec.json.decode(item)


def test_a_packed_group_with_an_unusual_header_or_a_key_twice_becomes_a_plain_item() -> None:
    plain = msgspec.msgpack.encode(group(1))
    map16 = b"\xde\x00\x03" + plain[1:]
    twice = bytes([plain[0] + 1]) + plain[1:] + msgspec.msgpack.encode("scores") + msgspec.msgpack.encode([0.25])
    for body, score in ((map16, 0.5), (twice, 0.25)):
        _, item = read_group(body, packed=True)
        assert item[0] == 0x80 + len(ITEM_KEYS)
        assert msgspec.msgpack.decode(item) == {name: group(1, scores=[score]).get(name) for name in ITEM_KEYS}
