"""The size of a model without loading it: from its config.json, from a table, or from its name. Loads no torch."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from atroposlib.errors import reading
from atroposlib.flags import ConfigError
from example_trainer.memory.tp_plans import MOST, family_refusal, size_refusal, sizes, split_shapes

Shapes = dict[str, tuple[int, ...]]
KNOWN = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
IN_A_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![a-z])", re.IGNORECASE)
QWEN = re.compile(r"Qwen/(Qwen2\.5-[\d.]+B)(-Instruct)?")
PUBLISHED = {  # layers, width, feed-forward width, heads, key-value heads, vocabulary, tied embeddings
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 151_936, True),
    "Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen2.5-3B": (36, 2048, 11_008, 16, 2, 151_936, True),
    "Qwen2.5-7B": (28, 3584, 18_944, 28, 4, 152_064, False),
    "Qwen2.5-14B": (48, 5120, 13_824, 40, 8, 152_064, False),
    "Qwen2.5-32B": (64, 5120, 27_648, 40, 8, 152_064, False),
    "Qwen2.5-72B": (80, 8192, 29_568, 64, 8, 152_064, False),
}
BY_NAME = "by its name"
QWEN3_ID = re.compile(r"Qwen/(Qwen3-[\d.]+B(?:-A3B)?)(-Base|-(?:Instruct|Thinking)-2507)?")
QWEN3 = {  # the same, with heads of 128
    "Qwen3-0.6B": (28, 1024, 3072, 16, 8, 151_936, True),
    "Qwen3-1.7B": (28, 2048, 6144, 16, 8, 151_936, True),
    "Qwen3-4B": (36, 2560, 9728, 32, 8, 151_936, True),
    "Qwen3-8B": (36, 4096, 12_288, 32, 8, 151_936, False),
    "Qwen3-14B": (40, 5120, 17_408, 40, 8, 151_936, False),
    "Qwen3-32B": (64, 5120, 25_600, 64, 8, 151_936, False),
    "Qwen3-30B-A3B": (48, 2048, 6144, 32, 4, 151_936, False),
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}  # of the last
CONTEXTS = (  # by id: max_position_embeddings
    (re.compile(r"Qwen/(?:Qwen2\.5-[\d.]+B-Instruct)"), 32_768),
    (re.compile(r"Qwen/(?:Qwen3-[\d.]+B(?:-A3B)?-Base)"), 32_768),
    (re.compile(r"Qwen/(?:Qwen3-[\d.]+B(?:-A3B)?)"), 40_960),
    (re.compile(r"Qwen/(?:Qwen3-[\d.]+B(?:-A3B)?-(?:Instruct|Thinking)-2507)"), 262_144),
)
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")  # at least 1
OTHER_SIZES = ("num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "num_experts_per_tok")  # or 0
IN_A_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class ModelSize:
    """Describes a model's weights: how many in all, by name, and how that is known. A model of which only the name
    tells has the shapes of the known one nearest in size.
    """

    count: int
    shapes: Shapes
    source: str
    heads: int | None = None
    kv_heads: int | None = None
    experts_per_token: int = 0  # of a mixture of experts
    model_type: str | None = None  # its family, by Hugging Face's name
    window: int | None = None  # tokens that some layer sees, where it does not see all

    @cached_property
    def layers(self) -> int:
        """Decoder layers."""
        return len({match[1] for name in self.shapes if (match := IN_A_LAYER.search(name))}) or 1

    @cached_property
    def root(self) -> int:
        """Weights outside of the layers: embedding, final norm and head."""
        whole = sum(math.prod(shape) for shape in self.shapes.values())
        outside = sum(math.prod(shape) for name, shape in self.shapes.items() if not IN_A_LAYER.search(name))
        return outside * self.count // whole

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        return max(0, self.count - self.root) // self.layers

    @cached_property
    def head(self) -> int:
        """Weights of the head, which may be the embedding's."""
        return math.prod(self.shapes.get("lm_head.weight") or self.embedding)

    @property
    def tied(self) -> bool:
        return "lm_head.weight" not in self.shapes

    @cached_property
    def embedding(self) -> tuple[int, ...]:
        """Vocabulary and width."""
        return next((shape for name, shape in self.shapes.items() if "embed" in name), (1, 1))

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.embedding[-1]

    @property
    def largest(self) -> int:
        """Weights of the largest tensor."""
        return max(math.prod(shape) for shape in self.shapes.values())

    def out(self, module: str) -> int:
        """Features that a linear layer of a decoder layer gives, or its part of a fused one gives; 0 where there is no
        such layer.
        """
        if shape := self._matrix(module):
            return shape[0]
        queries = self._matrix("o_proj")[1:]
        if module in ("gate_proj", "up_proj"):
            return sum(self._matrix("gate_up_proj")[:1]) // 2
        if module in ("q_proj", "k_proj", "v_proj") and queries and (fused := self._matrix("qkv_proj")):
            return queries[0] if module == "q_proj" else (fused[0] - queries[0]) // 2
        return 0

    def _matrix(self, module: str) -> tuple[int, ...]:
        return next((shape for name, shape in self.shapes.items() if name.endswith(f".{module}.weight")), ())

    @cached_property
    def inner(self) -> int:
        """Features inside the feed-forward part of a layer, for one token: those of all experts that it takes."""
        experts = next((shape for name, shape in self.shapes.items() if name.endswith(".experts.down_proj")), None)
        return max(self.out("gate_proj"), self.experts_per_token * experts[2] if experts else 0)

    def split(self, tp: int) -> "ModelSize":
        """Return what one of `tp` ranks of tensor parallelism computes with."""
        if tp == 1:
            return self
        shapes = split_shapes(self.shapes, tp, self.kv_heads or tp)
        whole, own = (sum(map(math.prod, each.values())) for each in (self.shapes, shapes))
        heads = None if self.heads is None else -(-self.heads // tp)
        return replace(self, count=self.count * own // whole, shapes=shapes, heads=heads)

    def tp_refusal(self, tp: int) -> str | None:
        """Explain why `tp` ranks cannot split it, as far as its family and sizes are known; None if they can, or if
        that is not known.
        """
        if tp > 1 and self.model_type and (why := family_refusal(self.model_type, "this model")):
            return why
        return self.split_refusal(tp, "--tp-size")

    def split_refusal(self, tp: int, flag: str, most: int = MOST) -> str | None:
        """Explain why `tp` ranks, which `flag` asks for, cannot split each layer; None if they can, or if that is not
        known. It names other numbers up to `most`.
        """
        if self.heads is None or self.kv_heads is None:
            return None
        return size_refusal(sizes(self.heads, self.kv_heads, self.out("gate_proj")), tp, "this model", flag, most)

    def adapter(self, rank: int, modules: Iterable[str]) -> int:
        """Weights of a LoRA adapter: two matrices, [rank, in] and [out, rank], beside each [out, in]."""
        adapted = tuple(f".{module}.weight" for module in modules)
        return sum(rank * sum(shape) for name, shape in self.shapes.items() if name.endswith(adapted))


def model_size(model: str) -> ModelSize | None:
    """The size of a model, from its config.json where that is on this machine or in the table; else by its
    name. None where even that does not tell.
    """
    config = read_config(model)
    shapes = weight_shapes(config) if config is not None else None
    if config is not None and shapes is not None:
        return _sized(shapes, config, "by its config.json")
    known = QWEN.fullmatch(model) or QWEN3_ID.fullmatch(model)
    if known and known[1] in PUBLISHED | QWEN3:
        return published(known[1])
    match = IN_A_NAME.search(os.path.basename(model).replace("-", " ").replace("_", " "))
    if match is None:
        return None
    count = int(float(match[1]) * (10**9 if match[2].upper() == "B" else 10**6))
    nearest = min(map(published, PUBLISHED), key=lambda size: abs(math.log(size.count / count)))
    return ModelSize(count, nearest.shapes, BY_NAME)


def published(name: str) -> ModelSize:
    """A model of the tables."""
    layers, width, inner, heads, kv_heads, vocabulary, tied = (PUBLISHED | QWEN3)[name]
    family: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    if name in QWEN3:
        family = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    if name.endswith("-A3B"):
        family |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **EXPERTS}
    config = family | {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    return _sized(weight_shapes(config) or {}, config, "as published")


def size_of(
    shapes: Mapping[str, Iterable[int]],
    source: str = "by its config.json",
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    experts_per_token: int = 0,
) -> ModelSize:
    """The size of a model whose shapes are known otherwise."""
    plain = {name: tuple(shape) for name, shape in shapes.items()}
    count = sum(math.prod(shape) for shape in plain.values())
    return ModelSize(count, plain, source, heads, kv_heads, experts_per_token)


def _sized(shapes: Shapes, config: Mapping[str, Any], source: str) -> ModelSize:
    heads = config["num_attention_heads"]
    count = sum(math.prod(shape) for shape in shapes.values())
    chosen = config.get("num_experts_per_tok") or 0
    kv_heads = config.get("num_key_value_heads") or heads
    family = config.get("model_type")
    is_windowed = config.get("use_sliding_window", family in ("mistral", "mixtral"))  # Qwen says it in config.json
    window = config.get("sliding_window") if is_windowed else None
    return ModelSize(count, shapes, source, heads, kv_heads, chosen, family, window)


def context_of(model: str) -> int | None:
    """Tokens of context that a model's config.json names, here or as published; None where that is not known, or is
    stretched by scaling.
    """
    config = read_config(model)
    if config is None:
        return next((tokens for name, tokens in CONTEXTS if name.fullmatch(model)), None)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_scaled = (
        isinstance(scaling, dict) and (scaling.get("rope_type") or scaling.get("type") or "default") != "default"
    )
    limit = config.get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 and not is_scaled else None


def read_config(model: str) -> dict[str, Any] | None:
    """The content of config.json, where this machine has it. Raises ConfigError for what no model has."""
    path = config_file(model)
    if path is None:
        return None
    with reading(str(path), ConfigError, remedy="download or save the model again"):
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"expected keys and values, found {type(config).__name__}")
    text = config.get("text_config")
    found: dict[str, Any] = config | (text if isinstance(text, dict) else {})
    for key in (*SIZES, *OTHER_SIZES) if _is_known(found) else ():
        value = found.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < (key in SIZES)):
            raise ConfigError(
                f"{path}: {key}: expected a whole number, got {value!r}; download or save the model again"
            )
    return found


