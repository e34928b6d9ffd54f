"""Who sends what in a broadcast by several ranks: every byte once, whatever the shapes, the mesh and the buckets."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.wire import senders as wire
from atroposlib.wire.bridge import DTYPE_BYTES, Manifest, Senders, lay_out
from atroposlib.wire.senders import block, expect_layouts, layout_digest, messages
from vllm_patching.several_senders import unpack

SHAPES = [
    st.tuples(st.integers(1, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 7)),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)),
]


def served(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> Manifest:
    """Tensors t0, t1, ...; two at a time are one parameter of vLLM's, as in a fused layer."""
    named = [(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    tensors = tuple(lay_out([(f"v{i}", named[i : i + 2]) for i in range(0, len(named), 2)]))
    return Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Manifest, Senders, int, int]:
    """What is served, who sends, in buckets of which size; and from how many bytes on a block travels alone."""
    shapes = draw(st.lists(st.one_of(SHAPES), min_size=1, max_size=6))
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    tp_dims: dict[str, int] = {}
    if (tp := draw(st.integers(1, 3))) > 1:
        for i, shape in enumerate(shapes):
            dim = draw(st.none() | st.integers(0, len(shape) - 1))
            tp_dims |= {} if dim is None else {f"t{i}": dim}
    senders = Senders(draw(st.integers(1, 4)), tp, tp_dims)
    return (
        served(shapes, [dtype] * len(shapes)),
        senders,
        draw(st.sampled_from([1, 100, 1 << 20])),
        draw(st.integers(1, 200)),
    )


@given(transfers())
def test_every_byte_is_sent_exactly_once_and_comes_to_its_place(made: tuple[Manifest, Senders, int, int]) -> None:
    manifest, senders, bucket_bytes, alone_bytes = made
    image = torch.randint(0, 256, (manifest.nbytes,), dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "ALONE_BYTES", alone_bytes)
        for bucket in manifest.buckets(bucket_bytes):
            sent = image[bucket.start : bucket.end]
            received = torch.zeros_like(sent)
            times = torch.zeros_like(sent)  # that each byte has been sent
            for sender in range(senders.count):
                for message in messages(bucket, senders, sender):
                    packed = torch.zeros(message.nbytes, dtype=torch.uint8)
                    for (tensor, part), place in message.packed():
                        dtype = getattr(torch, tensor.dtype)
                        whole = sent[tensor.offset - bucket.start :][: tensor.nbytes].view(dtype).view(tensor.shape)
                        held = whole[tuple(slice(each.start, each.stop) for each in part)]
                        packed[place].view(dtype).copy_(held.reshape(-1))
                    once = received.clone()
                    if (place_in_bucket := message.in_bucket) is not None:
                        once[place_in_bucket] = packed
                        times[place_in_bucket] += 1
                    else:
                        unpack(message, packed, bucket, once)
                        ones = torch.zeros_like(sent)
                        unpack(message, bytes_of_ones(message), bucket, ones)
                        times += ones
                    received = once
            for tensor in bucket.tensors:
                start = tensor.offset - bucket.start
                assert torch.equal(received[start : start + tensor.nbytes], sent[start : start + tensor.nbytes])
                assert (times[start : start + tensor.nbytes] == 1).all()


def bytes_of_ones(message: wire.Message) -> torch.Tensor:
    return torch.ones(message.nbytes, dtype=torch.uint8)


def test_fsdp_ranks_send_rows_as_torch_chunks_them() -> None:
    manifest = served([(5, 2)], ["float32"])
    parts = [block(manifest.tensors[0], Senders(4), sender)[0] for sender in range(4)]
    assert [len(part) for part in parts] == [2, 2, 1, 0]
    assert [len(rows) for rows in torch.arange(5).chunk(4)] == [2, 2, 1]


def test_what_tensor_parallelism_does_not_cut_is_sent_by_its_first_ranks() -> None:
    manifest = served([(4, 6), (4, 6)], ["float32"] * 2)
    senders = Senders(2, 2, {"t0": 1})
    sizes = [
        [math.prod(map(len, block(tensor, senders, sender))) for sender in range(4)] for tensor in manifest.tensors
    ]
    assert sizes == [[6, 6, 6, 6], [12, 0, 12, 0]]


def test_large_blocks_travel_as_they_lie_and_the_others_together() -> None:
    manifest = served([(600, 500), (3, 5), (2,)], ["float32"] * 3)
    (bucket,) = manifest.buckets(1 << 30)
    large, small = messages(bucket, Senders(2), 1)
    assert large.in_bucket == slice(600_000, 1_200_000)
    assert small.in_bucket is None
    assert [piece.tensor.name for piece in small.pieces] == ["t1", "t2"]
    assert small.nbytes == 24 + 4  # 20 bytes, and the next multiple of 8


def test_tensors_of_two_dtypes_are_packed_where_each_can_be_read() -> None:
    manifest = served([(3,), (3,), (3,)], ["bfloat16", "float32", "bfloat16"])
    (bucket,) = manifest.buckets(1 << 30)
    (message,) = messages(bucket, Senders(1), 0)
    assert [place.start for _, place in message.packed()] == [0, 8, 24]


@pytest.mark.parametrize(
    ("senders", "says"),
    [
        (Senders(2, 1, {}, ("x", "x")), r"sender 0 divides the tensors differently \(layout x, here \w{12}\)"),
        (Senders(2, 1, {}, ("x",)), "1 layouts for 2 senders"),
        (Senders(1, 2, {"t9": 0}, ("x", "x")), "tensor parallelism cuts t9, which does not exist"),
        (Senders(1, 2, {"t0": 2}, ("x", "x")), "tensor parallelism cuts t0 along dimension 2, but it has 2"),
    ],
)
def test_another_layout_is_refused_by_sender(senders: Senders, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        expect_layouts(served([(4, 6)], ["float32"]), 1 << 20, senders)


def test_the_layout_knows_rows_order_and_buckets() -> None:
    manifest = served([(4, 6), (5, 2), (300, 300)], ["float32"] * 3)
    buckets = manifest.buckets(1 << 20)
    digests = {layout_digest(buckets, Senders(2), 0), layout_digest(buckets, Senders(2), 1)}
    digests |= {layout_digest(buckets, Senders(4), 0), layout_digest(buckets, Senders(2, 2), 1)}
    digests |= {layout_digest(buckets, Senders(2, 2, {"t0": 1}), 0)}
    digests |= {layout_digest(manifest.buckets(1), Senders(2), 0)}
    assert len(digests) == 6
    layouts = tuple(layout_digest(buckets, Senders(2), sender) for sender in range(2))
    expect_layouts(manifest, 1 << 20, Senders(2, 1, {}, layouts))
