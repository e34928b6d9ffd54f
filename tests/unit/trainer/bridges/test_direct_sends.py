"""What each trainer rank sends of a model that FSDP2, replicas and tensor parallelism divide: real DTensors, of which
every rank is looked at in turn, in a process group that carries nothing.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from atroposlib.wire.bridge import BroadcastOffer, Bucket, Senders
from atroposlib.wire.senders import group_name, messages, sender_ack_key
from example_trainer.bridges.base import BridgeError
from example_trainer.bridges.direct import NCCL_SENDERS, CannotSend, RowSender, chosen, senders_of, with_layouts
from example_trainer.model.files import WeightFiles
from example_trainer.model.policy import Policy
from example_trainer.ranks.partition import local
from example_trainer.settings.bridges import Broadcast
from example_trainer.weights.fsdp import load_shards, shard
from example_trainer.weights.gathered import Memory, RankSends, ShardedModel
from example_trainer.weights.source import pack
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.fakes import tiny_model
from tests.unit.trainer.weights.test_weight_sources import served_as, values
from vllm_patching import transport
from vllm_patching.several_senders import SeveralSenders, unpack

CPU = torch.device("cpu")
MESHES = [
    {"shard": 1},
    {"shard": 2},
    {"shard": 3},
    {"shard": 4},
    {"replicate": 2, "shard": 2},
    {"shard": 2, "tp": 2},
    {"shard": 1, "tp": 2},
    {"replicate": 2, "shard": 2, "tp": 2},
]


@contextlib.contextmanager
def as_rank(
    rank: int, sizes: Mapping[str, int], whole: PreTrainedModel
) -> Iterator[tuple[dict[str, Tensor], DeviceMesh]]:
    """The parameters that this rank of a mesh holds of `whole`, as the trainer divides and loads them."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes.values()))
    try:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        with torch.device("meta"):
            model = type(whole)(whole.config)
        policy, files = Policy(model), cast(WeightFiles, None)
        shard(policy, mesh, dtype=torch.float32)
        load_shards(policy, files, CPU, dict(whole.named_parameters()))
        yield dict(model.named_parameters()), mesh
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # which knows meshes, but not whose


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize(
    ("family", "dtype", "bucket_bytes"), [("qwen2", "float32", 5000), ("qwen3", "bfloat16", 1 << 30)]
)
def test_what_all_ranks_send_is_the_whole_image_once(
    sizes: dict[str, int], family: str, dtype: str, bucket_bytes: int
) -> None:
    whole = tiny_model(family, tie_word_embeddings=True)
    manifest, world = served_as(whole, dtype), math.prod(sizes.values())
    buckets = manifest.buckets(bucket_bytes)
    received = [torch.zeros(bucket.end - bucket.start, dtype=torch.uint8) for bucket in buckets]
    sent = 0
    for rank in range(world):
        model = tiny_model(family, tie_word_embeddings=True)
        with as_rank(rank, sizes, model) as (parameters, mesh):
            senders, sender = senders_of(parameters), RowSender(parameters, CPU, mesh)
            assert senders.count == world // sizes.get("replicate", 1)
            if (number := sender._number(senders)) is None:
                continue
            sender._expect_blocks(manifest, senders, number)
            for bucket, buffer in zip(buckets, received, strict=True):
                carried = messages(bucket, senders, number)
                for message, packed in zip(carried, sender._bytes(carried, Memory()), strict=True):
                    assert (packed.dtype, packed.shape) == (torch.uint8, (message.nbytes,))
                    sent += sum(piece.nbytes for piece in message.pieces)
                    if (place := message.in_bucket) is not None:
                        buffer[place] = packed
                    else:
                        unpack(message, packed, bucket, buffer)
    assert sent == sum(tensor.nbytes for tensor in manifest.tensors)
    for bucket, buffer in zip(buckets, received, strict=True):
        assert torch.equal(buffer, pack(bucket, values(whole).__getitem__, CPU))


