"""Names and shapes of a model's weights, read from the headers of its files."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from atroposlib.errors import AtroposError
from atroposlib.wire.published import in_memory
from example_trainer.memory.model_size import config_file, read_config

CHECKPOINT_BUFFERS = ("rotary_emb.inv_freq",)  # in old checkpoints, no parameter


@dataclass(frozen=True)
class Model:
    """Holds what config.json and the headers of the safetensors files tell."""

    source: str
    shapes: Mapping[str, tuple[int, ...]]
    heads: int
    kv_heads: int
    experts_per_token: int = 0  # of a mixture of experts
    model_type: str | None = None

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_model(name: str) -> Model | None:
    """A local directory, or what the hub's cache holds of a repository; None if its weights are not on this machine.
    Raises AtroposError where a part of an expert is missing.
    """
    path, config = config_file(name), read_config(name)
    files = sorted(path.parent.glob("*.safetensors")) if path else []
    if config is None or not files:
        return None
    shapes = {
        weight: shape
        for file in files
        for weight, shape in safetensors_shapes(file)
        if not weight.endswith(CHECKPOINT_BUFFERS)
    }
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    try:
        held = {weight: content.shape for weight, content in in_memory(shapes).items()}
    except ValueError as error:
        raise AtroposError(f"{name}: {error}; download or save the model again") from error
    heads = config["num_attention_heads"]
    chosen = config.get("num_experts_per_tok") or 0
    kv_heads = config.get("num_key_value_heads") or heads
    return Model(name, held, heads, kv_heads, chosen, config.get("model_type"))


def safetensors_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes out of the file's header: 8 bytes of length, then JSON."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, tuple(entry["shape"])
