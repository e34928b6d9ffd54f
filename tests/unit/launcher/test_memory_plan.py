"""The size of a model without loading it, and what a run of it takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from example_trainer.config import TrainerConfig
from example_trainer.launcher import memory_plan
from example_trainer.launcher.layout import Placement
from example_trainer.launcher.model_size import ModelSize, model_size, weight_shapes

CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"head_dim": 32},
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_shapes_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    from example_trainer.model import meta_model

    model_type = architecture.removesuffix("ForCausalLM").lower()
    config = {"architectures": [architecture], "model_type": model_type, **SMALL, **CONFIGS[architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    real = {name: tuple(weight.shape) for name, weight in meta_model(str(tmp_path)).named_parameters()}
    assert weight_shapes(config) == real
    size = model_size(str(tmp_path))
    assert size is not None
    assert size.source == "by its config.json"


@pytest.mark.parametrize(
    ("name", "count"),
    [("Qwen/Qwen2.5-1.5B-Instruct", 15 * 10**8), ("org/SmolLM2-135M", 135 * 10**6), ("org/llama-3-8b", 8 * 10**9)],
)
def test_a_model_that_is_not_here_tells_by_its_name(name: str, count: int) -> None:
    assert model_size(name) == ModelSize(count, None, "by its name")


def test_some_models_do_not_tell() -> None:
    assert model_size("org/gpt-oss") is None
    assert weight_shapes({"architectures": ["OtherForCausalLM"]}) is None


def plan(placement: Placement, dtype: str, **bridge: Any) -> str:
    trainer = TrainerConfig(model_name="m", bridge=bridge)
    server = {"dtype": dtype, "gpu_memory_utilization": 0.4}
    size = ModelSize(10**9, None, "by its name")
    return memory_plan.memory_plan("m", size, trainer, server, {"VLLM_CPU_KVCACHE_SPACE": "2"}, placement)


def test_on_a_cpu_everything_is_in_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_memory", lambda: 64 * 10**9)
    shown = plan(Placement(), "float32", kind="broadcast").splitlines()
    amounts = {line.split("  ")[2].strip(): float(line.split()[-2]) for line in shown[2:]}
    assert amounts["vLLM: weights in float32"] == 4.0
    assert amounts["vLLM: staging buffer for new weights"] == 4.0
    assert amounts["vLLM: KV cache"] == 2.15
    assert amounts["trainer: moments of adamw"] == 8.0
    assert amounts["free now"] == 64.0
    parts = [value for name, value in amounts.items() if name not in ("in all", "free now")]
    assert amounts["in all"] == pytest.approx(sum(parts), abs=0.05)


def test_on_gpus_each_has_its_own() -> None:
    shown = plan(Placement(("0",), ("1",)), "bfloat16", kind="reload")
    vllm, trainer = shown.split("  GPU 0\n")[1].split("  GPU 1\n")
    assert "vLLM: weights in bfloat16                         2.00 GB" in vllm
    assert "vLLM takes 40% of the GPU" in vllm
    assert "trainer: gradients                                4.00 GB" in trainer
    assert "vLLM" not in trainer


def test_what_a_single_copy_shares_counts_once() -> None:
    shown = plan(Placement(("0", "1"), ("0", "1")), "bfloat16", kind="single_copy")
    assert shown.count("trainer: weights, vLLM's own                      1.00 GB  (vLLM's, counted there)") == 2
    assert shown.count("trainer: float32 masters of bfloat16 weights      2.00 GB") == 2


def test_an_unknown_size_is_said() -> None:
    trainer = TrainerConfig(model_name="m", bridge={"kind": "broadcast"})
    assert memory_plan.memory_plan("m", None, trainer, {}, {}, Placement()).startswith("Memory: not known")