def sharded(parameters: Mapping[str, Tensor]) -> ShardedModel:
    """A model with these parameters, none of whose ranks can be asked."""
    model: Any = nn.ParameterDict({name.replace(".", "/"): parameter for name, parameter in parameters.items()})

    def nobody(*_: object) -> Any:
        raise AssertionError("asked a rank")

    sends = RankSends(nobody, nobody, nobody)
    return ShardedModel(model, sharded=nobody, gather=nobody, sends=sends, device=CPU, logprobs=nobody)  # type: ignore[arg-type]


NEW = {"http://a": 2}


def test_several_ranks_send_for_themselves_where_all_servers_can(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with as_rank(0, {"shard": 2}, tiny_model()) as (parameters, _):
        direct = chosen("auto", sharded(parameters), "gloo", "127.0.0.1", NEW)
        assert direct is not None
        assert direct.senders == Senders(2)
        assert "2 trainer ranks send what they hold (direct)" in caplog.text
        assert chosen("gathered", sharded(parameters), "gloo", "127.0.0.1", NEW) is None
        assert "Trainer rank 0 sends the weights of all ranks: --bridge-sends gathered" in caplog.text
        assert chosen("gathered", sharded(parameters), "gloo", "127.0.0.1", NEW, only_changes=True) is None
        assert "ranks: with --bridge-delta, only rank 0 sends changes" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "backend", "protocols", "says"),
    [
        ({"shard": 1}, "gloo", NEW, "one trainer rank holds all weights"),
        ({"replicate": 2, "shard": 1}, "gloo", NEW, "one trainer rank holds all weights"),
        ({"shard": 2}, "gloo", {"http://a": 2, "http://b": 1}, "the vLLM server at http://b speaks protocol 1"),
    ],
)
def test_rank_0_sends_where_ranks_or_servers_cannot(
    sizes: dict[str, int], backend: str, protocols: dict[str, int], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with as_rank(0, sizes, tiny_model()) as (parameters, _mesh):
        trained = sharded(parameters)
        assert chosen("auto", trained, backend, "127.0.0.1", protocols) is None
        assert f"Trainer rank 0 sends the weights of all ranks: {says}" in caplog.text
        with pytest.raises(BridgeError, match=f"--bridge-sends direct: {says}.*; use auto or gathered"):
            chosen("direct", trained, backend, "127.0.0.1", protocols)


def test_one_process_sends_alone() -> None:
    assert chosen("auto", TrainedModel(tiny_model()), "gloo", "127.0.0.1", NEW) is None
    with pytest.raises(BridgeError, match="the trainer has one rank"):
        chosen("direct", TrainedModel(tiny_model()), "gloo", "127.0.0.1", NEW)


def test_more_communicators_than_a_gpu_has_room_for_are_not_chosen_but_can_be() -> None:
    with as_rank(0, {"shard": 9}, tiny_model()) as (parameters, _mesh):
        assert chosen("auto", sharded(parameters), "nccl", "127.0.0.1", NEW) is None
        assert chosen("direct", sharded(parameters), "nccl", "127.0.0.1", NEW) is not None
        assert chosen("auto", sharded(parameters), "gloo", "127.0.0.1", NEW) is not None
    assert f"over nccl from at most {NCCL_SENDERS} ranks" in str(Broadcast.model_fields["sends"].description)


def test_ranks_of_other_machines_need_an_address_that_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with as_rank(0, {"shard": 2}, tiny_model()) as (parameters, _mesh):
        with pytest.raises(BridgeError, match=r"other machines do not reach --master-addr 127\.0\.0\.1"):
            chosen("direct", sharded(parameters), "gloo", "127.0.0.1", NEW)
        assert chosen("direct", sharded(parameters), "gloo", "192.0.2.1", NEW) is not None


@pytest.mark.parametrize(
    ("names", "placements", "says"),
    [
        (("shard",), [Shard(1)], r"w is placed as S\(1\) on the dimension shard"),
        (("replicate",), [Shard(0)], r"w is placed as S\(0\) on the dimension replicate"),
        (("pipeline",), [Shard(0)], r"w is on a mesh with the dimensions \['pipeline'\]"),
        (("shard",), [Replicate()], r"w is placed as R on the dimension shard"),
    ],
)
def test_weights_that_are_divided_otherwise_are_gathered(
    names: tuple[str, ...], placements: Sequence[Any], says: str
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
        with pytest.raises(CannotSend, match=says):
            senders_of({"w": DTensor.from_local(torch.zeros(4, 4), mesh, placements, run_check=False)})
    finally:
        dist.destroy_process_group()


def test_key_value_heads_that_several_ranks_hold_are_gathered() -> None:
    with as_rank(1, {"shard": 1, "tp": 2}, tiny_model(num_key_value_heads=1)) as (parameters, _):
        says = r"several trainer ranks hold each key-value head, as of model\.layers\.0\.self_attn\.k_proj\.weight"
        with pytest.raises(CannotSend, match=says):
            senders_of(parameters)


def test_a_rank_that_holds_something_else_does_not_join() -> None:
    whole = tiny_model()
    manifest = served_as(whole, "float32")
    with as_rank(1, {"shard": 2}, whole) as (parameters, mesh):
        held, senders = RowSender(parameters, CPU, mesh), senders_of(parameters)
        offer = BroadcastOffer(
            session="s",
            trainer="h:1",
            lease_s=9.0,
            address="127.0.0.1",
            port=1,
            world_size=2,
            backend="gloo",
            manifest_digest=manifest.digest(),
            bucket_bytes=1 << 20,
            timeout_s=1.0,
            senders=with_layouts(Senders(3), manifest, 1 << 20),
        )
        assert senders == Senders(2)
        with pytest.raises(CannotSend, match=r"this rank holds \[16\], and should send \(range\(11, 22\),\)"):
            held.join(offer, manifest)


def test_a_bucket_is_not_overwritten_while_it_is_sent_and_each_transfer_has_the_weights_of_its_time() -> None:
    """Two ranks and a worker over real groups; buckets larger than sockets hold, and a worker that is slow."""
    whole = tiny_model(vocab_size=1 << 17, hidden_size=64, tie_word_embeddings=False)
    manifest, bucket_bytes = served_as(whole, "bfloat16"), 16 << 20
    ranks: list[RowSender] = []
    for rank in range(2):
        with as_rank(rank, {"shard": 2}, whole) as (parameters, mesh):
            ranks.append(RowSender(parameters, CPU, mesh))
            senders = with_layouts(senders_of(parameters), manifest, bucket_bytes)
    store, port = transport.host_store("127.0.0.1", 0, 30)
    offer = BroadcastOffer(
        session="s",
        trainer="h:1",
        lease_s=9.0,
        address="127.0.0.1",
        port=port,
        world_size=2,
        backend="gloo",
        manifest_digest=manifest.digest(),
        bucket_bytes=bucket_bytes,
        timeout_s=30.0,
        senders=senders,
    )

    def worker(transfers: int) -> list[Tensor]:
        groups = [
            transport.join_groups(store, group_name("s", each), 1, 2, 30.0, "gloo", "127.0.0.1") for each in range(2)
        ]
        several, images = SeveralSenders(senders, groups), []
        for transfer in range(transfers):
            images.append(torch.zeros(manifest.nbytes, dtype=torch.uint8))
            for bucket in manifest.buckets(bucket_bytes):
                time.sleep(0.1)
                several.begin(bucket, images[-1][bucket.start : bucket.end])()
            for sender in range(2):
                store.set(sender_ack_key("s", transfer, 0, sender), "")
        return images

    with ThreadPoolExecutor(3) as pool:
        received = pool.submit(worker, 2)
        list(pool.map(lambda rank: rank.join(offer, manifest), ranks))
        expected = []
        for _ in range(2):
            expected.append(pack(Bucket(0, manifest.nbytes, manifest.tensors), values(whole).__getitem__, CPU))
            list(pool.map(lambda rank: rank.send("s"), ranks))
            with torch.no_grad():
                for parameter in [
                    *whole.parameters(),
                    *(local(each) for rank in ranks for each in rank._parameters.values()),
                ]:
                    parameter.mul_(1.5)
        for image, sent in zip(received.result(), expected, strict=True):
            assert torch.equal(image, sent)
    for each in ranks:
        each.leave("s")
