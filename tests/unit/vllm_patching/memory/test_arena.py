"""The arena with hand-made fused, sharded and padded parameters; no vLLM."""

from functools import partial

import pytest
import torch
from torch import nn

from atroposlib.wire.bridge import Manifest, Shard, lay_out
from vllm_patching.memory.arena import Arena, Staging


class Fused(nn.Module):
    """One rank of a model: qkv rows fused, an output projection split by columns, an embedding with a padding row, a
    norm; three experts with gate over up, each split by rows, and their output projections.
    """

    def __init__(self, tp_size: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(6 // tp_size + 1, 4))
        self.qkv = nn.Parameter(torch.zeros((4 + 2 + 2) // tp_size, 4))
        self.out = nn.Parameter(torch.zeros(4, 4 // tp_size))
        self.norm = nn.Parameter(torch.zeros(4))
        self.w13 = nn.Parameter(torch.zeros(3, 8 // tp_size, 4))
        self.w2 = nn.Parameter(torch.zeros(3, 4, 4 // tp_size))


GATE_UP, DOWN = "model.mlp.experts.gate_up_proj", "model.mlp.experts.down_proj"
HF_SHAPES = {
    "embed": (6, 4),
    "q": (4, 4),
    "k": (2, 4),
    "v": (2, 4),
    "out": (4, 4),
    "norm": (4,),
    GATE_UP: (3, 8, 4),
    DOWN: (3, 4, 4),
}


def shards(rank: int, tp: int) -> list[Shard]:
    def rows(name: str, vllm: str, start: int) -> Shard:
        length = HF_SHAPES[name][0] // tp
        return Shard(name, vllm, 0, start, length, rank * length, HF_SHAPES[name])

    return [
        rows("embed", "embed", 0),
        rows("q", "qkv", 0),
        rows("k", "qkv", 4 // tp),
        rows("v", "qkv", 6 // tp),
        Shard("out", "out", 1, 0, 4 // tp, rank * 4 // tp, (4, 4)),
        Shard("norm", "norm", 0, 0, 4, 0, (4,)),
        *(Shard(GATE_UP, "w13", 1, i * 4 // tp, 4 // tp, i * 4 + rank * 4 // tp, (3, 8, 4)) for i in range(2)),
        Shard(DOWN, "w2", 2, 0, 4 // tp, rank * 4 // tp, (3, 4, 4)),
    ]


def manifest() -> Manifest:
    fused = {
        "embed": ["embed"],
        "qkv": ["q", "k", "v"],
        "out": ["out"],
        "norm": ["norm"],
        "w13": [GATE_UP],
        "w2": [DOWN],
    }
    tensors = tuple(
        lay_out([(name, [(part, HF_SHAPES[part], "float32") for part in parts]) for name, parts in fused.items()])
    )
    return Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)


def wire_image(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    image = torch.zeros(manifest().nbytes, dtype=torch.uint8)
    for tensor in manifest().tensors:
        image[tensor.offset : tensor.offset + tensor.nbytes] = weights[tensor.name].reshape(-1).view(torch.uint8)
    return image


def fill(sent: torch.Tensor, buffer: torch.Tensor) -> None:
    buffer.copy_(sent)


def receive_into(staging: Staging, weights: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    image = wire_image(weights)
    for bucket in manifest().buckets(bucket_bytes):
        staging.receive(bucket, partial(fill, image[bucket.start : bucket.end]))()


def receive_all(arena: Arena, weights: dict[str, torch.Tensor], bucket_bytes: int) -> Staging:
    staging = arena.make_staging()
    receive_into(staging, weights, bucket_bytes)
    return staging


def new_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in HF_SHAPES.items()}


def expected(weights: dict[str, torch.Tensor], rank: int, tp: int) -> dict[str, torch.Tensor]:
    def part(name: str, dim: int = 0) -> torch.Tensor:
        return weights[name].chunk(tp, dim)[rank]

    return {
        "embed": part("embed"),
        "qkv": torch.cat([part("q"), part("k"), part("v")]),
        "out": part("out", 1),
        "norm": weights["norm"],
        "w13": torch.cat([half.chunk(tp, 1)[rank] for half in weights[GATE_UP].chunk(2, 1)], 1),
        "w2": part(DOWN, 2),
    }


def check(rank: int, tp: int, bucket_bytes: int, *, on_host: bool) -> None:
    model = Fused(tp)
    model.embed.data[-1] = 7.0  # padding row: never sent, must survive every commit
    arena = Arena(model, manifest(), shards(rank, tp), staging_on_host=on_host)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    weights = new_weights()
    staging = receive_all(arena, weights, bucket_bytes)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters()), (
        "receiving must not touch live weights"
    )
    arena.commit(staging)
    for name, value in expected(weights, rank, tp).items():
        live = dict(model.named_parameters())[name]
        assert torch.equal(live[: value.shape[0]], value), name
    assert torch.equal(model.embed[-1], torch.full((4,), 7.0))


STAGING = pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])


@STAGING
def test_one_rank_receives_and_commits_exactly(on_host: bool) -> None:
    for bucket_bytes in (1, 300, 1 << 20):
        check(0, 1, bucket_bytes, on_host=on_host)


@STAGING
def test_each_of_two_ranks_takes_its_shards(on_host: bool) -> None:
    for rank in (0, 1):
        for bucket_bytes in (1, 300, 1 << 20):
            check(rank, 2, bucket_bytes, on_host=on_host)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@STAGING
def test_a_bucket_that_is_received_on_the_live_weights_begins_as_they_are(
    tp: int, bucket_bytes: int, on_host: bool
) -> None:
    """Nothing is sent, so what is staged is what is live."""
    for rank in range(tp):
        model = Fused(tp)
        arena = Arena(model, manifest(), shards(rank, tp), staging_on_host=on_host)
        arena.commit(receive_all(arena, new_weights(), bucket_bytes))
        staging = arena.make_staging()
        staging.buffer.fill_(1)
        for bucket in manifest().buckets(bucket_bytes):
            staging.receive(bucket, lambda buffer: None, on_live=True)()
        staged = arena.views(staging.buffer)
        for name, value in expected(new_weights(), rank, tp).items():
            assert torch.equal(staged[name][: len(value)], value), name


def test_a_commit_from_host_memory_leaves_every_parameter_in_its_place() -> None:
    """Captured CUDA graphs hold their addresses."""
    model = Fused(1)
    arena = Arena(model, manifest(), shards(0, 1), staging_on_host=True)
    first = places(model)
    for seed in range(2):
        arena.commit(receive_all(arena, {name: value + seed for name, value in new_weights().items()}, 300))
        assert places(model) == first


def places(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_second_transfer_reuses_the_former_live_buffer() -> None:
    model = Fused(1)
    model.embed.data[-1] = 7.0  # a padding row
    arena = Arena(model, manifest(), shards(0, 1))
    first = places(model)
    staging = receive_all(arena, new_weights(), 1 << 20)
    arena.commit(staging)
    assert set(places(model).values()).isdisjoint(first.values())
    again = {name: value + 1 for name, value in new_weights().items()}
    receive_into(staging, again, 1 << 20)
    arena.commit(staging)
    assert places(model) == first
    for name, value in expected(again, 0, 1).items():
        assert torch.equal(dict(model.named_parameters())[name][: len(value)], value), name
    assert model.embed[-1].tolist() == [7.0] * 4


@pytest.mark.parametrize("bucket_bytes", [1, 128])  # one tensor each; q, k and v together
def test_whole_tensors_land_without_a_scratch_copy(bucket_bytes: int) -> None:
    arena = Arena(Fused(1), manifest(), shards(0, 1))
    staging = arena.make_staging()
    start, end = staging.buffer.data_ptr(), staging.buffer.data_ptr() + staging.buffer.numel()
    (qkv,) = (bucket for bucket in manifest().buckets(bucket_bytes) if bucket.tensors[0].name == "q")
    assert len(qkv.tensors) == (1 if bucket_bytes == 1 else 3)
    received: list[int] = []
    staging.receive(qkv, lambda buffer: received.append(buffer.data_ptr()))
    assert start <= received[0] < end


def test_tensors_that_the_rank_holds_in_another_order_than_they_travel_are_taken_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.zeros(64))
            self.second = nn.Parameter(torch.zeros(64))

    tensors = tuple(lay_out([(name, [(name, (64,), "float32")]) for name in ("second", "first")]))
    order = Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)
    model = Two()
    arena = Arena(model, order, [Shard(name, name, 0, 0, 64, 0, (64,)) for name in ("first", "second")])
    staging = arena.make_staging()
    (bucket,) = order.buckets(1 << 20)
    image = torch.zeros(order.nbytes, dtype=torch.uint8)
    for tensor, value in zip(order.tensors, (2.0, 1.0), strict=True):
        image[tensor.offset : tensor.offset + tensor.nbytes] = torch.full((64,), value).view(torch.uint8)
    staging.receive(bucket, partial(fill, image))()
    arena.commit(staging)
    assert (model.first.tolist(), model.second.tolist()) == ([1.0] * 64, [2.0] * 64)
