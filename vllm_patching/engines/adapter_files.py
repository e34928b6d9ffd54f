"""Checks a PEFT adapter directory before vLLM reads it: its configuration, and that its tensors match it.

    adapter_config.json          types, rank, scaling, which layers
    adapter_model.safetensors    for each such layer a pair lora_A [rank, in], lora_B [out, rank] of finite floats

The layers' own sizes are known to the workers, which compare them before they load (worker.py).
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open

from atroposlib.errors import reading
from atroposlib.wire.typed import brief
from vllm_patching.engines.base import FileFault

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
NAME = re.compile(r"(?:base_model\.model\.)?(?P<layer>[\w.]{1,512})\.lora_(?P<side>[AB])\.weight", re.ASCII)

Rank = Annotated[int, Meta(ge=1, le=4096)]
Pairs = dict[str, list[int]]  # by the layer's tensors' common name: rank, in, out


class AdapterConfig(msgspec.Struct):
    """The fields of PEFT's LoraConfig that decide how tensors are used."""

    r: Rank
    lora_alpha: Annotated[float, Meta(gt=0, le=65536)]
    target_modules: list[str] | str
    base_model_name_or_path: str | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Annotated[float, Meta(gt=0, le=65536)]] | None = None

    @property
    def ranks(self) -> set[int]:
        return {self.r, *(self.rank_pattern or {}).values()}

    @property
    def largest_scale(self) -> float:
        alpha, rank = max([self.lora_alpha, *(self.alpha_pattern or {}).values()]), min(self.ranks)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(folder: Path) -> AdapterConfig:
    """Raises FileFault."""
    path = _regular(folder / CONFIG)
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise FileFault(f"{path} has more than {MAX_CONFIG_BYTES} bytes")
    with reading(str(path), FileFault):
        return msgspec.json.decode(path.read_bytes(), type=AdapterConfig)


def read_pairs(folder: Path, config: AdapterConfig, dtype: torch.dtype) -> Pairs:
    """The layers that have tensors, each tensor checked to be finite in `dtype`, which is served. Raises FileFault."""
    path = _regular(folder / WEIGHTS)
    shapes: dict[tuple[str, str], torch.Size] = {}
    with reading(str(path), FileFault, also=(SafetensorError,)), safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  it is not a mapping
            match = NAME.fullmatch(key)
            if match is None:
                raise FileFault(
                    f"{path}: {brief(key)} is not a tensor of a LoRA adapter (LAYER.lora_A.weight, .lora_B.weight)"
                )
            shapes[key.rpartition(".lora_")[0], match["side"]] = _checked(
                file.get_tensor(key), f"{path}: {key}", config, dtype
            )
    pairs = {name: _pair(path, name, shapes, config) for name, _ in shapes}
    _check_claim(path, set(pairs), config)
    return pairs


def _regular(path: Path) -> Path:
    """Reading a FIFO would wait forever."""
    if not path.is_file():
        raise FileFault(f"{path} is not a regular file")
    return path


def _checked(tensor: torch.Tensor, what: str, config: AdapterConfig, dtype: torch.dtype) -> torch.Size:
    if not tensor.is_floating_point() or tensor.ndim != 2:
        raise FileFault(
            f"{what} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}: expected a matrix of floats"
        )
    if not (tensor.to(dtype) * config.largest_scale).isfinite().all():
        raise FileFault(f"{what} contains NaN or infinity, or numbers beyond {str(dtype).removeprefix('torch.')}")
    return tensor.shape


def _pair(path: Path, name: str, found: dict[tuple[str, str], Any], config: AdapterConfig) -> list[int]:
    if missing := [side for side in "AB" if (name, side) not in found]:
        raise FileFault(f"{path}: {name} has no lora_{missing[0]}")
    (rank, inputs), (outputs, other_rank) = found[name, "A"], found[name, "B"]
    if rank != other_rank or rank not in config.ranks:
        raise FileFault(
            f"{path}: {name} has lora_A {[rank, inputs]} and lora_B {[outputs, other_rank]}: "
            f"expected [r, in] and [out, r] of rank {' or '.join(map(str, sorted(config.ranks)))}, as {CONFIG} says"
        )
    return [rank, inputs, outputs]


def _check_claim(path: Path, names: set[str], config: AdapterConfig) -> None:
    """The layers named by a list in the configuration are those that have tensors."""
    if not names:
        raise FileFault(f"{path} contains no tensors")
    if isinstance(config.target_modules, str):  # a regular expression, or a keyword of PEFT's
        return
    targets = {
        target: {name for name in names if f".{name}".endswith(f".{target}")} for target in config.target_modules
    }
    if without := sorted(target for target, adapted in targets.items() if not adapted):
        raise FileFault(f"{path} has no tensors for {brief(without)}, which {CONFIG} names")
    if others := sorted(names.difference(*targets.values())):
        raise FileFault(f"{path} has tensors for {brief(others)}, which {CONFIG} does not name")
