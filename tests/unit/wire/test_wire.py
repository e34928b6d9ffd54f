from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.wire.bridge import (
    ALIGNMENT,
    AdapterOffer,
    Announced,
    BroadcastOffer,
    Manifest,
    ManifestMismatch,
    ReloadOffer,
    SingleCopyOffer,
    WireTensor,
    compare,
    lay_out,
    parse_offer,
)
from atroposlib.wire.typed import WrongValue

PARTS: list[Any] = [
    ("embed.weight", [("embed.weight", (10, 4), "float32")]),
    ("qkv.weight", [("q.weight", (6, 4), "float32"), ("k.weight", (3, 4), "float32"), ("v.weight", (3, 4), "float32")]),
    ("norm.weight", [("norm.weight", (4,), "float32")]),
]


def manifest() -> Manifest:
    tensors = tuple(lay_out(PARTS))
    return Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)


def shapes() -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in manifest().tensors}


def test_parts_of_a_fused_parameter_touch_and_parameters_are_aligned() -> None:
    embed, q, k, v, norm = manifest().tensors
    assert (k.offset, v.offset) == (q.offset + q.nbytes, k.offset + k.nbytes)
    assert all(tensor.offset % ALIGNMENT == 0 for tensor in (embed, q, norm))


def test_manifest_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(manifest()), type=Manifest) == manifest()


sizes = st.lists(st.integers(1, 300), min_size=1, max_size=30)


def test_a_bucket_is_filled_to_its_last_byte() -> None:
    tensors = tuple(lay_out([("p", [(name, (4,), "float32") for name in "abc"])]))
    manifest = Manifest("m", 1, 48, tensors)
    assert [len(bucket.tensors) for bucket in manifest.buckets(32)] == [2, 1]
    assert [len(bucket.tensors) for bucket in manifest.buckets(31)] == [1, 1, 1]


@given(sizes, st.integers(1, 5000))
def test_buckets_hold_every_tensor_once_in_order_within_the_limit(lengths: list[int], limit: int) -> None:
    tensors = tuple(lay_out([(f"p{i}", [(f"p{i}", (length,), "float32")]) for i, length in enumerate(lengths)]))
    buckets = Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors).buckets(limit)
    assert [tensor for bucket in buckets for tensor in bucket.tensors] == list(tensors)
    assert all(bucket.end - bucket.start <= limit or len(bucket.tensors) == 1 for bucket in buckets)
    assert all(
        bucket.start <= tensor.offset and tensor.offset + tensor.nbytes <= bucket.end
        for bucket in buckets
        for tensor in bucket.tensors
    )


def test_same_model_compares_equal() -> None:
    compare(manifest(), shapes())


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"q.weight": None}, "vLLM holds q.weight [6, 4], the trainer does not (4/5 tensors agree"),
        ({"q.weight": (8, 4)}, "q.weight: vLLM holds [6, 4], the trainer [8, 4]"),
        ({"lm_head.weight": (10, 4)}, "the trainer holds lm_head.weight [10, 4], vLLM does not"),
    ],
)
def test_first_difference_is_named(change: dict[str, tuple[int, ...] | None], fragment: str) -> None:
    trainer = {name: shape for name, shape in {**shapes(), **change}.items() if shape is not None}
    with pytest.raises(ManifestMismatch) as caught:
        compare(manifest(), trainer)
    assert fragment in str(caught.value)


def test_digest_changes_with_shape_dtype_order_and_offset() -> None:
    a, b = WireTensor("a", (2,), "float32", "a", 0), WireTensor("b", (2,), "float32", "b", 256)
    variants = [
        (a, b),
        (b, a),
        (a, WireTensor("b", (3,), "float32", "b", 256)),
        (a, WireTensor("b", (2,), "bfloat16", "b", 256)),
        (a, WireTensor("b", (2,), "float32", "b", 512)),
    ]
    assert len({Manifest("m", 1, 264, variant).digest() for variant in variants}) == len(variants)


OFFER: dict[str, Any] = {
    "session": "s",
    "address": "127.0.0.1",
    "port": 1,
    "world_size": 2,
    "backend": "gloo",
    "manifest_digest": "d",
    "bucket_bytes": 1,
    "timeout_s": 1.0,
    "lease_s": 1.0,
    "trainer": "h:1",
}


def test_a_complete_offer_is_accepted() -> None:
    assert parse_offer(OFFER, BroadcastOffer) == parse_offer({**OFFER, "kind": "broadcast"}, SingleCopyOffer)