def config_file(model: str) -> Path | None:
    """That of a local directory, or what the hub's cache holds of a repository."""
    path = Path(os.path.expanduser(model)) / "config.json"
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
    """Names and shapes of a decoder's weights, tied ones once; None where its architecture or a size is not known."""
    if not _is_known(config) or any(config.get(key) is None for key in SIZES):
        return None  # what a config.json leaves out is its family's default
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
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
            **_feed_forward(config, index, mlp),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
        if biased:
            shapes |= {f"{attention}.{name}_proj.bias": (count * width,) for name, count in _biases(heads, kv_heads)}
        if architecture.startswith("Qwen3"):
            shapes |= {f"{attention}.{name}_norm.weight": (width,) for name in "qk"}
    return shapes


def _is_known(config: Mapping[str, object]) -> bool:
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(name in KNOWN for name in architectures)


def _feed_forward(config: Mapping[str, Any], layer: int, name: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    dense = layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % config.get("decoder_sparse_step", 1)
    if not experts or dense:
        return {
            f"{name}.gate_proj.weight": (inner, hidden),
            f"{name}.up_proj.weight": (inner, hidden),
            f"{name}.down_proj.weight": (hidden, inner),
        }
    inner = config.get("moe_intermediate_size") or inner
    return {
        f"{name}.experts.gate_up_proj": (experts, 2 * inner, hidden),
        f"{name}.experts.down_proj": (experts, hidden, inner),
        f"{name}.gate.weight": (experts, hidden),
    }


def _biases(heads: int, kv_heads: int) -> tuple[tuple[str, int], ...]:
    return (("q", heads), ("k", kv_heads), ("v", kv_heads))
