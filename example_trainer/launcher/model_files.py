"""Names and shapes of a model's weights, read from the headers of its files."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from example_trainer.model_size import config_file, read_config

CHECKPOINT_BUFFERS = ("rotary_emb.inv_freq",)  # in old checkpoints, no parameter


@dataclass(frozen=True)
class Model:
    """What config.json and the headers of the safetensors files tell."""

    source: str
    shapes: Mapping[str, tuple[int, ...]]
    heads: int
    kv_heads: int

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_model(name: str) -> Model | None:
    """A local directory, or what the hub's cache holds of a repository; None if its weights are not on this machine."""
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
    heads = config["num_attention_heads"]
    return Model(name, shapes, heads, config.get("num_key_value_heads") or heads)


def safetensors_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes out of the file's header: 8 bytes of length, then JSON."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, tuple(entry["shape"])