HERE: dict[str, Any] = {"boot_id": "b", "pid_namespace": 1, "pid": 1, "started": 1}
ATTACH = {"session": "s", "manifest_digest": "d", "lease_s": 1.0, "trainer": "h:1", "process": HERE}
RELOAD = {"session": "s", "manifest_digest": "d", "lease_s": 1.0, "trainer": "h:1", "timeout_s": 60.0}
ADAPTER = {"session": "s", "trainer": "h:1", "lease_s": 1.0, "model": "m", "rank": 8, "process": HERE}
NO_NAME: list[Any] = ["", "a" * 129, "a\n", "\x1b[2J", "\u202e", 5, None, ["a"]]
NO_PROCESS: list[Any] = [{**HERE, "pid": pid} for pid in ("x", 0, -1, 1.5, 2**22 + 1, 10**30, True)]
NO_PROCESS += [{}, {**HERE, "stray": 1}, {**HERE, "started": 2**70}, {**HERE, "boot_id": "b\n"}, 1, None]
NO_LEASE: list[Any] = [0, -1, 301, 3600, 1e300, float("nan"), "30", True]


@pytest.mark.parametrize(
    ("offer", "complete", "field", "values"),
    [
        (BroadcastOffer, OFFER, "port", [0, 65536, 1.5, "1", True, 2**70]),
        (BroadcastOffer, OFFER, "world_size", [1, 2.5, "2", 10**6]),
        (BroadcastOffer, OFFER, "backend", ["mpi", "gloo\n", 1]),
        (BroadcastOffer, OFFER, "timeout_s", [0, 3601, float("inf"), "1"]),
        (BroadcastOffer, OFFER, "bucket_bytes", [0, 2**33, 1.5]),
        (BroadcastOffer, OFFER, "lease_s", NO_LEASE),
        (BroadcastOffer, OFFER, "trainer", NO_NAME),
        (BroadcastOffer, OFFER, "address", NO_NAME),
        (BroadcastOffer, OFFER, "session", NO_NAME),
        (BroadcastOffer, OFFER, "stray", [1]),
        (SingleCopyOffer, ATTACH, "lease_s", NO_LEASE),
        (SingleCopyOffer, ATTACH, "trainer", NO_NAME),
        (SingleCopyOffer, ATTACH, "process", NO_PROCESS),
        (ReloadOffer, RELOAD, "timeout_s", [0, -1, 3601, "60", float("nan")]),
        (ReloadOffer, RELOAD, "manifest_digest", NO_NAME),
        (ReloadOffer, RELOAD, "process", NO_PROCESS[:-1]),
        (AdapterOffer, ADAPTER, "lease_s", NO_LEASE),
        (AdapterOffer, ADAPTER, "session", NO_NAME),
        (AdapterOffer, ADAPTER, "rank", [0, 1.5, "8", 10**6]),
        (AdapterOffer, ADAPTER, "process", NO_PROCESS),
    ],
)
def test_an_offer_with_a_field_of_another_type_or_out_of_range_is_refused_by_name(
    offer: Any, complete: dict[str, Any], field: str, values: list[Any]
) -> None:
    assert parse_offer(complete, offer).session == "s"
    for value in values:
        with pytest.raises(WrongValue, match=field) as refused:
            parse_offer({**complete, field: value}, offer)
        assert str(refused.value).isascii()
        assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "body", [[], "x", None, 1, {}, {**OFFER, "port": []}, {**OFFER, "kind": "mpi"}, {**OFFER, "kind": []}]
)
def test_what_is_no_offer_at_all_is_refused(body: Any) -> None:
    with pytest.raises(WrongValue, match="session offer"):
        parse_offer(body, BroadcastOffer)


def test_whole_floats_are_integers_in_an_offer() -> None:
    assert parse_offer({**OFFER, "port": 9001.0, "lease_s": 300}, BroadcastOffer) == BroadcastOffer(
        **{**OFFER, "port": 9001, "lease_s": 300.0}
    )


def test_a_whole_version_is_announced_as_protocol_1_does() -> None:
    """Older servers read a number, and older trainers write one."""
    assert Announced(7).encoded() == "7"
    for announced in (Announced(7), Announced(0), Announced(8, base=7), Announced(1, base=0)):
        assert Announced.decoded(announced.encoded().encode()) == announced
