"""The safetensors files of a model, read tensor by tensor or in parts, so that no process holds the whole model."""

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from atroposlib.wire.published import InFiles, in_memory
from example_trainer.model.loading import ModelError, reading_model
from vllm_patching.memory.experts import read_experts

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int64: "I64"}


class WeightFiles:
    """Opens the weight files of `source`, a hub id or a directory. Files are mapped, not read, until a part is asked
    for.
    """

    def __init__(self, source: str) -> None:
        self._folder = Path(source)
        if not self._folder.is_dir():
            with reading_model(source):
                self._folder = Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
        self._file_of: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    self._file_of[name] = path
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        try:
            self._tensors = in_memory(shapes)
        except ValueError as error:
            raise ModelError(f"{self._folder}: {error}; download or save the model again") from error
        self.shapes = {name: content.shape for name, content in self._tensors.items()}

        if not self._file_of:
            others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.gguf") for path in self._folder.glob(pattern))
            raise ModelError(
                f"{self._folder} contains no safetensors"
                + (f", only {', '.join(others[:3])}" if others else "")
                + ": single copy, several trainer ranks, bfloat16 and --offload start from them; save the model again"
                " with save_pretrained"
            )

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless the files hold `name` in this shape."""
        if self.shapes.get(name) != shape:
            found = list(self.shapes[name]) if name in self.shapes else "nothing with that name"
            raise ModelError(
                f"{self._folder} has {found} for {name} {list(shape)}: single copy and several trainer ranks start"
                " from safetensors"
            )

    def part(self, name: str, dim: int, start: int, length: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1) of a tensor, or whole experts (dim 0) of a stacked one; a scalar as it is."""
        held = self._tensors[name]
        if held.experts:
            return self._experts(held, start, length)
        with safe_open(self._file_of[held.name], "pt") as file:
            content = file.get_slice(held.name)
            if not self.shapes[name]:
                return torch.as_tensor(content[...])
            end = start + length
            rows: Tensor = content[start:end] if dim == 0 else content[:, start:end]
            return rows

    def block(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """Rows of a tensor, and of them all columns or these."""
        if columns is None:
            return self.part(name, 0, rows.start, len(rows))
        with safe_open(self._file_of[self._tensors[name].name], "pt") as file:
            values: Tensor = file.get_slice(self._tensors[name].name)[
                rows.start : rows.stop, columns.start : columns.stop
            ]
            return values

    def _experts(self, held: InFiles, start: int, length: int) -> Tensor:
        with ExitStack() as files:
            opened = cache(lambda path: files.enter_context(safe_open(path, "pt")))
            return read_experts(held, lambda name: opened(self._file_of[name]).get_tensor(name), start, length)


def safetensors_header(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]
) -> bytes:
    """Build what a safetensors file begins with; the tensors' bytes follow in this order, without gaps.

    The format (github.com/huggingface/safetensors): the header's length, then JSON.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
