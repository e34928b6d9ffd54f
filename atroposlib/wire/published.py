"""The tensors of published files, and those that a model has in memory: experts are apart there, and stacked here.

    X.experts.3.gate_proj.weight [width, in] ┐
    X.experts.3.up_proj.weight   [width, in] ┴─▶ X.experts.gate_up_proj [experts, 2 width, in], its expert 3
    X.experts.3.down_proj.weight [in, width] ──▶ X.experts.down_proj    [experts, in, width]

Mixtral's files call them w1, w3 and w2, and its layer block_sparse_moe instead of mlp. All other tensors are alike.
Trainer, server and launcher read and write by this. Files with stacked experts are read as they are.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

Shape = tuple[int, ...]

APART = re.compile(r"(.*\.experts)\.(\d{1,5})\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
FAMILIES = {  # Hugging Face model types: what their files call the parts of a stacked tensor
    "qwen3_moe": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    "mixtral": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
}
PLACES = {  # the stacked tensor that such a part belongs to, and which of its parts it is
    part: (leaf, index)
    for parts in FAMILIES.values()
    for leaf, names in parts.items()
    for index, part in enumerate(names)
}


class InFiles(Struct, frozen=True):
    """A tensor in memory: its shape, and its name in the files, or the names of each expert's parts."""

    shape: Shape
    name: str = ""
    experts: tuple[tuple[str, ...], ...] = ()


class PartInFiles(Struct, frozen=True):
    """A tensor in the files: of a tensor in memory `rows` from `start` of one expert, or all of it."""

    name: str
    shape: Shape
    expert: int | None = None
    start: int = 0

    @property
    def index(self) -> Any:
        """The part of the tensor in memory, as an index."""
        return ... if self.expert is None else (self.expert, slice(self.start, self.start + self.shape[0]))


def hugging_face_name(name: str) -> str:
    """A name in Mixtral's files, or of vLLM's, as transformers has it; any other as it is."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def in_memory(files: Mapping[str, Shape]) -> dict[str, InFiles]:
    """Map names to what a model of these files has in memory. Raises ValueError where part of an expert is missing."""
    tensors: dict[str, InFiles] = {}
    stacks: dict[str, dict[int, dict[int, str]]] = {}  # of each stacked tensor: expert -> part -> name
    for name, shape in files.items():
        if match := APART.fullmatch(name):
            leaf, part = PLACES[match[3]]
            stack = stacks.setdefault(f"{hugging_face_name(match[1])}.{leaf}", {})
            stack.setdefault(int(match[2]), {})[part] = name
        else:
            tensors[hugging_face_name(name)] = InFiles(shape, name)
    return tensors | {name: _stack(name, experts, files) for name, experts in stacks.items()}


def _stack(name: str, experts: Mapping[int, Mapping[int, str]], files: Mapping[str, Shape]) -> InFiles:
    parts = 2 if name.endswith(".gate_up_proj") else 1
    for expert in range(len(experts)):
        if len(experts.get(expert, {})) != parts:
            raise ValueError(f"{name} has {len(experts)} experts in the files, of which expert {expert} is not whole")
    names = tuple(tuple(experts[expert][part] for part in range(parts)) for expert in range(len(experts)))
    shapes = {files[part] for expert in names for part in expert}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(
            f"the experts of {name} have the shapes {sorted(shapes)[:3]} in the files, not one of two sizes"
        )
    ((rows, columns),) = shapes
    return InFiles((len(experts), parts * rows, columns), experts=names)


def in_files(name: str, shape: Shape, model_type: str) -> Iterator[PartInFiles]:
    """Yield what the published files of a model of that type have of a tensor in memory."""
    match = STACKED.fullmatch(name)
    if model_type == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if match is None or model_type not in FAMILIES:
        yield PartInFiles(name, shape)
        return
    parts = FAMILIES[model_type][match[2]]
    rows = shape[1] // len(parts)
    for expert in range(shape[0]):
        for index, part in enumerate(parts):
            name_in_files = f"{name.rpartition('.')[0]}.{expert}.{part}.weight"
            yield PartInFiles(name_in_files, (rows, *shape[2:]), expert, index * rows)
