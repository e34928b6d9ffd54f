"""How many weights a model has, without loading it: of its config.json, or of its name."""

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]
KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
IN_A_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class ModelSize:
    """Its weights: in all, by name where config.json tells, and how that is known."""

    count: int
    shapes: Shapes | None
    source: str


def model_size(model: str) -> ModelSize | None:
    """The size of a local folder's model, or of a hub's whose config.json is on this machine; else by its name."""
    config = read_config(model)
    shapes = weight_shapes(config) if config is not None else None
    if shapes is not None:
        return ModelSize(sum(math.prod(shape) for shape in shapes.values()), shapes, "by its config.json")
    found = IN_A_NAME.search(os.path.basename(model).replace("-", " ").replace("_", " "))
    if found is None:
        return None
    scale = 10**9 if found[2].upper() == "B" else 10**6
    return ModelSize(int(float(found[1]) * scale), None, "by its name")


def read_config(model: str) -> dict[str, Any] | None:
    """The content of config.json, where this machine has it."""
    path = config_file(model)
    if path is None:
        return None
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config | (config.get("text_config") or {})


def config_file(model: str) -> Path | None:
    """That of a local folder, or what the hub's cache holds of a repository."""
    path = Path(model).expanduser() / "config.json"
    if path.is_file():
        return path
    if not HUB_ID.fullmatch(model):
        return None
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # no name that the hub would take
        cached = try_to_load_from_cache(model, "config.json")
        return Path(cached) if isinstance(cached, str) else None
    return None


def weight_shapes(config: Mapping[str, Any]) -> Shapes | None:
    """Names and shapes of a decoder's weights, tied ones once; None for an architecture that is not known here."""
    if not set(config.get("architectures") or ()) & set(KNOWN):
        return None
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    architecture = config["architectures"][0]
    biased = architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias"))
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj.weight": (heads * width, hidden),
            f"{attention}.k_proj.weight": (kv_heads * width, hidden),
            f"{attention}.v_proj.weight": (kv_heads * width, hidden),
            f"{attention}.o_proj.weight": (hidden, heads * width),
            f"{mlp}.gate_proj.weight": (inner, hidden),
            f"{mlp}.up_proj.weight": (inner, hidden),
            f"{mlp}.down_proj.weight": (hidden, inner),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
        if biased:
            shapes |= {f"{attention}.{name}_proj.bias": (count * width,) for name, count in _biases(heads, kv_heads)}
        if architecture == "Qwen3ForCausalLM":
            shapes |= {f"{attention}.{name}_norm.weight": (width,) for name in "qk"}
    return shapes


def _biases(heads: int, kv_heads: int) -> tuple[tuple[str, int], ...]:
    return (("q", heads), ("k", kv_heads), ("v", kv_heads))
