"""What training takes, told before anything is loaded: shared with vLLM, private, free; and a refusal with figures if
it does not fit.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from example_trainer.config import TrainerConfig
from example_trainer.errors import TrainerError
from example_trainer.modes import SingleCopy

FLOAT32 = 4  # bytes
MOMENTS = {
    "adamw": 2 * FLOAT32,
    "adamw_8bit": 2,
    "adafactor": 0,
}  # bytes a weight; Adafactor's are one number a row and column


@dataclass(frozen=True)
class Need:
    """One line of the table for one device."""

    what: str
    nbytes: int
    shared: bool = False


def needs(weights: Iterable[Tensor], config: TrainerConfig, *, reference: bool) -> list[Need]:
    """What training the shared `weights` of one device takes there; `reference` adds a frozen float32 copy for the KL
    term.
    """
    tensors = list(weights)
    count = sum(tensor.numel() for tensor in tensors)
    halves = sum(tensor.numel() for tensor in tensors if tensor.dtype == torch.bfloat16)
    mode = config.bridge
    mastered = 0 if isinstance(mode, SingleCopy) and mode.bf16_update == "stochastic" else halves
    lines = [
        Need("weights, vLLM's own", sum(tensor.nbytes for tensor in tensors), shared=True),
        Need("float32 masters of bfloat16 weights", FLOAT32 * mastered),
        Need("gradients", FLOAT32 * count - (2 * halves if not mastered else 0)),
        Need(f"moments of {config.optimizer}", MOMENTS[config.optimizer] * count),
        Need("reference model for --kl-coef", FLOAT32 * count if reference else 0),
        Need("logits, --logits-chunk-mb", 3 * (config.logits_chunk_mb << 20)),
    ]
    return [line for line in lines if line.nbytes]


def free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else psutil.virtual_memory().available


def memory_table(lines: list[Need], device: torch.device, free: int) -> str:
    """The table, and its verdict."""
    private = sum(line.nbytes for line in lines if not line.shared)
    rows = [
        f"  {line.what:<40} {line.nbytes / 1e6:>12.1f} MB  {'shared' if line.shared else 'private'}" for line in lines
    ]
    rows.append(f"  {'private in all, activations on top':<40} {private / 1e6:>12.1f} MB  of {free / 1e6:.0f} MB free")
    return "\n".join([f"Memory on {device}:", *rows])


def check_memory(lines: list[Need], device: torch.device, free: int) -> None:
    """Raise TrainerError if the private part does not fit."""
    private = sum(line.nbytes for line in lines if not line.shared)
    if private > free:
        raise TrainerError(
            f"training needs {private / 1e6:.0f} MB on {device} beside the shared weights, {free / 1e6:.0f} MB are free"
            f" ({math.ceil((private - free) / 1e6)} MB too little): give vLLM less KV cache (--gpu-memory-utilization,"
            " VLLM_CPU_KVCACHE_SPACE), take --optimizer adafactor, --bf16-update stochastic with a bfloat16 server, or"
            " a smaller model"
        )
